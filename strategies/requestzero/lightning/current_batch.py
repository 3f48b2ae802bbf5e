"""The batch that a training loop has fetched last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class CurrentBatch:
    """State of the current batch; a new object for each."""

    weight: Any = None
    """Weight for ``normalization="token"``, a number or a scalar tensor, until the batch's backward has used it."""
    update_applied: bool | None = False
    """True once the batch has ended with an update that changed the weights; ``None`` before a fit's first batch."""
    discarded: bool = False
    """True once the loop, and not the user, has discarded the window."""

    def add_weight(self, weight: Any) -> None:
        """Set the weight of a batch that has none yet.

        Raises:
            ValueError: the batch has a weight.
        """
        if self.weight is not None:
            raise ValueError(
                f"add_weight({weight!r}) for a batch that has the weight {self.weight!r} already, from its MicroBatch "
                "or another call: give one."
            )
        self.weight = weight

    def pop_weight(self, request_id: str | int | None) -> Any:
        """Return the weight and forget it: a second backward of the batch would need its own.

        Raises:
            ValueError: there is none; the message names the request.
        """
        weight, self.weight = self.weight, None
        if weight is None:
            raise ValueError(
                f"A batch of request {request_id!r} has no weight, by which normalization='token' divides: have the "
                "loader yield MicroBatch(inputs, weight=number of trained tokens), as RequestLoader does, or call "
                "self.trainer.strategy.add_weight(...) in training_step, and return the sum of the losses there."
            )
        return weight
