"""The precision plugin, through which every batch and every step comes.

Written for Lightning 2.6.6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import lightning.pytorch as pl
from lightning.fabric.plugins.precision.deepspeed import _PRECISION_INPUT
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.optim import Optimizer
from typing_extensions import override

from requestzero.lightning.window_driver import WindowDriver


class RequestZeROPrecision(DeepSpeedPrecision):
    """``DeepSpeedPrecision`` that hands batches and steps to a window driver.

    Args:
        precision: the Trainer's, such as ``"bf16-true"``.
        driver: the strategy's.
    """

    def __init__(self, precision: str, driver: WindowDriver) -> None:
        super().__init__(cast(_PRECISION_INPUT, precision))
        self._driver = driver

    @override
    def convert_input(self, data: Any) -> Any:
        """Also unwrap ``MicroBatch``: this is the first call on a fetched batch, so hooks see plain batches."""
        return super().convert_input(self._driver.begin_batch(data))

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Steppable, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, the hooks before a step, and the step; return the closure's result.

        Lightning's version lets the engine step without a divisor, and refuses a ``training_step`` that returned
        ``None`` even where other micro-batches of the window are pending.
        """
        result = closure()
        with self._driver.gradients_in_hooks():
            self._after_closure(model, optimizer)
        self._driver.step(**kwargs)
        return result

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip the window's gradient in the step that follows; Lightning's version does nothing.

        Raises:
            ValueError: an algorithm other than ``"norm"``.
        """
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            raise ValueError(
                "clip_gradients(gradient_clip_algorithm='value') is not possible with DeepSpeed, which clips by norm: "
                "use 'norm', or torch.nn.utils.clip_grad_value_ in on_before_optimizer_step."
            )
        if clip_val > 0:
            self._driver.clip(float(clip_val))
