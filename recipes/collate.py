"""Sequences as the model's inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from requestzero.labels import IGNORED_LABEL
from requestzero.recipes.data import TokenSequence

Inputs = dict[str, Tensor]
"""``input_ids``, ``attention_mask`` and ``labels``, each ``[sequences, longest]`` and int64."""


def make_collate(pad_id: int) -> Callable[[list[TokenSequence]], Inputs]:
    """A function that pads sequences on the right, to the longest of them."""

    def collate(sequences: list[TokenSequence]) -> Inputs:
        return {
            "input_ids": _pad([sequence.input_ids for sequence in sequences], pad_id),
            "attention_mask": _pad([[1] * len(sequence.input_ids) for sequence in sequences], 0),
            "labels": _pad([sequence.labels for sequence in sequences], IGNORED_LABEL),
        }

    return collate


def _pad(rows: list[list[int]], value: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])
