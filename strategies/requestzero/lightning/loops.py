"""Lightning's training loops, made to go by update windows.

Written for Lightning 2.6.6, in whose loops a window is ``accumulate_grad_batches`` batches. Everything that goes by
updates there (steps, hooks, counters, schedulers, loggers) asks one of the few methods that the classes named here
override. The objects of the Trainer stay the same ones and only become instances of these classes, so that state which
they hold, or which is restored into them, is kept.
"""

from __future__ import annotations

from typing import Any, cast

import lightning.pytorch as pl

from requestzero.lightning.epoch_loop import WindowEpochLoop
from requestzero.lightning.logger_connector import WindowLoggerConnector
from requestzero.lightning.optimization_loops import WindowAutomaticOptimization, WindowManualOptimization


def extend_loops(trainer: pl.Trainer) -> None:
    """Make the Trainer's loops instances of the classes that go by update windows. Doing it again changes nothing.

    Raises:
        TypeError: a loop is not Lightning's own.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    _become(epoch_loop, WindowEpochLoop)
    cast(WindowEpochLoop, epoch_loop).validation_due = False
    _become(epoch_loop.automatic_optimization, WindowAutomaticOptimization)
    _become(epoch_loop.manual_optimization, WindowManualOptimization)
    _become(trainer._logger_connector, WindowLoggerConnector)


def _become(instance: Any, cls: type) -> None:
    (lightnings,) = cls.__bases__
    if type(instance) not in (cls, lightnings):
        raise TypeError(
            f"The Trainer's {type(instance).__name__} is not Lightning's own {lightnings.__name__}, which "
            "RequestZeRO extends: leave the Trainer's loops as they are."
        )
    instance.__class__ = cls
