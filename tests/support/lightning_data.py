"""Batches of the small training runs: exact in fp32, different on every rank, numbered over all epochs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from requestzero import MicroBatch
from support.lightning_spec import Run

WIDTH = 8
MARKED: list[tuple[bool, bool | None]] = [
    (False, False),
    (True, False),
    (True, True),
    (False, False),
    (False, False),
    (True, True),
    (True, False),
]
"""``Run.marks`` of an epoch of three windows, the last of which has one micro-batch and is not marked as ended."""


def rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def batch_value(index: int, rank: int) -> torch.Tensor:
    """The batch number ``index`` of one rank: small multiples of 1/4, different everywhere."""
    generator = torch.Generator().manual_seed(1000 * index + rank)
    return torch.randint(-8, 9, (WIDTH,), generator=generator) / 4


def batch_weight(index: int, rank: int, empty: tuple[int, ...] = ()) -> int:
    """Its weight: now and then none on one of the ranks, and on no rank where it is ``empty``."""
    return 0 if index in empty else (3 * index + 2 * rank) % 7


class Stream:
    """A loader that numbers its batches over all epochs: epoch 0 has 0 to n - 1, epoch 1 has n to 2n - 1, ..."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.position = 0
        self.placed = True

    def __len__(self) -> int:
        return self.run.batches

    def __iter__(self) -> Iterator[Any]:
        if not self.placed:
            self.position = -(-self.position // self.run.batches) * self.run.batches
        self.placed = False
        while True:
            index, self.position = self.position, self.position + 1
            yield self._batch(index)
            if self.position % self.run.batches == 0:
                return

    def _batch(self, index: int) -> Any:
        value = batch_value(index, rank())
        if index in self.run.nan_batches and rank() == 0:
            value[0] = float("nan")
        inputs = {"x": value, "index": index}
        weight = batch_weight(index, rank(), self.run.empty_batches) if self.run.weighted else None
        if self.run.marks is None:
            return MicroBatch(inputs, weight=weight) if self.run.weighted else inputs
        request_end, window_end = self.run.marks[index % self.run.batches]
        return MicroBatch(inputs, request_end=request_end, window_end=window_end, weight=weight, request_id=f"r{index}")


class StatefulStream(Stream):
    """Also resumes: within an epoch from its state, at an epoch's start from ``set_epoch``, as Lightning wants it."""

    @property
    def sampler(self) -> StatefulStream:
        return self

    def set_epoch(self, epoch: int) -> None:
        if self.position // self.run.batches != epoch:
            self.position = epoch * self.run.batches

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.placed = state["position"], True
