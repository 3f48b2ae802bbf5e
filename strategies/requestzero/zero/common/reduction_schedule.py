"""When the gradients of the window at hand are reduced."""

from __future__ import annotations

from collections.abc import Callable

from requestzero.config.reduction_time import ReduceAt, ReductionTime


class ReductionSchedule:
    """The schedule of one window after another.

    Args:
        time: as the options say.
        overlaps: ``overlap_comm``: what is reduced in a backward is reduced as it comes, on a stream of its own.
        fills_absent: ``rank_dependent_parameters``: all of them at the end, in one order, zeros in the place of absent
            ones.
        keeps: tells, the same on all ranks, whether there is memory to keep local gradients. Collective.
    """

    def __init__(self, time: ReductionTime, overlaps: bool, fills_absent: bool, keeps: Callable[[], bool]) -> None:
        self._time, self._keeps = time, keeps
        self.overlaps, self.fills_absent = overlaps, fills_absent
        self._gave_up = False
        self.pending = False
        """True where gradients wait that a backward has brought."""
        self.unfinished = False
        """True where some of them are of a backward that has not ended."""
        self.only_waits = False
        """True where the other gradients of the running backward have only to be added to what waits. Its first one has
        set :attr:`pending` and :attr:`unfinished`; what ends these ends this too. Read for every gradient."""

    @property
    def at(self) -> ReduceAt:
        """The time that holds in this window, from now on."""
        return ReduceAt.BACKWARD if self._gave_up else self._time.at

    @property
    def in_every_backward(self) -> bool:
        """True where no gradient waits beyond its backward."""
        return self.at is ReduceAt.BACKWARD

    @property
    def at_next_request(self) -> bool:
        """True where the gradients of a request wait until the next one begins."""
        return self.at is ReduceAt.NEXT_REQUEST

    @property
    def mixes_requests(self) -> bool:
        """True where the gradients of all requests of a window wait in one sum."""
        return self.at is ReduceAt.WINDOW

    def reduces(self, request_ends: bool, window_ends: bool) -> bool:
        """Return whether the backward at hand is followed by a reduction.

        Args:
            request_ends: with this backward.
            window_ends: the request is known to be the window's last.
        """
        at_window_end = self.at is ReduceAt.WINDOW and window_ends
        return self.in_every_backward or (request_ends and (self.at is ReduceAt.REQUEST or at_window_end))

    def on_arrival(self, reduces: Callable[[], bool]) -> bool:
        """Return whether a gradient is reduced as it comes, in a backward that :meth:`reduces`, which is then asked."""
        return not self.fills_absent and (self.in_every_backward or (self.overlaps and reduces()))

    def keep_waiting(self, autograd_tells_end: Callable[[], bool]) -> None:
        """Let the other gradients of the running backward only wait, as the one at hand, if autograd tells its end."""
        self.only_waits = self.at is not ReduceAt.BACKWARD and autograd_tells_end()

    def end_backward(self) -> None:
        """Note that the backward at hand has ended, or that what it has brought is dropped."""
        self.unfinished = self.only_waits = False

    def end_reduction(self) -> None:
        """Note that no gradient waits any more."""
        self.pending = self.only_waits = False

    @property
    def asks_for_memory(self) -> bool:
        """True where :meth:`gives_up` is collective."""
        return self._time.while_memory and not self._gave_up

    def gives_up(self) -> bool:
        """Return whether memory has run short. Collective where memory decides; then call :meth:`give_up`."""
        return self.asks_for_memory and not self._keeps()

    def give_up(self) -> None:
        """Reduce in every backward, until the window's end."""
        self._gave_up = True

    def discard(self) -> None:
        """Begin a new window."""
        self._gave_up = self.pending = False
        self.end_backward()


def reducing_always() -> ReductionSchedule:
    """Return the schedule of an optimizer that reduces in every backward."""
    return ReductionSchedule(ReductionTime(ReduceAt.BACKWARD), overlaps=False, fills_absent=False, keeps=lambda: True)
