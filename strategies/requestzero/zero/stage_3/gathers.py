"""DeepSpeed's collectives of a forward, above all its all-gathers of weights, waited for under watch.

A rank whose forward or backward gathers weights waits for all others, of which one may have failed, or have gone on to
something else. A wait for gloo can be made in pieces, and given up; on an accelerator gathers are queued, and the host
does not wait here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from requestzero.rank_check.agreement import RankAgreement
from requestzero.rank_check.communication import WatchedWork
from requestzero.zero.common.ranks import Ranks
from requestzero.zero.common.streams import has_streams
from requestzero.zero.patch import patched

_GATHER = "_dist_allgather_fn"


def watch_gathers(optimizer: DeepSpeedZeroOptimizer_Stage3, ranks: Ranks) -> None:
    """Let the collectives of forwards be counted, and waited for under watch where the host waits, from now on."""
    agreement = ranks.agreement
    if not isinstance(agreement, RankAgreement):
        return
    begin = None if has_streams() else partial(_begin, getattr(partition_parameters, _GATHER), agreement)
    for param in optimizer.module.parameters():
        gathered: Any = param
        original, _ = _watched(gathered)
        gathered.all_gather_coalesced = partial(_gather, original, agreement, begin)
    if has_streams():
        return
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    coordinator.reset_step = partial(_reset, coordinator.reset_step, ranks.comm)


def unwatch_gathers(optimizer: DeepSpeedZeroOptimizer_Stage3, ranks: Ranks) -> None:
    """Give parameters back the gathers that :func:`watch_gathers` has replaced for this engine."""
    for param in optimizer.module.parameters():
        gathered: Any = param
        original, agreement = _watched(gathered)
        if agreement is not None and agreement is ranks.agreement:
            gathered.all_gather_coalesced = original


def _watched(param: Any) -> tuple[Any, Any]:
    """Return DeepSpeed's gather of a parameter, and the agreement that watches it, or ``None``."""
    gather = getattr(param, "all_gather_coalesced", None)
    if isinstance(gather, partial) and gather.func is _gather:
        original, agreement, _ = gather.args
        return original, agreement
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
    if begin is None:
        return gather(*args, **kwargs)
    with patched(partition_parameters, _GATHER, begin):
        return gather(*args, **kwargs)
