"""The divisor of a window in a loop with Accelerate: the one of the same loop without DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from requestzero.zero.common.window import UpdateWindow


@dataclass
class WindowTally:
    """Counts of one window on which its divisor depends."""

    window: UpdateWindow
    """The engine's counts of the same window."""
    blocks: int = 0
    """``accelerator.accumulate`` blocks since Accelerate last ended a window, whether the loop has stepped there or
    not: each of them counts as one of N, by which the loop divides without DeepSpeed too."""
    ended: bool = False
    """True if the last block ends a window."""
    marked: bool = False
    """True once the ends of requests were marked explicitly."""
    divided: bool | None = None
    """True if the caller has divided the losses; ``None`` before the first backward."""

    def begin_block(self, ends_window: bool) -> None:
        """Count an ``accelerator.accumulate`` block, also one without a backward.

        Args:
            ends_window: ``accelerator.sync_gradients`` in the block.
        """
        self.blocks = 1 if self.ended else self.blocks + 1
        self.ended = ends_window

    def of_next(self, window: UpdateWindow) -> WindowTally:
        """Return the tally of the window that follows, after a step or a discarded window."""
        return WindowTally(window, blocks=0 if self.ended else self.blocks)

    def state(self) -> dict[str, Any]:
        """Return the counts as plain values, for a checkpoint."""
        return {"blocks": self.blocks, "ended": self.ended, "marked": self.marked, "divided": self.divided}

    def note(self, divided: bool, marked: bool) -> None:
        """Note a backward.

        Args:
            divided: the caller has divided its loss.
            marked: its request's end is marked explicitly.

        Raises:
            ValueError: some losses of the window are divided, and others not.
        """
        if self.divided is not None and self.divided != divided:
            raise ValueError(
                f"accelerator.backward(scale_wrt_gas={not divided}) comes in a window that was begun with "
                f"scale_wrt_gas={not self.divided}: say the same for all of its micro-batches."
            )
        self.divided = divided
        self.marked = self.marked or marked

    def divisor(self, steps: int) -> float:
        """Return the number of the window's micro-batches, or what the loop counts in their place.

        Where a loop does not mark requests and runs several backwards within one ``accumulate`` block, that is the
        number of its blocks, and ``steps`` without any block, less the share of those backwards that an overflow has
        dropped. 1 where the losses are divided already.

        Args:
            steps: Accelerate's ``gradient_accumulation_steps``.

        Raises:
            ValueError: another number of ranks has begun the window.
        """
        if self.divided:
            return 1
        kept = self.window.divisor_of_mean()
        if self.marked:
            return max(1, kept)
        count = self.blocks or steps
        dropped = sum(request.micro_batches for request in self.window.dropped)
        return count * kept / (kept + dropped) if dropped and kept else count
