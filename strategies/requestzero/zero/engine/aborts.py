"""Requests that are left out of their window on request: ``abort_request``, and the block of a request."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from requestzero.data.micro_batch import RequestId
from requestzero.errors import AbortRequest, RankDisagreementError
from requestzero.rank_check.message import by_rank
from requestzero.zero.engine.checkpoints import CheckpointingEngine
from requestzero.zero.stage_3.optimizer import RequestZeROStage3Optimizer

logger = logging.getLogger("requestzero")


class AbortingEngine(CheckpointingEngine):
    """Undoes the request at hand; those before it stay in the window, bit for bit."""

    @abstractmethod
    def end_request(self) -> None:
        """End the open request."""

    def abort_request(self, reason: str) -> None:
        """Leave the request at hand out of its window, as if it had never come. Collective.

        That is the one that is announced or open, between its micro-batches or in a backward that an exception has
        ended on all ranks; or the last one that has ended, until another begins or the window is read for a step. What
        it has added to sums, counts, weights, names and records is undone; the random number generators are left alone.
        Also to be called where a backward has raised :class:`~requestzero.AbortRequest` outside of a block.

        Args:
            reason: for the log, which has it once, with the request's name and the ranks.

        Raises:
            RuntimeError: there is no such request, or it cannot be undone; then nothing has changed.
            AbortRequest: with the option ``abort``, inside a running forward of stage 3, whose weights are in use. It
                has to leave the forward, and the request is aborted then: by its block, by Lightning, or by another
                call.
            RankDisagreementError: another rank does something else, or it alone can or cannot undo the request. With
                the option ``abort`` a rank may be before the next backward of the request, or at the end of its block:
                it raises ``AbortRequest`` there. At stage 3 this one may have left a forward then, which the others
                may leave with ``AbortRequest`` as well.
        """
        with self.failing_together():
            self._refuse_abort(reason)
        if self.forward_order.is_inside:
            raise AbortRequest(reason)
        with self.failing_together():
            reasons = self.agreement.abort(reason)
        window, rollback = self.update_window, self.optimizer.rollback
        name = rollback.name(window)
        self.optimizer.abort_request()
        self._forget_backward()
        if self.forward_order.is_open and isinstance(self.optimizer, RequestZeROStage3Optimizer):
            self.optimizer.empty_partition_cache()  # the ranks may have gathered different weights
            self.forward_order.forget()
        if not window.is_open:
            self.next_step_clipping.forget()
        self._skips.aborted_requests += 1
        if self.global_rank == 0:
            told = "" if name is None else f" {name!r}"
            logger.warning(
                "Aborted request%s: left out of update %d (%s).", told, self.attempted_updates + 1, describe(reasons)
            )

    def _forget_backward(self) -> None:
        """Be between requests again, for DeepSpeed too: a step may follow."""
        self._manual_backward_expected = False
        self._unmanaged_backward_count = self.update_window.micro_batches
        if self._is_gradient_accumulation_boundary is False:
            self.set_gradient_accumulation_boundary(True)

    def _refuse_abort(self, reason: str) -> None:
        """Raise where :meth:`can_abort` is false."""
        problem = self._abort_problem()
        if problem:
            raise RuntimeError(f"abort_request({reason!r}) is not possible: {problem}.")

    def _abort_problem(self) -> str:
        """Return why no request can be aborted now; empty where one can."""
        optimizer = self.optimizer
        if not optimizer.rollback.is_at_hand(self.update_window):
            return (
                "no request has begun since the last step, abort, zero_grad() or checkpoint, or the window is about to "
                "be applied"
            )
        return optimizer.abort_obstacle

    @property
    def can_abort(self) -> bool:
        """True if :meth:`abort_request` could undo the request at hand; false also where there is none."""
        return not self._abort_problem()

    @contextmanager
    def request(
        self,
        request_id: RequestId = None,
        *,
        micro_batches: int | None = None,
        window_end: bool | None = None,
        once: bool = False,
    ) -> Iterator[None]:
        """Make the backwards in the block one request, which ends with the block, and after which a step may come.

        Collective at its begin and end. To reduce with its last backward, and not after it, call
        ``set_gradient_accumulation_boundary(True)`` before that.

        :class:`~requestzero.AbortRequest` aborts the request and does not leave the block: the program goes on behind
        it. Any other exception aborts it as well and is raised again. Without the option ``abort`` the other ranks are
        told of it first, so that all of them raise unless they have failed alike.

        Args:
            request_id: as for :meth:`begin_request`.
            micro_batches: likewise.
            window_end: likewise.
            once: likewise.

        Raises:
            RuntimeError: ``AbortRequest`` was raised and the request cannot be aborted.
            RankDisagreementError: another rank does something else.
        """
        with self.failing_together():
            self.begin_request(request_id, micro_batches=micro_batches, window_end=window_end, once=once)
        self.set_gradient_accumulation_boundary(False)
        try:
            with self.aborting():
                yield
                self.agreement.end_block()
            with self.failing_together():
                self.end_request()
        finally:
            self.set_gradient_accumulation_boundary(True)  # where a step is possible

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """Abort the request at hand for an exception that leaves the block, see :meth:`request`."""
        try:
            yield
        except AbortRequest as error:
            with self.failing_together():
                self.abort_request(str(error))
        except RankDisagreementError:
            raise
        except Exception as error:
            if not (self.options.abort and self.can_abort):
                self.fail(error)  # returns where all ranks have failed alike
            if self.can_abort:
                self.abort_request(f"{type(error).__name__}: {error}")
            raise


def describe(reasons: list[str | None]) -> str:
    """Return the reasons of all ranks in one line; ``None`` where a rank had none of its own.

    Args:
        reasons: by rank.
    """
    given = [reason for reason in dict.fromkeys(reasons) if reason is not None]
    if len(given) == 1 and None not in reasons:
        return given[0] if len(reasons) == 1 else f"all ranks: {given[0]}"
    return by_rank(reasons)
