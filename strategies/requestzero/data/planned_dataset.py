"""Planned micro-batches as a map-style dataset: looked up by plan, in this process or in a worker's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from requestzero.planning import MicroBatchPlan


@dataclass(frozen=True)
class PlannedDataset:
    """``dataset[plan]`` is ``(inputs, weight)`` of the micro-batch that ``plan`` describes.

    For a torch ``DataLoader``, with an iterable of plans as its ``sampler`` and ``batch_size=None``.
    """

    requests: Sequence[Sequence[Any]]
    collate: Callable[[list[Any]], Any]
    filler: Callable[[Any], Any]
    """Turns collated inputs into inputs with a loss of exactly zero."""
    weight: Callable[[Any], float]
    truncate: Callable[[Any, int], Any]
    """``truncate(item, tokens)`` returns the first ``tokens`` tokens of an item."""
    tokens: int
    """Length of truncated items, in tokens."""

    def __getitem__(self, plan: MicroBatchPlan) -> tuple[Any, float]:
        items = self.requests[plan.request]
        chosen = [
            self.truncate(items[position], self.tokens) if position in plan.truncated else items[position]
            for position in plan.positions
        ]
        inputs = self.collate(chosen)
        return (self.filler(inputs), 0.0) if plan.is_filler else (inputs, float(self.weight(inputs)))


def count_tokens(item: Any) -> int:
    """Return the length of ``item["input_ids"]`` where the item is a mapping, else of the item itself."""
    return len(item["input_ids"]) if isinstance(item, Mapping) else len(item)


def truncate_item(item: Any, tokens: int) -> Any:
    """Return the first ``tokens`` of every value where the item is a mapping, else of the item itself."""
    if isinstance(item, Mapping):
        return {name: value[:tokens] for name, value in item.items()}
    return item[:tokens]
