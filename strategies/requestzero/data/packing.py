"""A check that a model keeps packed texts apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from requestzero.data.collate import PackedCollate


@torch.no_grad()
def check_texts_stay_apart(model: Any, device: torch.device | str = "cpu", tolerance: float = 1e-2) -> None:
    """Check that a text's logits do not depend on the text that is packed before it.

    Three forward passes of a few tokens, in evaluation mode; the random state is left alone. The logits must also be
    those of the text alone, which a model that goes on counting positions fails. Not collective.

    Args:
        model: called with what :class:`~requestzero.data.collate.PackedCollate` makes, without the labels; returns an
            object with ``logits`` ``[1, tokens, vocabulary]``.
        device: of the model.
        tolerance: largest difference of logits, relative to the largest logit, that counts as rounding.

    Raises:
        ValueError: the model attends across texts.
    """
    was_training = model.training
    model.eval()
    try:
        texts = [[1, 2, 3, 2, 1], [0, 0, 1, 0, 0], [1, 3, 2, 2]]
        alone = _logits(model, [texts[2]], device)[0, -4:]
        for first in texts[:2]:
            packed = _logits(model, [first, texts[2]], device)[0, -4:]
            difference = (packed - alone).abs().max() / alone.abs().max().clamp(min=1e-6)
            if not difference <= tolerance:
                raise ValueError(
                    f"{type(model).__name__} attends across packed texts: the logits of a text change by "
                    f"{float(difference):.1%} with the text before it. Use layout='padded', or a model that takes "
                    "position_ids and cumulative lengths into account (transformers 5 with eager, sdpa or flash "
                    "attention, and config.use_cache = False)."
                )
    finally:
        model.train(was_training)


def _logits(model: Any, texts: list[list[int]], device: torch.device | str) -> Tensor:
    inputs = PackedCollate()([{"input_ids": text} for text in texts])
    inputs.pop("labels")
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    return model(**moved).logits.float()
