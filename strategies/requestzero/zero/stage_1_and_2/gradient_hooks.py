"""A short way past DeepSpeed's hooks of gradients, for those that only wait.

HACK: for every gradient DeepSpeed's hook calls some twenty methods, which look for the end of the backward and for what
a reduction needs. Where autograd tells the end, and nothing is reduced as it comes, they change nothing after the first
gradient of a backward, and cost as much as the addition to a sum. A hook keeps its place among those of users: another
function is put into the dictionary of hooks that PyTorch's handle refers to (``hooks_dict_ref``), in the hook's place.
No document of PyTorch names that dictionary: ``tests/test_upstream_contract.py`` pins where it is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from requestzero.zero.common.reduction_schedule import ReductionSchedule
from requestzero.zero.stage_1_and_2.local_gradients import LocalGradients

Hook = Callable[[Any], None]
"""Called with a parameter when autograd has brought its gradient."""


class HookedOptimizer(Protocol):
    """An optimizer whose constructor has registered DeepSpeed's hooks."""

    _grad_acc_hooks: list[Any]
    """The handles of PyTorch's."""
    _backward_active_depth: int
    """Backwards that the engine sees and that have not ended."""
    schedule: ReductionSchedule
    local: LocalGradients


def shorten(optimizer: HookedOptimizer) -> None:
    """Put a short way before each of DeepSpeed's hooks."""
    for handle in optimizer._grad_acc_hooks:
        hooks = handle.hooks_dict_ref()
        hooks[handle.id] = _with_short_way(hooks[handle.id], optimizer)


def _with_short_way(hook: Hook, optimizer: HookedOptimizer) -> Hook:
    schedule, accumulate = optimizer.schedule, optimizer.local.accumulate

    def keep_or_handle(param: Any) -> None:
        if schedule.only_waits and optimizer._backward_active_depth > 0:
            accumulate(param)
        else:
            hook(param)

    return keep_or_handle
