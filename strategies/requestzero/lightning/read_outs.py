"""What users read of a strategy: the running window, the last update, and counts over the whole training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from requestzero.data.boundaries import WindowMarks
from requestzero.lightning.engine_building import EngineBuildingStrategy
from requestzero.lightning.update_counts import UpdateCounts
from requestzero.lightning.window_driver import WindowDriver

if TYPE_CHECKING:
    from requestzero.zero.common.partition_traffic import PartitionTraffic


class ReadableStrategy(EngineBuildingStrategy):
    """An engine-building strategy whose window and counts can be read; the derived class makes the driver."""

    window_driver: WindowDriver
    """The open window and the batch that runs in it."""
    _kept_counts: UpdateCounts
    """The counts of the last fit, once its engine is gone."""

    @property
    def marks(self) -> WindowMarks:
        """Position of the current batch in its request and its window."""
        return self.window_driver.marks

    @property
    def window_open(self) -> bool:
        """True while gradients are pending: a backward has run since the last step or discard."""
        return self.window_driver.is_open

    @property
    def request_open(self) -> bool:
        """True while a request is open: a checkpoint has to wait for its end."""
        return self.window_driver.inside_request

    @property
    def window_end(self) -> bool:
        """True if the current batch should end its update window, as the loader marks it.

        For manual optimization, where nothing steps by itself. Without marks every batch ends one.
        """
        return self.marks.window_end

    @property
    def batch_weight(self) -> Any:
        """``weight`` of the current batch's ``MicroBatch``, ``None`` where the loader gives none."""
        return self.marks.weight

    @property
    def update_applied(self) -> bool:
        """True if the current batch has ended with an update that changed the weights."""
        return bool(self.window_driver.batch.update_applied)

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """Metrics of the last update for the loggers, see :func:`requestzero.zero.metrics.logged_metrics`.

        Scalar tensors, some of them on the device. Empty before the first update, and with ``log_metrics=False``.
        """
        return self.window_driver.logged_metrics

    @property
    def grad_norm(self) -> float | None:
        """2-norm of the last update's divided gradient over all ranks, before clipping; ``None`` before one.

        Infinite if it was skipped. The loggers get it by themselves, see ``log_metrics``.
        """
        norm = None if self.engine is None else self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    @property
    def _counts(self) -> UpdateCounts:
        return self._kept_counts if self.engine is None else UpdateCounts.of(self.engine)

    @property
    def attempted_updates(self) -> int:
        """Update windows that were stepped, over the whole training, resumed parts included."""
        return self._counts.attempted_updates

    @property
    def applied_updates(self) -> int:
        """Updates that changed the weights, over the whole training."""
        return self._counts.applied_updates

    @property
    def skipped_updates(self) -> int:
        """Updates that were skipped for gradients that are not finite, over the whole training."""
        return self._counts.skipped_updates

    @property
    def consecutive_skips(self) -> int:
        """Updates that were skipped since the last one that was applied."""
        return self._counts.consecutive_skips

    @property
    def dropped_requests(self) -> int:
        """Requests that were left out of their updates (``on_overflow="drop_request"``), over the whole training."""
        return self._counts.dropped_requests

    @property
    def aborted_requests(self) -> int:
        """Requests that were aborted, over the whole training."""
        return self._counts.aborted_requests

    @property
    def empty_updates(self) -> int:
        """Windows that were left out because their total weight was zero, over the whole training."""
        return self._counts.empty_updates

    @property
    def partition_traffic(self) -> PartitionTraffic | None:
        """Copies between this rank's gradient partitions and host gradients; ``None`` before there is an engine."""
        return self._counts.partition_traffic
