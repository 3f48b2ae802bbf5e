"""Limits of a micro-batch, and its cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from requestzero.config.validation import Choice, check, check_count

LAYOUTS = ("padded", "packed")
"""``padded``: one row a sequence, each as long as the longest. ``packed``: all sequences in one row, no padding."""


@dataclass(frozen=True)
class Budget:
    """Limits of a micro-batch on one rank.

    Raises:
        ValueError: a limit that is no whole number above 0, or an unknown layout.
    """

    tokens: int
    """Maximum number of tokens that the model computes: ``padded``, rows times the longest; ``packed``, their sum."""
    sequences: int | None = None
    """Maximum number of sequences; ``None``: as many as the tokens allow."""
    layout: str = "packed"
    """``"padded"`` or ``"packed"``."""
    cost: Callable[[int], float] | None = None
    """Cost of a row of so many tokens, above 0 and rising, by which the ranks are balanced. ``None``: its tokens.
    Attention grows faster than linearly; an example is ``lambda n: n + n * n / 8192``."""

    def __post_init__(self) -> None:
        check_count("tokens_per_micro_batch", self.tokens)
        check_count("max_sequences", self.sequences)
        check("layout", self.layout, Choice(LAYOUTS, quoted=False))

    def row_cost(self, length: int) -> float:
        """Return the cost of one row of ``length`` tokens."""
        return length if self.cost is None else self.cost(length)

    def load(self, lengths: Sequence[int]) -> float:
        """Return the cost of a micro-batch of sequences of these lengths."""
        if self.layout == "padded":
            return len(lengths) * self.row_cost(max(lengths))
        return sum(map(self.row_cost, lengths))

    def computed(self, lengths: Sequence[int]) -> int:
        """Return the tokens that the model computes for sequences of these lengths, padding included."""
        return len(lengths) * max(lengths) if self.layout == "padded" else sum(lengths)

    def allows(self, lengths: Sequence[int]) -> bool:
        """Return true if sequences of these lengths fit into one micro-batch."""
        return self.computed(lengths) <= self.tokens and len(lengths) <= (self.sequences or len(lengths))
