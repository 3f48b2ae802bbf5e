"""DeepSpeed's gathers of weights, counted, waited for under watch, and made up for where one rank fails in them.

A rank whose forward or backward gathers weights waits for all others, of which one may have failed, or have gone on to
something else. A wait for gloo can be made in pieces, and given up; on an accelerator gathers are queued, and the host
does not wait here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from requestzero.errors import AbortRequest
from requestzero.rank_check.agreement import RankAgreement
from requestzero.zero.common.ranks import Ranks
from requestzero.zero.common.streams import has_streams
from requestzero.zero.patch import patched
from requestzero.zero.stage_3.gather import Gather
from requestzero.zero.stage_3.postponed_gathers import PostponedGathers

_METHODS = ("all_gather_coalesced", "all_gather")
"""DeepSpeed's methods of a parameter: the first for a module that is about to run; the second where a program gathers
it, or uses it outside of its module."""


class WatchedHandle:
    """In the place of DeepSpeed's handle of a gather under way."""

    def __init__(self, gather: Gather, gathers: PostponedGathers) -> None:
        self._gather, self._gathers = gather, gathers

    def wait(self, handle_dependency: bool = True) -> None:
        """Wait for the weights, as DeepSpeed's handle does."""
        self._gathers.wait(self._gather, handle_dependency)


def watch_gathers(optimizer: DeepSpeedZeroOptimizer_Stage3, ranks: Ranks) -> PostponedGathers:
    """Let the collectives of forwards be counted, and waited for under watch where the host waits, from now on."""
    gathers = PostponedGathers(ranks.agreement)
    if not isinstance(ranks.agreement, RankAgreement):
        return gathers
    for param in optimizer.module.parameters():
        gathered: Any = param
        of_modules, by_itself = (_watched(param, name)[0] for name in _METHODS)
        gathered.all_gather_coalesced = partial(_gather, of_modules, gathers, ranks.comm)
        gathered.all_gather = partial(_gather_by_itself, by_itself, gathers, ranks.comm, param)
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    coordinator.reset_step = partial(_reset, coordinator.reset_step, ranks.comm)
    return gathers


def unwatch_gathers(optimizer: DeepSpeedZeroOptimizer_Stage3, ranks: Ranks) -> None:
    """Give parameters back the gathers that :func:`watch_gathers` has replaced for this engine."""
    for param in optimizer.module.parameters():
        for name in _METHODS:
            original, gathers = _watched(param, name)
            if gathers is not None and gathers.agreement is ranks.agreement:
                setattr(param, name, original)


def _watched(param: Any, name: str) -> tuple[Any, PostponedGathers | None]:
    """Return DeepSpeed's gather of a parameter, and who watches it, if somebody does."""
    gather = getattr(param, name, None)
    if isinstance(gather, partial) and gather.func in (_gather, _gather_by_itself):
        return gather.args[:2]  # type: ignore[return-value]
    return gather, None


def _reset(reset: Callable[[], None], comm: Any) -> None:
    """Compare the order of modules with the other ranks, as DeepSpeed does until it has recorded it."""
    with patched(zero_utils, "dist", comm):
        reset()


def _gather(
    gather: Callable[..., Any], gathers: PostponedGathers, comm: Any, params: Any, *args: Any, **kwargs: Any
) -> WatchedHandle:
    """Begin to gather as DeepSpeed does."""
    params = list(params)
    begun = Gather(partial(gather, params, *args, **kwargs), params, _communication(gathers, comm))
    gathers.begin(begun)
    return WatchedHandle(begun, gathers)


def _gather_by_itself(
    gather: Callable[..., Any],
    gathers: PostponedGathers,
    comm: Any,
    param: Any,
    param_list: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Gather as DeepSpeed does, what a rank that goes along with a forward would not.

    Where a module uses a weight of another, DeepSpeed has noted just before that it gathers it for that one from now
    on. A rank that has left the forward has not, so that this one forgets it too.
    """
    results: list[Any] = []
    params = [param] if param_list is None else list(param_list)
    missing = [each for each in params if each.ds_status == ZeroParamStatus.NOT_AVAILABLE]
    try:
        run = partial(gather, params, *args, **kwargs)
        begun = Gather(lambda: results.append(run()), missing, _communication(gathers, comm))
        gathers.begin(begun, planned=False)
    except AbortRequest:
        module: Any = parameter_offload.FWD_MODULE_STACK[-1]
        module._external_params.pop(id(param), None)
        raise
    gathers.raise_error()
    return results[0]


def _communication(gathers: PostponedGathers, comm: Any) -> Any:
    """Return how a gather communicates; ``None`` for as DeepSpeed does by itself.

    That is in a backward on an accelerator: the host does not wait there, and hooks may run in several threads.
    """
    return comm if gathers.may_repeat or not has_streams() else None
