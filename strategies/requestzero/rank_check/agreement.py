"""The life of requests and windows as ranks agree on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from requestzero.data.micro_batch import RequestId
from requestzero.rank_check.device import QueuedWork
from requestzero.rank_check.schedule import Flush, Schedule
from requestzero.rank_check.statement import Account, Kind, Statement
from requestzero.rank_check.watch import Watch, Work

if TYPE_CHECKING:
    import torch

    from requestzero.rank_check.channel import Channel, Round

# How long a rank that cannot go on waits for the others to hear it.
_LAST_WORDS = 10.0


class Window(Protocol):
    """The part of an update window that ranks compare."""

    @property
    def micro_batches(self) -> int:
        """Backwards since the last step."""


@dataclass
class Request:
    """What is known of the request that ranks are at."""

    number: int = 0
    """Requests begun so far, this one included."""
    name: RequestId = None
    micro_batches: int | None = None
    """As announced."""
    window_end: bool | None = None
    """As announced."""
    done: int = 0
    """Micro-batches that were run or left out."""
    closed: bool = True
    """Whether its end was marked."""
    window: Window | None = None
    """The one that was open when it began; a request ends with its window."""

    def __str__(self) -> str:
        return f"request {self.name!r}" if self.name is not None else f"request no. {self.number} (without a name)"

    @property
    def announced(self) -> tuple[int, ...]:
        return (
            -1 if self.micro_batches is None else self.micro_batches,
            -1 if self.window_end is None else int(self.window_end),
        )

    def ended(self, window: Window) -> bool:
        """Whether the next micro-batch belongs to another request."""
        return self.closed or (self.done > 0 and self.window is not window)


class Agreement:
    """What an engine tells of its course, and where nobody has to agree: one rank, or the option is off."""

    active = False
    """Whether there are ranks to agree with."""

    def check(self) -> None:
        """Raise the error of an engine that has failed already."""

    def begin_request(self, name: RequestId, micro_batches: int | None, window_end: bool | None) -> None:
        """A request comes next. Begins to agree, and does not wait."""

    def begin_backward(self, last: bool) -> None:
        """A backward comes next, ``last`` where its request is known to end with it. Does not wait."""

    def end_micro_batch(self, request_ended: bool) -> None:
        """A micro-batch is done."""

    def end_request(self) -> None:
        """The request is over, or discarded."""

    def skip_micro_batch(self, reason: str, request_ended: bool) -> None:
        """A micro-batch is left out (collective)."""

    def before_reduction(self, flush: Flush, following: int | None) -> None:
        """The gradients of these parameters are reduced next, before one that follows if that is known.

        Waits for what is agreed on.
        """

    def end_reduction(self) -> None:
        """A backward, or at stage 1 a request, has reduced everything."""

    def before_step(self, can_wait: bool) -> None:
        """A step comes next; ``can_wait``: its first collective is watched."""

    def before_judgement(self) -> None:
        """A collective at a request's end comes next, by which its gradient is judged."""

    def before_checkpoint(self, action: str) -> None:
        """A checkpoint is saved or loaded next, as ``action`` says (collective)."""

    def end_of_data(self) -> None:
        """There is no more data (collective)."""

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on. Returns if no rank can, for the same reason."""

    def wait_for_batch(self, work: torch.distributed.Work, device: torch.device) -> None:
        """A training loop's own collective before a batch is under way. Only where :attr:`active`."""

    def wait_for_device(self, device: torch.device) -> None:
        """The host is about to wait for everything that is queued on the device."""

    def close(self) -> None:
        """The engine is no longer used."""


