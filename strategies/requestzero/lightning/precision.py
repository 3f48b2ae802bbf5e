"""The precision plugin: unwraps micro-batches, and steps through the strategy, which knows the divisor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import lightning.pytorch as pl
from lightning.fabric.plugins.precision.deepspeed import _PRECISION_INPUT
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from typing_extensions import override


class WindowOwner(Protocol):
    """What the plugin needs of the strategy."""

    def take_batch(self, batch: Any) -> Any: ...

    def apply_window(self, **kwargs: Any) -> None: ...


class RequestZeROPrecision(DeepSpeedPrecision):
    """``DeepSpeedPrecision`` for one strategy."""

    def __init__(self, precision: str, owner: WindowOwner) -> None:
        super().__init__(cast(_PRECISION_INPUT, precision))
        self._owner = owner

    @override
    def convert_input(self, data: Any) -> Any:
        """Also unwrap: the first call on a fetched batch, so that hooks and callbacks see plain batches."""
        return super().convert_input(self._owner.take_batch(data))

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Steppable, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, the hooks before a step, and the step; returns what the closure did.

        Lightning's version (2.6.6) lets the engine step without a divisor, and refuses a ``training_step``
        that returned ``None`` even where other micro-batches of the window wait to be applied.
        """
        result = closure()
        self._after_closure(model, optimizer)
        self._owner.apply_window(**kwargs)
        return result
