"""An open window that another number of ranks has begun.

Its sums are means over ranks, so that they are multiplied by the old number of ranks over the new one: without rounding
where that is a power of two. Its counts and weights are shared out. The number of micro-batches of one rank has no
meaning any more: the step refuses a mean over them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from requestzero.data.micro_batch import RequestId
from requestzero.zero.window_checkpoint.record import SavedRank, SavedWindow


def share_of(saved: SavedWindow, rank: int, ranks: int) -> SavedRank:
    """Return what one rank has of the window now.

    Every rank has the same requests, and micro-batches as if they had been dealt out evenly, rounded up. The whole
    weight is on rank 0, so that its sum over ranks is not rounded.

    Args:
        saved: the window of all ranks that have saved.
        rank: of those that go on.
        ranks: their number.
    """
    micro_batches = sum(each.micro_batches for each in saved.ranks)
    without_weight = micro_batches - sum(each.reported_weights for each in saved.ranks)
    share = -(-micro_batches // ranks)
    ids = _all_ids([each.request_ids for each in saved.ranks])
    return SavedRank(
        micro_batches=share,
        requests=len(ids),
        request_ids=ids,
        reported_weights=max(0, share - without_weight),
        weight_on_host=sum(map(_weight, saved.ranks)) if rank == 0 else 0.0,
        weight_on_device=None,
        checked=min(len(ids), max(each.checked for each in saved.ranks)),
        dropped=max((each.dropped for each in saved.ranks), key=len),
        edited=any(each.edited for each in saved.ranks),
        unused=[],  # the reader unites those of all files
        norms={},  # were of other parts
        origin=_merged([each.origin for each in saved.ranks if each.origin is not None]),
        shared_out=True,
    )


def factor_of_sums(saved: SavedWindow, ranks: int, averaged: bool) -> float:
    """Return by what the saved sums are multiplied; warn where that rounds.

    Args:
        saved: the window of all ranks that have saved.
        ranks: number of those that go on.
        averaged: sums are means over ranks, as they are without ``gradient_allreduce_op: "sum"``.
    """
    factor = saved.data_parallel_ranks / ranks if averaged else 1.0
    if math.frexp(factor)[0] != 0.5:
        warnings.warn(
            f"The checkpoint's open window has means over {saved.data_parallel_ranks} ranks, and this run has {ranks}: "
            f"they are multiplied by {saved.data_parallel_ranks}/{ranks}, which rounds.",
            stacklevel=2,
        )
    return factor


def _weight(rank: SavedRank) -> float:
    return rank.weight_on_host + (rank.weight_on_device or 0.0)


def _all_ids(lists: Sequence[list[RequestId]]) -> list[RequestId]:
    """Return the names of the requests of all ranks, which run the same ones or each its own."""
    longest = max(lists, key=len)
    others = dict.fromkeys(name for ids in lists for name in ids if name is not None and name not in longest)
    return [*longest, *others]


def _merged(origins: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return what all ranks together know of a gradient that is not finite."""
    if not origins:
        return None
    request = min((each["request"] for each in origins if each["request"] is not None), default=None)
    return {
        "request": request,
        "parameters": sorted({name for each in origins if each["request"] == request for name in each["parameters"]}),
        "sum_request": min((each["sum_request"] for each in origins if each["sum_request"] is not None), default=None),
        "edited": any(each["edited"] for each in origins),
    }
