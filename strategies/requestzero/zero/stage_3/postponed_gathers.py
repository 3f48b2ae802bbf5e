"""Gathers of weights that this rank fails to make in a forward: it makes up for them once it has left that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from requestzero.errors import RankDisagreementError
from requestzero.rank_check.interface import Agreement
from requestzero.zero.common.exception_frames import clear_frames
from requestzero.zero.common.streams import on_stream
from requestzero.zero.stage_3.gather import Gather


class PostponedGathers:
    """Begins the gathers of one engine and waits for them, and postpones what fails on this rank alone.

    The other ranks are in the gather, so that whatever this one does next has to be the same gather, and those that
    follow it. What a forward holds, activations above all, is free again once the forward is left. Then, as the request
    is aborted, the gather is repeated.

    Args:
        agreement: of the ranks.
    """

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self.can_postpone: Callable[[], bool] = lambda: False
        """Returns true in a forward that a request's abort would leave on all ranks."""
        self._postponed: list[Gather] = []
        self._error: Exception | None = None
        self._makes_up = False

    @property
    def may_repeat(self) -> bool:
        """True where a gather that fails now is repeated."""
        return self._makes_up or self.can_postpone()

    # --- DeepSpeed's gathers ----------------------------------------------------------------------------------------

    def begin(self, gather: Gather, planned: bool = True) -> None:
        """Count a gather and begin it (collective), or postpone it where it fails, or where one before it has.

        Raises:
            AbortRequest: another rank aborts the request, where the ranks vote before the gather.
        """
        if self._error is None:
            self.refuse_rest()
        elif self.agreement.votes_at_gathers(planned):  # as the others do, which wait in the one that has failed
            self.raise_error()
        self.agreement.note_gather(planned)
        if self._postponed:
            self._postpone(gather)
        else:
            self._attempt(gather, gather.begin)

    def wait(self, gather: Gather, handle_dependency: bool) -> None:
        """Wait for a gather's weights, or let DeepSpeed go on without them to where :meth:`raise_error` is called."""
        if gather not in self._postponed:
            self._attempt(gather, lambda: gather.end(handle_dependency))
        if gather in self._postponed:
            gather.pass_over()

    def raise_error(self) -> None:
        """Raise the error of the gather that has failed, if one has since the last call."""
        if self._error is not None:
            raise self._take_error()

    def _take_error(self) -> Exception:
        error, self._error = self._error, None
        assert error is not None
        return error

    def refuse_rest(self) -> None:
        """End all ranks where a forward goes on though a gather of it has failed.

        Raises:
            RankDisagreementError: it does.
        """
        if self._postponed:
            self._postponed = []
            error = RuntimeError(
                "A forward has gone on after a gather of weights has failed in it, on this rank alone. Let the "
                "exception leave the forward, and abort the request."
            )
            self.agreement.fail(error)
            raise error

    # --- making up --------------------------------------------------------------------------------------------------

    @contextmanager
    def making_up(self) -> Iterator[None]:
        """Make up for what was postponed, and go along with more gathers in the block (collective).

        A gather that fails here is repeated once, without what the frames of the forward that was left hold.

        Raises:
            RankDisagreementError: it has failed again.
        """
        self._makes_up = True
        try:
            postponed, self._postponed, self._error = self._postponed, [], None
            for gather in postponed:
                with on_stream(gather.stream):
                    self._attempt(gather, gather.make_up)
            yield
        finally:
            self._makes_up = False

    def _attempt(self, gather: Gather, action: Callable[[], None]) -> None:
        """Begin or end a gather; postpone or repeat it where that fails, or fail on all ranks."""
        try:
            action()
        except RankDisagreementError:
            raise
        except Exception as error:
            is_local = not isinstance(error, torch.distributed.DistError)  # else no collective can follow
            if is_local and self.can_postpone():
                self._postpone(gather)
                self._error = self._error or error
            elif is_local and self._makes_up:
                gather.note_failure()
                clear_frames(error)
                self._repeat(action)
            else:
                self.agreement.fail(error)  # the others are in the gather, so that nothing can go on
                raise

    def _postpone(self, gather: Gather) -> None:
        gather.note_failure()
        self._postponed.append(gather)

    def _repeat(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self.agreement.fail(error)
            raise
