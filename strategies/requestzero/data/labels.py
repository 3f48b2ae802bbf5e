"""Labels that the loss ignores, in inputs that are mappings with ``"labels"`` (Hugging Face's form)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

IGNORED_LABEL = -100
"""The label that cross entropy ignores (torch's and Hugging Face's ``ignore_index``)."""


def mask_labels(inputs: Any) -> Any:
    """Return a copy of ``inputs`` in which every label is ``-100``: the default filler of the loaders.

    The model runs as usual, over every parameter. Its loss is exactly zero, with gradients of exactly zero,
    where it is the sum over the trained tokens divided by ``max(1, their number)``; a plain mean is 0/0 here.

    Args:
        inputs: a mapping whose ``"labels"`` are an integer tensor of any shape.

    Returns:
        A new mapping with the same values but for ``"labels"``, a new tensor of their shape and dtype.

    Raises:
        TypeError: ``inputs`` is not a mapping with ``"labels"``.
    """
    if not isinstance(inputs, Mapping) or "labels" not in inputs:
        raise TypeError(
            "A rank without an item of a request needs inputs with a loss of exactly zero, and collate returned a "
            f"{type(inputs).__name__} without 'labels', which cannot be masked. Give RequestLoader(filler=...): a "
            "function that turns what collate returns into inputs whose loss is exactly zero."
        )
    labels = inputs["labels"]
    return {**inputs, "labels": labels.new_full(tuple(labels.shape), IGNORED_LABEL)}


def count_trained(inputs: Any) -> float:
    """Return the number of labels in ``inputs["labels"]`` that are trained on (not ``-100``)."""
    return float((inputs["labels"] != IGNORED_LABEL).sum())
