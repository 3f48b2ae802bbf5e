"""The check of ranks for an engine that shares its gradients with others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from typing_extensions import override

from requestzero.data.micro_batch import RequestId
from requestzero.errors import AbortRequest
from requestzero.rank_check.comparison import Comparison
from requestzero.rank_check.intent import Intent, Kind
from requestzero.rank_check.interface import Agreement
from requestzero.rank_check.message import by_rank
from requestzero.rank_check.progress import Progress
from requestzero.rank_check.queued_work import QueuedWork
from requestzero.rank_check.rank_report import RankReport
from requestzero.rank_check.reduction_order import Flush, ReductionOrder
from requestzero.rank_check.request import Request, Window
from requestzero.rank_check.watch import Watch, Work

if TYPE_CHECKING:
    import torch

    from requestzero.rank_check.channel import Channel


class RankAgreement(Agreement):
    """Follows the course of an engine, and compares with the other ranks what they do not know yet.

    Args:
        channel: for comparing intents.
        watch: for waiting.
        window: returns the engine's open update window.
        name_of: returns the name of the parameter with DeepSpeed's number.
        equal_micro_batches: compare requests and micro-batches; else only what comes between windows.
        votes: agree before every backward that no rank aborts its request.
    """

    active = True

    def __init__(
        self,
        channel: Channel,
        watch: Watch,
        window: Callable[[], Window],
        name_of: Callable[[int], str],
        equal_micro_batches: bool = True,
        votes: bool = False,
    ) -> None:
        super().__init__()
        self._channel, self._watch, self._name_of = channel, watch, name_of
        self._comparison = Comparison(channel, watch, self._report, self._note_abort)
        self._votes = votes
        self._reason: str | None = None  # this rank's, for the abort that it votes for
        self._abort: list[str | None] | None = None  # the reasons of all ranks, once they have agreed on one
        self._progress = Progress(window, equal_micro_batches)
        self._order = ReductionOrder()
        self._following: int | None = None
        self._reducing = False  # within a backward, or at stage 1 at a request's end
        self._waiting_for: Callable[[], Intent] = self._progress.comes_to_next_batch  # outside of it
        self._step_agreed = -1  # micro-batches of the window when a step was agreed on

    def _report(self, intent: Intent) -> RankReport:
        if intent.kind not in (Kind.ORDER, Kind.REDUCTION):
            return RankReport.of(intent)
        following = [] if self._following is None else [self._following]
        return RankReport.of(intent, [self._name_of(number) for number in [*self._order.reduced, *following]])

    def _compare(self, intent: Intent) -> None:
        self.check()
        self._finish()
        self._comparison.begin(intent)

    def _agree(self, intent: Intent) -> None:
        self._compare(intent)
        self._finish()

    def _finish(self) -> None:
        """Wait for the comparison that is under way, if there is one.

        Raises:
            RankDisagreementError: the intents differ.
            AbortRequest: another rank aborts the request.
        """
        self._comparison.finish()
        if self._abort is not None:
            raise AbortRequest(by_rank(self._abort))

    @property
    @override
    def votes_now(self) -> bool:
        return self._votes and not self._progress.request.ended(self._progress.window)

    @override
    def check(self) -> None:
        if self._watch.error is not None:
            raise self._watch.error
        if self._abort is not None:
            raise RuntimeError(
                "Another rank has aborted the request at hand, as AbortRequest has said on this one: call "
                "engine.abort_request(reason) here too, before anything else."
            )

    # --- requests ---------------------------------------------------------------------------------------------------

    @override
    def begin_request(self, name: RequestId, micro_batches: int | None, window_end: bool | None) -> None:
        self.check()
        self._finish()
        self._progress.begin(name, micro_batches, window_end)
        if self._progress.equal_micro_batches:
            self._compare(self._progress.begins())

    @override
    def before_forward(self, evaluates: bool) -> None:
        self.check()
        self._reducing = False
        if evaluates:
            if self.votes_now:
                self._compare(self._ready())
            self._agree(self._progress.evaluates())
            self._waiting_for = lambda: self._progress.evaluates(Kind.GATHER)
            return
        request, announced = self._progress.request, True
        if request.ended(self._progress.window):
            self.begin_request(None, None, None)
        else:
            announced = request.forwards < (request.micro_batches or 0)
        if self._votes:
            self._compare(self._ready())  # a rank without data would leave the others in a gather
        if not announced:
            self._compare(self._progress.forwards())
        self._finish()
        self._progress.request.forwards += 1
        self._waiting_for = lambda: self._progress.forwards(Kind.GATHER)

    @override
    def note_gather(self, planned: bool = True) -> None:
        if self.votes_at_gathers(planned):
            self.vote_in_forward()
        self._progress.gathers += 1

    @override
    def vote_in_forward(self) -> None:
        if self._votes:
            request = self._progress.request
            text = f"gathers weights in forward {request.forwards} of {request}"
            self._agree(self._progress.votes(Kind.READY, text, "in a forward"))

    @override
    def begin_backward(self, last: bool) -> None:
        self.check()
        self._order.restart()
        self._reducing = False
        self._step_agreed = -1
        request = self._progress.request
        if request.ended(self._progress.window):
            self.begin_request(None, 1 if last else None, None)
        elif self._exceeds(request):
            text = f"runs micro-batch {request.done + 1} of {request}, announced with {request.micro_batches}"
            self._compare(self._progress.intent(Kind.MICRO_BATCH, text))
        if self._votes:
            self._compare(self._ready())

    def _ready(self) -> Intent:
        request = self._progress.request
        return self._progress.votes(Kind.READY, f"goes on with {request} after micro-batch {request.done}")

    @override
    def finish_vote(self) -> None:
        if self._votes:
            self._finish()

    @override
    def end_block(self) -> None:
        if self._votes and not self._progress.request.aborted:
            self._agree(self._ready())

    @override
    def abort(self, reason: str) -> list[str | None]:
        self._reason = reason
        try:
            self._vote_for_abort(reason)
            assert self._abort is not None
            self._watch.last_abort = by_rank(self._abort)
            return self._abort
        finally:
            self._reason = self._abort = None
            self._order.restart()
            self._reducing = False
            self._progress.request.closed = self._progress.request.aborted = True

    def _vote_for_abort(self, reason: str) -> None:
        if self._watch.error is not None:
            raise self._watch.error
        self._comparison.finish()  # another rank may have been first
        if self._abort is None:
            request = self._progress.request
            text = f"aborts {request} after micro-batch {request.done}: {reason}"
            vote = self._progress.votes(Kind.ABORT, text)
            self._comparison.begin(vote)
            self._go_along(vote)  # others may come to a vote only then
            self._comparison.finish()

    def _go_along(self, vote: Intent) -> None:
        self._reducing, self._waiting_for = False, lambda: vote
        self.on_abort()

    def _note_abort(self) -> None:
        """Go along with the others, and get their reasons; ranks that have begun other gathers end in an error."""
        text = f"aborts {self._progress.request}: {self._reason or 'as another rank does'}"
        self._go_along(self._progress.votes(Kind.ABORT, text))
        gathers = self._progress.gathers
        report = RankReport.of(self._progress.votes(Kind.ABORT, f"{text}, after {gathers} gathers of weights"))
        told = self._channel.gather([self._reason, gathers], lambda work: self._watch.wait(work, lambda: report))
        if len({number for _, number in told}) > 1:
            self._watch.disagree(report)
        self._abort = [reason for reason, _ in told]

    def _exceeds(self, request: Request) -> bool:
        announced = request.micro_batches
        return self._progress.equal_micro_batches and announced is not None and request.done >= announced

    @override
    def end_micro_batch(self, request_ended: bool) -> None:
        self._progress.count_micro_batch(request_ended)

    @override
    def end_request(self) -> None:
        self._progress.request.closed = True

    @override
    def skip_micro_batch(self, reason: str, request_ended: bool) -> None:
        if self._progress.request.ended(self._progress.window):
            self.begin_request(None, 1 if request_ended else None, None)
        request = self._progress.request
        text = f"leaves micro-batch {request.done + 1} of {request} out: {reason}"
        if self._progress.equal_micro_batches:
            self._agree(self._progress.intent(Kind.SKIP, text))
        self._progress.count_micro_batch(request_ended)

    @override
    def before_step(self, can_wait: bool) -> None:
        self.check()
        request, micro_batches = self._progress.request, self._progress.window.micro_batches
        as_announced = request.window_end is True and request.done == request.micro_batches
        as_announced = as_announced and self._progress.equal_micro_batches
        if not (as_announced and can_wait) and self._step_agreed != micro_batches:
            self._compare(self._progress.steps(Kind.STEP))
        self._finish()
        if self._step_agreed != micro_batches:
            self._progress.windows += 1
        self._step_agreed = micro_batches
        self._reducing, self._waiting_for = False, lambda: self._progress.steps(Kind.APPLY)

    @override
    def before_finite_check(self) -> None:
        request = self._progress.request
        if request.done != request.micro_batches and self._step_agreed != self._progress.window.micro_batches:
            self._agree(self._progress.ends_request(Kind.REQUEST_END))
        self._reducing, self._waiting_for = False, lambda: self._progress.ends_request(Kind.FINITE_CHECK)

    @override
    def before_checkpoint(self, action: str, tag: str | None = None) -> None:
        named = "" if tag is None else f", tag {tag!r}"
        text = f"{action} a checkpoint after {self._progress}{named}"
        self._agree(self._progress.intent(Kind.CHECKPOINT, text, f"{action}{named}"))
        self._reducing, self._waiting_for = False, lambda: self._progress.intent(Kind.FILES, text)

    @override
    def before_collective(self, name: str) -> None:
        if self._watch.error is None and not self._channel.closed:
            text = f"waits in {name} after {self._progress}"
            self._agree(self._progress.intent(Kind.COLLECTIVE, text, name))

    @override
    def end_of_data(self) -> None:
        self._agree(self._progress.intent(Kind.END_OF_DATA, f"has no more data after {self._progress}"))
        self._progress.request.closed = True

    # --- reduction --------------------------------------------------------------------------------------------------

    @override
    def before_reduction(self, flush: Flush, following: int | None) -> None:
        self.check()
        self._finish()
        self._following = following
        self._progress.reductions += 1
        if not self._order.follows(flush):
            self._agree(self._progress.reduces(Kind.ORDER, repr(flush)))
        self._reducing = True

    @override
    def end_reduction(self) -> None:
        self._finish()
        self._reducing, self._following = False, None
        if not self._order.ends():
            text = f"has reduced all of {self._progress.gradients}"
            self._agree(self._progress.intent(Kind.ORDER, text, "end"))
        self._order.adopt()

    # --- waits ------------------------------------------------------------------------------------------------------

    def wait(self, work: Work) -> None:
        """Wait for a collective of the backward or step at hand.

        Raises:
            RankDisagreementError: on all ranks, if they wait for different things.
        """
        self._watch.wait(
            work, lambda: self._report(self._progress.reduces() if self._reducing else self._waiting_for())
        )

    @override
    def wait_for_batch(self, work: torch.distributed.Work, device: torch.device) -> None:
        self._reducing, self._waiting_for = False, self._progress.comes_to_next_batch
        if device.type == "cpu":
            self.wait(work)
        else:
            work.wait()  # of the device's stream; with a timeout, NCCL aborts its communicator when that is over
            self.wait_for_device(device)

    @override
    def wait_for_device(self, device: torch.device) -> None:
        if device.type != "cpu":
            self.wait(QueuedWork())

    # --- failure and end --------------------------------------------------------------------------------------------

    @override
    def fail(self, error: BaseException) -> None:
        if self._watch.error is not None or self._channel.closed:
            return
        text = f"failed after {self._progress}: {type(error).__name__}: {error}"
        self._comparison.fail(self._progress.intent(Kind.FAILURE, text, type(error).__name__))

    @override
    def close(self) -> None:
        text = f"has destroyed its engine after {self._progress}"
        self._watch.leave(RankReport.of(self._progress.intent(Kind.DESTROYED, text)))
        if self._watch.error is None:  # else a round may be under way, which the group's end would wait for
            self._channel.close()
