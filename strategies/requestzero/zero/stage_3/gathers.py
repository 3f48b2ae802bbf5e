"""DeepSpeed's collectives of a forward, above all its all-gathers of weights, waited for under watch.

A rank whose forward or backward gathers weights waits for all others, of which one may have failed, or have gone on to
something else. A wait for gloo can be made in pieces, and given up; on an accelerator gathers are queued, and the host
does not wait here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from deepspeed.runtime.zero import parameter_offload, partition_parameters
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from requestzero.errors import AbortRequest
from requestzero.rank_check.agreement import RankAgreement
from requestzero.rank_check.communication import WatchedWork
from requestzero.zero.common.ranks import Ranks
from requestzero.zero.common.streams import has_streams
from requestzero.zero.patch import patched

_GATHER = "_dist_allgather_fn"
_METHODS = ("all_gather_coalesced", "all_gather")
"""DeepSpeed's methods of a parameter: the first for a module that is about to run; the second where a program gathers
it, or uses it outside of its module."""


def watch_gathers(optimizer: DeepSpeedZeroOptimizer_Stage3, ranks: Ranks) -> None:
    """Let the collectives of forwards be counted, and waited for under watch where the host waits, from now on."""
    agreement = ranks.agreement
    if not isinstance(agreement, RankAgreement):
        return
    begin = None if has_streams() else partial(_begin, getattr(partition_parameters, _GATHER), agreement)
    for param in optimizer.module.parameters():
        gathered: Any = param
        of_modules, by_itself = (_watched(param, name)[0] for name in _METHODS)
        gathered.all_gather_coalesced = partial(_gather, of_modules, agreement, begin)
        gathered.all_gather = partial(_gather_by_itself, by_itself, agreement, param)
    if has_streams():
        return
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    coordinator.reset_step = partial(_reset, coordinator.reset_step, ranks.comm)


def unwatch_gathers(optimizer: DeepSpeedZeroOptimizer_Stage3, ranks: Ranks) -> None:
    """Give parameters back the gathers that :func:`watch_gathers` has replaced for this engine."""
    for param in optimizer.module.parameters():
        for name in _METHODS:
            original, agreement = _watched(param, name)
            if agreement is not None and agreement is ranks.agreement:
                setattr(param, name, original)


def _watched(param: Any, name: str) -> tuple[Any, Any]:
    """Return DeepSpeed's gather of a parameter, and the agreement that watches it, or ``None``."""
    gather = getattr(param, name, None)
    if isinstance(gather, partial) and gather.func in (_gather, _gather_by_itself):
        return gather.args[:2]
    return gather, None


def _reset(reset: Callable[[], None], comm: Any) -> None:
    """Compare the order of modules with the other ranks, as DeepSpeed does until it has recorded it."""
    with patched(zero_utils, "dist", comm):
        reset()


def _begin(gather: Callable[..., Any], agreement: RankAgreement, *args: Any, **kwargs: Any) -> WatchedWork:
    return WatchedWork(gather(*args, **kwargs), agreement)


def _gather(
    gather: Callable[..., Any],
    agreement: RankAgreement,
    begin: Callable[..., Any] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Gather as DeepSpeed does.

    # HACK: its handle keeps the work of ``torch.distributed`` in attributes that differ by case; all of it comes from
    # one function, which is looked up by its module-level name.
    """
    agreement.note_gather()
    with (
        _failing_together(agreement),
        nullcontext() if begin is None else patched(partition_parameters, _GATHER, begin),
    ):
        return gather(*args, **kwargs)


def _gather_by_itself(
    gather: Callable[..., Any], agreement: RankAgreement, param: Any, *args: Any, **kwargs: Any
) -> Any:
    """Gather as DeepSpeed does, what a rank that goes along with a forward would not.

    Where a module uses a weight of another, DeepSpeed has noted just before that it gathers it for that one from now
    on. A rank that has left the forward has not, so that this one forgets it too.
    """
    try:
        agreement.note_gather(planned=False)
    except AbortRequest:
        module: Any = parameter_offload.FWD_MODULE_STACK[-1]
        module._external_params.pop(id(param), None)
        raise
    with _failing_together(agreement):
        return gather(*args, **kwargs)


@contextmanager
def _failing_together(agreement: RankAgreement) -> Iterator[None]:
    """Fail on all ranks where a gather does, for want of memory: the others are in it, so that nothing can go on."""
    try:
        yield
    except Exception as error:
        agreement.fail(error)
        raise
