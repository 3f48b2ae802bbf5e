"""Texts as the inputs of Hugging Face models: padded rows, or packed into one row without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from requestzero.data.labels import IGNORED_LABEL

if TYPE_CHECKING:
    from torch import Tensor

Text = Mapping[str, Sequence[int]]
"""``"input_ids"`` and, where they differ, ``"labels"``: equally long lists of token ids."""


@dataclass(frozen=True)
class PaddedCollate:
    """``[texts, longest]`` int64 ``input_ids``, ``attention_mask`` and ``labels``, padded on the right.

    The first label of every text is -100: nothing precedes it that could predict it.
    """

    pad_id: int = 0
    """Token id of padding, which is neither attended to nor trained on."""
    layout: ClassVar[str] = "padded"

    def __call__(self, texts: Sequence[Text]) -> dict[str, Tensor]:
        import torch

        ids, labels = _read(texts)
        longest = max(map(len, ids))
        return {
            "input_ids": torch.tensor([_padded(row, longest, self.pad_id) for row in ids]),
            "attention_mask": torch.tensor([_padded([1] * len(row), longest, 0) for row in ids]),
            "labels": torch.tensor([_padded(row, longest, IGNORED_LABEL) for row in labels]),
        }


@dataclass(frozen=True)
class PackedCollate:
    """All texts in one row, with the tensors that tell attention where each begins, by their names in transformers.

    ``input_ids``, ``labels``, ``position_ids``: ``[1, tokens]`` int64, positions from 0 in each text.
    ``cu_seq_lens_q``, ``cu_seq_lens_k``: ``[texts + 1]`` int32, where texts begin, and the end of the last.
    ``max_length_q``, ``max_length_k``: int, the longest text. The first label of every text is -100, so that it is not
    predicted from the text before.

    There is no attention mask. transformers 5 keeps texts apart by ``position_ids`` (eager, sdpa, flex) or the
    cumulative lengths (flash attention). A model that ignores both attends across texts, which
    :func:`~requestzero.data.packing.check_texts_stay_apart` detects.
    """

    layout: ClassVar[str] = "packed"

    def __call__(self, texts: Sequence[Text]) -> dict[str, Any]:
        import torch

        ids, labels = _read(texts)
        lengths = list(map(len, ids))
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return {
            "input_ids": torch.tensor([[token for row in ids for token in row]]),
            "labels": torch.tensor([[label for row in labels for label in row]]),
            "position_ids": torch.tensor([[position for length in lengths for position in range(length)]]),
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }


def _read(texts: Sequence[Text]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids and the labels of each text.

    Raises:
        TypeError: a text is not a mapping with ``"input_ids"``.
        ValueError: a text has another number of labels than of tokens, or none.
    """
    ids, labels = [], []
    for text in texts:
        if not isinstance(text, Mapping) or "input_ids" not in text:
            raise TypeError(
                f"A text is a {type(text).__name__} without 'input_ids': give mappings with 'input_ids' and, where "
                "they differ, 'labels', or a collate function of your own."
            )
        tokens, targets = _list(text["input_ids"]), _list(text.get("labels", text["input_ids"]))
        if not tokens or len(tokens) != len(targets):
            raise ValueError(
                f"A text has {len(tokens)} input_ids and {len(targets)} labels: give one of each per token."
            )
        ids.append(tokens)
        labels.append([IGNORED_LABEL, *targets[1:]])
    return ids, labels


def _list(values: Any) -> list[int]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _padded(row: list[int], longest: int, value: int) -> list[int]:
    return row + [value] * (longest - len(row))
