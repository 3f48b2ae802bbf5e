"""Interface between an engine and the check of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from requestzero.data.micro_batch import RequestId
from requestzero.rank_check.reduction_order import Flush

if TYPE_CHECKING:
    import torch


class Agreement:
    """Interface of the check, and its implementation where there is nothing to check: one rank, or the option is off.

    The methods marked "collective" wait for the other ranks. They raise RankDisagreementError on all of them if one
    does something else.
    """

    active = False
    """True where there are ranks to agree with."""

    def __init__(self) -> None:
        self.on_abort: Callable[[], None] = lambda: None
        """Called on all ranks where they have voted to abort a request, before they compare their gathers: to make up
        for those that others have begun."""
        self.votes_at_gathers: Callable[[bool], bool] = lambda planned: False
        """Returns true where the ranks have to vote before a gather of weights, see :meth:`note_gather`."""

    @property
    def votes_now(self) -> bool:
        """True while a request is at hand that one rank alone can abort: the ranks vote on it."""
        return False

    def check(self) -> None:
        """Raise the error of an engine that has failed already."""

    def begin_request(self, name: RequestId, micro_batches: int | None, window_end: bool | None) -> None:
        """Announce the request that comes next, without waiting for the other ranks.

        Args:
            name: of the request.
            micro_batches: number of its backwards, if known.
            window_end: true or false where it is known if a step follows it.
        """

    def before_forward(self, evaluates: bool) -> None:
        """Agree on a forward that gathers weights from all ranks, as at stage 3 (collective, unless it was announced).

        Args:
            evaluates: no backward can follow it.
        """

    def note_gather(self, planned: bool = True) -> None:
        """Note a gather of weights, before it: only ranks that have begun as many can abort a request together.

        Collective where :attr:`votes_at_gathers` says so, as :meth:`vote_in_forward`.

        Args:
            planned: DeepSpeed gathers for a module that is about to run, or ahead of it; else a program does.
        """

    def vote_in_forward(self) -> None:
        """Vote in the middle of a forward (collective where ranks vote).

        Raises:
            AbortRequest: another rank aborts the request.
        """

    def begin_backward(self, last: bool) -> None:
        """Announce a backward without waiting; ``last`` where its request is known to end with it."""

    def finish_vote(self) -> None:
        """Wait until it is known that no rank aborts the request whose backward was announced, where ranks vote on it.

        Raises:
            AbortRequest: another rank aborts it.
        """

    def end_block(self) -> None:
        """Vote at the end of the block of a request, likewise (collective where ranks vote)."""

    def abort(self, reason: str) -> list[str | None]:
        """Agree to abort the request at hand (collective); return the reasons of all ranks that had one, by rank.

        The other ranks may learn of it at any vote: :attr:`on_abort` is called once this rank's vote is cast.
        """
        return [reason]

    def end_micro_batch(self, request_ended: bool) -> None:
        """Note that a micro-batch is done, and whether its request has ended with it."""

    def end_request(self) -> None:
        """Note that the request is over, or discarded."""

    def skip_micro_batch(self, reason: str, request_ended: bool) -> None:
        """Leave a micro-batch out (collective)."""

    def before_reduction(self, flush: Flush, following: int | None) -> None:
        """Agree on the gradients that are reduced next (collective where the order is new).

        Args:
            flush: the parameters, by DeepSpeed's numbers.
            following: the parameter whose gradient comes after them, if known.
        """

    def end_reduction(self) -> None:
        """Note that a backward, or at stage 1 a request, has reduced all gradients."""

    def before_step(self, can_wait: bool) -> None:
        """Agree to step (collective, unless it was announced); ``can_wait``: the step's first collective is watched."""

    def before_finite_check(self) -> None:
        """Agree to check a request's gradient at its end (collective, unless that was announced)."""

    def before_checkpoint(self, action: str, tag: str | None = None) -> None:
        """Agree to save or load a checkpoint, as ``action`` says, of one tag if it is given (collective)."""

    def before_collective(self, name: str) -> None:
        """Agree to a collective of the training loop, such as a barrier (collective); nothing once ranks disagree."""

    def end_of_data(self) -> None:
        """Agree that there is no more data (collective)."""

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one cannot go on. Returns if no rank can, for the same reason."""

    def wait_for_batch(self, work: torch.distributed.Work, device: torch.device) -> None:
        """Wait for a training loop's own collective before a batch; where ranks agree, until they do something else."""
        work.wait()

    def wait_for_device(self, device: torch.device) -> None:
        """Wait for everything that is queued on the device, as a host read is about to do."""

    def close(self) -> None:
        """Leave the check: the engine is no longer used."""
