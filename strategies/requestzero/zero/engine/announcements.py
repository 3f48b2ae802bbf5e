"""Announcements to the other data-parallel ranks: requests, the end of data, failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.zero import partition_parameters

from requestzero.errors import DuplicateRequestError
from requestzero.zero.engine.counters import CountingEngine

P = ParamSpec("P")
R = TypeVar("R")


class AnnouncingEngine(CountingEngine):
    """Requests that are announced, data that ends, and errors that concern all ranks."""

    def begin_request(
        self,
        request_id: str | int | None = None,
        *,
        micro_batches: int | None = None,
        window_end: bool | None = None,
        once: bool = False,
    ) -> None:
        """Say what comes next, before a request's first backward: its name, and what is known of it.

        Optional: a backward without it begins a request without a name. All ranks announce the same, which they agree
        on while the forward runs; what is not announced has to be agreed on when it happens. To be called on all ranks,
        or on none; collective with ``abort`` at stage 1, where the request before it is reduced now.

        Args:
            request_id: name of the request in messages and logs.
            micro_batches: how many backwards this rank will run for it.
            window_end: whether a step follows the request. Gradients that wait for the window's end
                (``reduce_gradients_at``) are then reduced with its last backward, else in ``step``.

            once: refuse the name of a request that is in the window, or that was applied (the last 10,000 are known,
                also after a resume). One that was aborted, dropped or skipped may come again.

        Raises:
            ValueError: ``micro_batches`` is not a whole number above 0; ``once`` without a name.
            DuplicateRequestError: ``once``, and the request has come before.
            RuntimeError: the request before it is still open.
            RankDisagreementError: here, or where the answer is waited for: the ranks do not do the same.
        """
        self.agreement.check()
        if micro_batches is not None and (type(micro_batches) is not int or micro_batches < 1):
            raise ValueError(
                f"begin_request(micro_batches={micro_batches!r}) is not allowed: use a whole number above 0, the same "
                "on all ranks, or leave it out."
            )
        if self.update_window.request_open:
            error = RuntimeError(
                f"begin_request({request_id!r}) while the request before it is open: end it first, with "
                "set_gradient_accumulation_boundary(True) before its last backward, or with end_request()."
            )
            self.fail(error)
            raise error
        if once:
            self._refuse_duplicate(request_id)
        self.optimizer.open_request()
        self.update_window.begin_request(request_id, window_end is True)
        self.agreement.begin_request(request_id, micro_batches, window_end)

    def _refuse_duplicate(self, request_id: str | int | None) -> None:
        if request_id is None:
            raise ValueError("begin_request(once=True) needs the name of the request: begin_request(id, once=True).")
        window = self.update_window
        if request_id in window.request_ids[: window.requests]:
            raise DuplicateRequestError(f"begin_request({request_id!r}, once=True): it is in the open window already.")
        if request_id in self._applied:
            raise DuplicateRequestError(f"begin_request({request_id!r}, once=True): it was applied before.")

    def end_data(self) -> None:
        """There is no more data, or no more of an epoch. To be called on all ranks (collective).

        Raises:
            RankDisagreementError: another rank has more.
        """
        self.agreement.end_of_data()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one cannot go on, from wherever it is: between backwards, in a forward.

        Returns where all ranks fail with an error of the same type at the same place; then raise your own. A rank that
        is at work is waited for, up to 10 seconds.

        Raises:
            RankDisagreementError: on all ranks, with the text of ``error``.
        """
        self.agreement.fail(error)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Call :meth:`fail` for an exception that leaves the block, which ends the training of all ranks.

        Not for what ends a process or a generator (``KeyboardInterrupt``, ``SystemExit``, ``GeneratorExit``).
        """
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise

    @contextmanager
    def watching_together(self) -> Iterator[None]:
        """Also let DeepSpeed wait under watch in the block: a rank that has failed comes to no barrier or gather."""
        with self.failing_together(), self.optimizer.ranks.watching(deepspeed_engine, partition_parameters):
            yield

    @contextmanager
    def data_pass(self) -> Iterator[None]:
        """Enclose a pass over this rank's data, such as an epoch (its end is collective).

        Call :meth:`end_data` at the block's end, and :meth:`fail` on an exception, both of which see a rank that is
        left alone. Leaving the block otherwise (``break``, ``return``) is not noticed as an end.

        Raises:
            RankDisagreementError: another rank has more data, or has failed.
        """
        with self.failing_together():
            yield
        self.end_data()

    def agree_to_step(self) -> None:
        """Agree that all ranks step next (collective, unless it was announced).

        Raises:
            RankDisagreementError: another rank does something else.
        """
        self.agreement.before_step(bool(self.optimizer.compute_grad_norm))


def ends_together(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Let the ranks fail together in a method of an engine, as in :meth:`AnnouncingEngine.watching_together`."""

    @wraps(method)
    def call(self: AnnouncingEngine, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.watching_together():
            return method(self, *args, **kwargs)

    return call
