"""Sequences as the model's inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from requestzero.data.collate import PackedCollate, PaddedCollate
from requestzero.recipes.data import TokenSequence

Inputs = dict[str, Any]
"""``input_ids``, ``labels`` and what the layout adds, see :mod:`requestzero.data.collate`."""


@dataclass(frozen=True)
class SequenceCollate:
    """Collates the recipes' own sequences. A class, since worker processes unpickle it."""

    collate: PaddedCollate | PackedCollate

    @property
    def layout(self) -> str:
        return self.collate.layout

    def __call__(self, sequences: list[TokenSequence]) -> Inputs:
        return self.collate([vars(sequence) for sequence in sequences])


def make_collate(pad_id: int, layout: str = "padded") -> SequenceCollate:
    """Return a function that pads sequences on the right, to the longest of them, or packs them into one row."""
    return SequenceCollate(PackedCollate() if layout == "packed" else PaddedCollate(pad_id))
