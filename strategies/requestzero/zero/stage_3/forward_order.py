"""Forwards that a rank leaves: it gathers weights along with the others, up to where all of them know of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn

from requestzero.errors import AbortRequest
from requestzero.rank_check.interface import Agreement
from requestzero.zero.stage_3.known_orders import Action, KnownOrders, Step
from requestzero.zero.stage_3.postponed_gathers import PostponedGathers


class ForwardOrder:
    """Follows the gathers of a request's forwards, and finishes those of one that this rank has left with an exception.

    The others are in a gather of that forward, or will be. Where it has followed the order of a forward before, the
    rank gathers and releases what that one has, without computing, and the others learn of the abort where they vote
    next: before their backward. Where the order is not known, as in an engine's first forward, all ranks vote before
    every gather; and where a forward leaves the order that it has followed, they vote once. A rank that learns of the
    abort there goes along that order to its end as well: both have then begun the same gathers.

    Does nothing before :meth:`follow`.
    """

    def __init__(self) -> None:
        self._coordinator: PartitionedParameterCoordinator | None = None
        self._module: nn.Module | None = None
        self._agreement = Agreement()
        self._gathers = PostponedGathers(self._agreement)
        self._orders = KnownOrders()
        self._runs = self._in_backward = False
        self._open = False  # a forward has begun since the last vote
        self._entered = False
        self._modules_before = 0  # that DeepSpeed keeps as running, from when a forward begins

    def follow(
        self, coordinator: PartitionedParameterCoordinator, module: nn.Module, gathers: PostponedGathers
    ) -> None:
        """Follow from now on what DeepSpeed's coordinator of gathers is asked for in forwards of ``module``."""
        module.register_forward_hook(_raise_abort, prepend=True)  # before DeepSpeed releases its weights
        self._coordinator, self._module, self._gathers = coordinator, module, gathers
        self._agreement = agreement = gathers.agreement
        agreement.on_abort, agreement.votes_at_gathers = self.finish, self._votes_at_gathers
        gathers.can_postpone = lambda: self._follows_now
        methods: Any = coordinator
        methods.reset_step = partial(self._start, coordinator.reset_step)
        methods.trace_prologue = partial(self._come_to, coordinator.trace_prologue)
        methods.fetch_sub_module = partial(self._fetch, coordinator.fetch_sub_module)
        methods.release_sub_module = partial(self._release, coordinator.release_sub_module)

    def _start(self, reset_step: Any) -> None:
        if self._follows_now:
            self._meet((Action.START, None))
            if self._votes_at_gathers(planned=True) and not self._trace_is_complete:  # it compares the ranks' records
                self._agreement.vote_in_forward()
        reset_step()

    def _come_to(self, trace_prologue: Any, module: nn.Module) -> None:
        """Note a module, before DeepSpeed fetches its weights, and gives up its own record where that differs."""
        if self._follows_now:
            self._meet((Action.GATHER, module))
        trace_prologue(module)

    def _fetch(self, fetch_sub_module: Any, module: nn.Module, forward: bool) -> None:
        """Let DeepSpeed finish what it notes of a fetch before the error of a gather in it leaves the forward."""
        fetch_sub_module(module, forward=forward)
        self._gathers.raise_error()

    def _release(self, release_sub_module: Any, module: nn.Module, forward: bool = False) -> None:
        if self._follows_now:
            self._orders.note((Action.RELEASE, module))
        release_sub_module(module, forward=forward)

    def _meet(self, step: Step) -> None:
        """Note a step on which ranks may wait for each other; vote where one that goes along would not come to it."""
        if self._orders.follows and not self._orders.expects(step):
            self._agreement.vote_in_forward()
        self._orders.note(step)

    def _votes_at_gathers(self, planned: bool) -> bool:
        return self._follows_now and not (planned and self._orders.follows)

    @property
    def _follows_now(self) -> bool:
        """True in a forward of a request, but not in a backward within it, where forwards are recomputed."""
        return self._runs and torch._C._current_graph_task_id() == -1

    @property
    def _trace_is_complete(self) -> bool:
        coordinator = self._coordinator
        return coordinator is not None and not (coordinator.is_invalid_trace() or coordinator.is_record_trace())

    # --- a forward --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse what comes after a forward that has failed in a gather, unless its request is aborted.

        Raises:
            RankDisagreementError: on all ranks.
        """
        self._gathers.refuse_rest()

    def begin(self, follows: bool) -> None:
        """Note that a forward runs from now on.

        Args:
            follows: it belongs to a request, and all ranks have agreed on it: they have gathered alike until now.
        """
        if self._coordinator is not None:
            if not self._entered:
                self._modules_before = len(parameter_offload.FWD_MODULE_STACK)
            if follows:
                self._orders.begin()
                self._runs = self._open = True
                self._in_backward = False
        self._entered = True

    def leave(self) -> None:
        """Note that it has returned, or raised."""
        self._entered = False

    def end(self) -> None:
        """Note that it has returned."""
        self.check()
        self._runs = False

    @property
    def is_inside(self) -> bool:
        """True while a forward runs, whose weights are in use."""
        return self._entered and self._coordinator is not None

    def begin_backward(self) -> None:
        """Note a backward for which all ranks have voted, after the forward or, as Lightning's may be, within it."""
        if self._runs:
            self._orders.note((Action.BACKWARD, None))
            self._in_backward = True
        else:
            self._open = False

    def end_backward(self) -> None:
        """Note that it is over."""
        self._in_backward = False

    # --- an abort ---------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True where the ranks may have left a forward at different places: since it began they have not voted."""
        return self._open

    def finish(self) -> None:
        """Gather what has failed, and what is left of the order that the forward has followed, up to the next vote.

        Collective. Nothing within a backward, which one rank alone cannot abort.
        """
        rest = [] if self._in_backward or not self._open else self._orders.rest()
        self._runs = False
        self._orders.forget_forward()
        if self._coordinator is not None:
            with self._gathers.making_up():
                _go_along(self._coordinator, rest)

    def forget(self) -> None:
        """Forget the forward of a request that is aborted, and DeepSpeed's record of the order, which may differ."""
        if self.is_open and self._coordinator is not None:
            del parameter_offload.FWD_MODULE_STACK[self._modules_before :]
        self._orders.forget_forward()
        self._runs = self._open = self._in_backward = False
        for module in [] if self._module is None else self._module.modules():
            parameters: Any = module._parameters
            parameters._in_forward = False  # as after a forward that returns: else a look at a weight would gather it
        if self._coordinator is not None and not self._coordinator.is_invalid_trace():
            self._coordinator._invalidate_trace()


def _go_along(coordinator: PartitionedParameterCoordinator, steps: list[Step]) -> None:
    for action, module in steps:
        if module is None:  # a start has none
            coordinator.reset_step()
        elif action is Action.GATHER:
            _gather(coordinator, module)
        else:
            coordinator.release_sub_module(module, forward=True)


def _gather(coordinator: PartitionedParameterCoordinator, module: nn.Module) -> None:
    """Do what DeepSpeed does before a module's forward."""
    coordinator.trace_prologue(module)
    if coordinator.is_record_trace():
        coordinator.record_module(module)
    coordinator.fetch_sub_module(module, forward=True)


def _raise_abort(module: nn.Module, inputs: Any, output: Any) -> None:
    """Raise an ``AbortRequest`` that a model returns, as Lightning's ``training_step`` may."""
    if isinstance(output, AbortRequest) or output is AbortRequest:
        raise output