class RankAgreement(Agreement):
    """Several ranks that agree.

    Args:
        channel: for agreeing.
        watch: for waiting.
        window: gives the engine's update window.
        name_of: the name of the parameter with DeepSpeed's number.
    """

    active = True

    def __init__(
        self, channel: Channel, watch: Watch, window: Callable[[], Window], name_of: Callable[[int], str]
    ) -> None:
        self._channel, self._watch, self._window, self._name_of = channel, watch, window, name_of
        self._request = Request()
        self._schedule = Schedule()
        self._round: Round | None = None
        self._waiting_in: Callable[[], Statement] = self._next_batch
        self._reducing = False  # within a backward, or at stage 1 at a request's end
        self._step_agreed = -1
        self._following: int | None = None

    # --- statements -------------------------------------------------------------------------------------------------

    def _statement(self, kind: Kind, text: str, content: str = "", announced: tuple[int, ...] = ()) -> Statement:
        request = self._request
        return Statement(kind, request.number, request.done, self._window().micro_batches, announced, content, text)

    def _state(self, kind: Kind, text: str, content: str = "", announced: tuple[int, ...] = ()) -> None:
        """Begin to agree on one thing; what was begun before has to be agreed on first."""
        self.check()
        self._finish()
        self._round = self._channel.state(self._statement(kind, text, content, announced))

    def _finish(self) -> None:
        """Wait for the agreement that is under way.

        Raises:
            RankDisagreementError: there is none.
        """
        if self._round is not None:
            agreed = self._round
            self._watch.wait(agreed.work, lambda: self._account(agreed.statement))
            self._round = None
            if not agreed.agreed():
                self._watch.disagree(self._account(agreed.statement))

    def _account(self, statement: Statement) -> Account:
        if statement.kind not in (Kind.ORDER, Kind.REDUCTION):
            return Account.of(statement)
        following = [] if self._following is None else [self._following]
        return Account.of(statement, [self._name_of(i) for i in [*self._schedule.reduced, *following]])

    def check(self) -> None:
        if self._watch.error is not None:
            raise self._watch.error

    def _reduction(self) -> Statement:
        return self._statement(Kind.REDUCTION, self._reduces())

    def _reduces(self) -> str:
        return f"reduces the gradients of micro-batch {self._request.done + 1} of {self._request}"

    def _application(self) -> Statement:
        return self._statement(Kind.APPLY, f"steps after {self._progress()}")

    def _judgement(self) -> Statement:
        return self._statement(Kind.JUDGEMENT, f"ends {self._request} after micro-batch {self._request.done}")

    def _next_batch(self) -> Statement:
        return self._statement(Kind.BATCH, f"comes to its next batch after {self._progress()}")

    def _progress(self) -> str:
        return f"micro-batch {self._request.done} of {self._request}" if self._request.number else "no request"

    # --- requests ---------------------------------------------------------------------------------------------------

    def begin_request(self, name: RequestId, micro_batches: int | None, window_end: bool | None) -> None:
        self.check()
        self._finish()
        number, window = self._request.number + 1, self._window()
        self._request = Request(number, name, micro_batches, window_end, closed=False, window=window)
        size = "" if micro_batches is None else f" of {micro_batches} micro-batches"
        end = "" if window_end is None else ", with a step after it" if window_end else ", with no step after it"
        self._state(Kind.REQUEST, f"begins {self._request}{size}{end}", repr(name), self._request.announced)

    def begin_backward(self, last: bool) -> None:
        self.check()
        self._schedule.restart()
        self._reducing = False
        self._step_agreed = -1
        request = self._request
        if request.ended(self._window()):
            self.begin_request(None, 1 if last else None, None)
        elif request.micro_batches is not None and request.done >= request.micro_batches:
            text = f"runs micro-batch {request.done + 1} of {request}, announced with {request.micro_batches}"
            self._state(Kind.MICRO_BATCH, text)

    def end_micro_batch(self, request_ended: bool) -> None:
        self._request.done += 1
        self._request.closed = request_ended
        self._request.window = self._window()

    def end_request(self) -> None:
        self._request.closed = True

    def skip_micro_batch(self, reason: str, request_ended: bool) -> None:
        if self._request.ended(self._window()):
            self.begin_request(None, 1 if request_ended else None, None)
        self._state(Kind.SKIP, f"leaves micro-batch {self._request.done + 1} of {self._request} out: {reason}")
        self._finish()
        self.end_micro_batch(request_ended)

    def before_step(self, can_wait: bool) -> None:
        self.check()
        request, window = self._request, self._window().micro_batches
        as_announced = request.window_end is True and request.done == request.micro_batches
        if not (as_announced and can_wait) and self._step_agreed != window:
            self._state(Kind.STEP, f"steps after {self._progress()}")
        self._finish()
        self._step_agreed = window
        self._reducing, self._waiting_in = False, self._application

    def before_judgement(self) -> None:
        request = self._request
        if request.done != request.micro_batches and self._step_agreed != self._window().micro_batches:
            self._state(Kind.REQUEST_END, f"ends {request} after micro-batch {request.done}")
            self._finish()
        self._reducing, self._waiting_in = False, self._judgement

    def before_checkpoint(self, action: str) -> None:
        self._state(Kind.CHECKPOINT, f"{action} a checkpoint after {self._progress()}", action)
        self._finish()

    def end_of_data(self) -> None:
        self._state(Kind.END_OF_DATA, f"has no more data after {self._progress()}")
        self._finish()
        self._request.closed = True

    # --- reduction --------------------------------------------------------------------------------------------------

    def before_reduction(self, flush: Flush, following: int | None) -> None:
        self.check()
        self._finish()
        self._following = following
        if not self._schedule.follows(flush):
            self._state(Kind.ORDER, self._reduces(), repr(flush))
            self._finish()
        self._reducing = True

    def end_reduction(self) -> None:
        self._finish()
        self._reducing, self._following = False, None
        if not self._schedule.ends():
            text = f"has reduced all gradients of micro-batch {self._request.done + 1} of {self._request}"
            self._state(Kind.ORDER, text, "end")
            self._finish()
        self._schedule.adopt()

    def wait(self, work: Work) -> None:
        """Wait for a collective of the backward or step at hand."""
        self._watch.wait(work, lambda: self._account(self._reduction() if self._reducing else self._waiting_in()))

    def wait_for_batch(self, work: torch.distributed.Work, device: torch.device) -> None:
        self._reducing, self._waiting_in = False, self._next_batch
        if device.type == "cpu":
            self.wait(work)
        else:
            work.wait()  # of the device's stream; given a time, NCCL aborts its communicator when that is over
            self.wait_for_device(device)

    def wait_for_device(self, device: torch.device) -> None:
        if device.type != "cpu":
            self.wait(QueuedWork())

    # --- failure and end --------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        if self._watch.error is not None or self._channel.closed:
            return
        text = f"failed after {self._progress()}: {type(error).__name__}: {error}"
        statement = self._statement(Kind.FAILURE, text, type(error).__name__)
        account = Account.of(statement)
        if self._round is not None:
            self._say(self._round, account)
            self._round = None
        self._say(self._channel.state(statement), account)

    def _say(self, agreed: Round, account: Account) -> None:
        """The last words of a rank that cannot go on; it does not wait for ever for ranks that are at work."""
        if not self._watch.wait(agreed.work, lambda: account, _LAST_WORDS, at_once=True):
            self._watch.give_up()
        if not agreed.agreed():
            self._watch.disagree(account)

    def close(self) -> None:
        text = f"has destroyed its engine after {self._progress()}"
        self._watch.leave(Account.of(self._statement(Kind.DESTROYED, text)))
        if self._watch.error is None:  # else a round may be under way, which the group's end would wait for
            self._channel.close()
