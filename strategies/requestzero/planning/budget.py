"""How much one micro-batch may hold, and what it costs."""

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
    """Tokens that the model computes at most: ``padded``, rows times the longest; ``packed``, the sum."""
    sequences: int | None = None
    """Sequences at most; ``None``: as many as the tokens allow."""
    layout: str = "packed"
    """``"padded"`` or ``"packed"``."""
    cost: Callable[[int], float] | None = None
    """What ranks are balanced by: the cost of a row of so many tokens, above 0 and rising. ``None``: its tokens.
    Attention grows faster than linearly: ``lambda n: n + n * n / 8192``, say."""

    def __post_init__(self) -> None:
        check_count("tokens_per_micro_batch", self.tokens)
        check_count("max_sequences", self.sequences)
        check("layout", self.layout, Choice(LAYOUTS, quoted=False))

    def row_cost(self, length: int) -> float:
        """Cost of one row of ``length`` tokens."""
        return length if self.cost is None else self.cost(length)

    def load(self, lengths: Sequence[int]) -> float:
        """Cost of a micro-batch of these sequences."""
        if self.layout == "padded":
            return len(lengths) * self.row_cost(max(lengths))
        return sum(map(self.row_cost, lengths))

    def computed(self, lengths: Sequence[int]) -> int:
        """Tokens that the model computes for these sequences, padding included."""
        return len(lengths) * max(lengths) if self.layout == "padded" else sum(lengths)

    def allows(self, lengths: Sequence[int]) -> bool:
        """Whether these sequences fit into one micro-batch."""
        return self.computed(lengths) <= self.tokens and len(lengths) <= (self.sequences or len(lengths))
