"""SIGTERM ends a run, on all ranks."""

from __future__ import annotations

import signal
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher


class StopOnSigterm(Callback):
    """Lets SIGTERM (from ``timeout``, a container's stop, ...) do what Ctrl-C does.

    Lightning 2.6 tells the other ranks by a broadcast from within the signal handler. Where the signal comes
    in the middle of a backward, the broadcast meets another rank's reduction and all ranks wait for ever. Only
    ranks that the command itself has started are concerned; a cluster's launcher ends them all by itself.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy.launcher, _SubprocessScriptLauncher):
            # Lightning puts the former handler back when the fit has ended.
            signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(signal_number: int, frame: Any) -> None:
    raise KeyboardInterrupt
