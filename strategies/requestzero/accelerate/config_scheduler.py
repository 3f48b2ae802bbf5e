"""Schedulers of a DeepSpeed config, which the engine steps after every update that it has applied.

Written for DeepSpeed 0.19.8.
"""

from __future__ import annotations

from typing import Any

from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper
from typing_extensions import override

from requestzero.accelerate.engine import RequestZeROEngineWrapper


class ConfigScheduler(DeepSpeedSchedulerWrapper):
    """Stands in the place of Accelerate's wrapper of a scheduler that the engine steps.

    As in a loop without DeepSpeed, :meth:`get_last_lr` has the learning rate of the update that was applied until
    :meth:`step` is called, which is where ``Trainer`` logs it.

    Args:
        scheduler: the engine's.
        optimizer: Accelerate's wrapper of the optimizer.
        engine_wrapper: what steps.
    """

    def __init__(self, scheduler: Any, optimizer: Any, engine_wrapper: RequestZeROEngineWrapper) -> None:
        super().__init__(scheduler, optimizer)
        self._engine_wrapper = engine_wrapper

    @override
    def step(self) -> None:
        """Show the next update's learning rate. The engine has stepped the scheduler, if the update was applied."""
        self._engine_wrapper.applied_rates = None

    @override
    def get_last_lr(self) -> list[float]:
        """Return the learning rates of the last update, or, after :meth:`step`, of the next one, by group."""
        rates = self._engine_wrapper.applied_rates
        return [*self.scheduler.get_last_lr()] if rates is None else rates


def start_scheduler(scheduler: Any) -> None:
    """Let the first update have the scheduler's first learning rate, and the second update its second one.

    DeepSpeed's warm-up schedulers give the first two updates the first value, and every later one the value of the
    update before it, where a scheduler of PyTorch is one ahead. One that was loaded from a checkpoint stays as it is.

    Args:
        scheduler: the engine's, or ``None``.
    """
    from deepspeed.runtime.lr_schedules import WarmupCosineLR, WarmupLR

    if isinstance(scheduler, (WarmupLR, WarmupCosineLR)) and scheduler.last_batch_iteration < 0:
        scheduler.step()
