"""The order in which forwards gather weights, by which a rank that leaves a forward goes along with the others."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

Step = tuple[nn.Module | None, bool]
"""A module, and whether its weights are gathered or released; without a module: a backward begins."""
_BACKWARD: Step = (None, False)


class ForwardOrder:
    """Follows the gathers of training forwards, and finishes those of one that this rank has left with an exception.

    The others are in the next gather of that forward, or will be: they learn that this rank aborts the request where
    they vote next, which is before their backward. Until then it gathers and releases, without computing, what the
    forward before has gathered and released after the same beginning. Nothing happens, and the others stay in their
    gather, where there was no such forward: in an engine's first one, and where modules run in another order.

    Does nothing before :meth:`follow`.
    """

    def __init__(self) -> None:
        self._coordinator: Any = None
        self._before: list[Step] = []
        self._now: list[Step] = []
        self._runs = self._ended = self._open = False

    def follow(self, coordinator: Any) -> None:
        """Record from now on what DeepSpeed's coordinator of gathers is asked for."""
        self._coordinator = coordinator
        coordinator.fetch_sub_module = partial(self._note, coordinator.fetch_sub_module, True)
        coordinator.release_sub_module = partial(self._note, coordinator.release_sub_module, False)

    def _note(self, run: Any, gathers: bool, module: nn.Module, forward: bool = False) -> None:
        if self._runs and forward:
            self._now.append((module, gathers))
        run(module, forward=forward)

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
        if self._runs:
            self._now.append(_BACKWARD)
        else:
            self._open = False

    # --- an abort ---------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True where the ranks may have left a forward at different places: since it began they have not voted."""
        return self._open and self._coordinator is not None

    def finish(self) -> None:
        """Gather what is left of a forward that this rank has left, up to the next vote (collective)."""
        if not (self._runs and self._coordinator is not None):
            return
        self._runs = False
        done = len(self._now)
        if self._now[-1:] == self._before[-1:]:  # the model has returned, without running all of its modules
            done -= 1
        if self._now[:done] == self._before[:done]:
            self._go_along(self._before[done:])

    def _go_along(self, steps: list[Step]) -> None:
        for module, gathers in steps:
            if module is None:
                break
            if gathers:
                self._coordinator.trace_prologue(module)
                self._coordinator.fetch_sub_module(module, forward=True)
            else:
                self._coordinator.release_sub_module(module, forward=True)

    def forget(self) -> None:
        """Forget the forward of a request that is aborted, and DeepSpeed's record of the order, which may differ."""
        self._now, self._runs, self._ended, self._open = [], False, False, False
        if not self._coordinator.is_invalid_trace():
            self._coordinator._invalidate_trace()
