"""Metrics of an update for the loggers.

Written for Lightning 2.6.6.
"""

from __future__ import annotations

from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _METRICS
from typing_extensions import override

from requestzero.lightning.window_driver import driver_of


class WindowLoggerConnector(_LoggerConnector):
    """Logs once per window in manual optimization too, and adds the strategy's metrics of the update.

    A metric on the device is read where Lightning reads those of the module.
    """

    @property
    @override
    def metrics(self) -> _METRICS:
        """In training steps also the strategy's metrics, except for names that the module or a callback logs."""
        metrics = super().metrics
        if self.trainer.training and self._first_loop_iter is not None:
            assert self.trainer._results is not None
            taken = {result.meta.name for result in self.trainer._results.values()}
            own = {name: v for name, v in driver_of(self.trainer).logged_metrics.items() if name not in taken}
            metrics["log"].update(own)
            metrics["callback"].update(own)
        return metrics

    @override
    def update_train_step_metrics(self) -> None:
        """Lightning's version logs for every batch in manual optimization."""
        if not self.trainer.fit_loop._should_accumulate():
            super().update_train_step_metrics()
