"""The order in which forwards gather weights, by which a rank that leaves a forward goes along with the others."""

from __future__ import annotations

from enum import Enum
from functools import partial
from typing import Any

from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn

from requestzero.errors import AbortRequest


class Action(Enum):
    """Parts of a forward that concern the other ranks."""

    START = "DeepSpeed begins its record of the order of modules; again where a module calls itself"
    GATHER = "the weights of a module are gathered"
    RELEASE = "they are released"
    BACKWARD = "a backward begins"


Step = tuple[Action, nn.Module | None]


class ForwardOrder:
    """Follows the gathers of training forwards, and finishes those of one that this rank has left with an exception.

    The others are in the next gather of that forward, or will be: they learn that this rank aborts the request where
    they vote next, which is before their backward. Until then it gathers and releases, without computing, what the
    forward before has gathered and released after the same beginning. Nothing happens, and the others stay in their
    gather, where there was no such forward: in an engine's first one, and where modules run in another order.

    Does nothing before :meth:`follow`.
    """

    def __init__(self) -> None:
        self._coordinator: PartitionedParameterCoordinator | None = None
        self._before: list[Step] = []
        self._now: list[Step] = []
        self._runs = self._ended = self._open = False

    def follow(self, coordinator: PartitionedParameterCoordinator, module: nn.Module) -> None:
        """Record from now on what DeepSpeed's coordinator of gathers is asked for in forwards of ``module``."""
        module.register_forward_hook(_raise_abort, prepend=True)  # before DeepSpeed releases its weights
        self._coordinator = coordinator
        methods: Any = coordinator
        methods.reset_step = partial(self._start, coordinator.reset_step)
        methods.fetch_sub_module = partial(self._run, coordinator.fetch_sub_module, Action.GATHER)
        methods.release_sub_module = partial(self._run, coordinator.release_sub_module, Action.RELEASE)

    def _start(self, reset_step: Any) -> None:
        self._note(Action.START)
        reset_step()

    def _run(self, run: Any, action: Action, module: nn.Module, forward: bool = False) -> None:
        if forward:
            self._note(action, module)
        run(module, forward=forward)

    def _note(self, action: Action, module: nn.Module | None = None) -> None:
        if self._runs:
            self._now.append((action, module))

    # --- a forward --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to record. All ranks have agreed on this forward, and so have ended the one before."""
        if self._ended:
            self._before = self._now
        self._now, self._runs, self._ended, self._open = [], True, False, True

    def end(self) -> None:
        """Note that the forward has returned."""
        self._runs, self._ended = False, True

    def begin_backward(self) -> None:
        """Note a backward for which all ranks have voted, after the forward or, as Lightning's may be, within it."""
        self._note(Action.BACKWARD)
        if not self._runs:
            self._open = False

    # --- an abort ---------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True where the ranks may have left a forward at different places: since it began they have not voted."""
        return self._open and self._coordinator is not None

    def finish(self) -> None:
        """Gather what is left of a forward that this rank has left, up to the next vote (collective)."""
        if not self._runs or self._coordinator is None:
            return
        self._runs = False
        done = len(self._now)
        if self._now == self._before[:done]:
            _go_along(self._coordinator, self._before[done:])

    def forget(self) -> None:
        """Forget the forward of a request that is aborted, and DeepSpeed's record of the order, which may differ."""
        self._now, self._runs, self._ended, self._open = [], False, False, False
        if self._coordinator is not None and not self._coordinator.is_invalid_trace():
            self._coordinator._invalidate_trace()


def _go_along(coordinator: PartitionedParameterCoordinator, steps: list[Step]) -> None:
    for action, module in steps:
        if action is Action.BACKWARD:
            break
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
