"""Goes on with the open window of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.utils import get_norm_dtype

from requestzero.zero.common.window import DroppedRequest, UpdateWindow, WindowWeights
from requestzero.zero.window_checkpoint.optimizer import CheckpointedOptimizer
from requestzero.zero.window_checkpoint.other_ranks import factor_of_sums, share_of
from requestzero.zero.window_checkpoint.record import SavedRank, SavedWindow
from requestzero.zero.window_checkpoint.sums import reading


def load(optimizer: CheckpointedOptimizer, folder: Path, saved: SavedWindow) -> None:
    """Put the window of a checkpoint in the place of the optimizer's, which is empty (this rank only).

    The stage, the place of the sums and their dtype may be others than those that were saved, and so may the number of
    ranks.

    Args:
        optimizer: has loaded the weights and the optimizer state of the checkpoint.
        folder: of the checkpoint.
        saved: the record in it.

    Raises:
        ValueError: the checkpoint has not the sums of these parameters, or was saved with another loss scale.
    """
    _check_scale(optimizer, saved)
    number, ranks, factor = dist.get_rank(group=optimizer.ranks.group), optimizer.ranks.size, 1.0
    own = number if saved.data_parallel_ranks == ranks else None
    if own is not None:
        rank = saved.ranks[own]
    else:
        rank = share_of(saved, number, ranks)
        factor = factor_of_sums(saved, ranks, getattr(optimizer, "gradient_average", True))  # stage 3 always averages
    optimizer.window = _window(rank)
    if saved.has_sums:
        unused = {name for each in saved.ranks for name in each.unused}
        with reading(folder, saved.data_parallel_ranks, factor, own) as sums:
            optimizer.sums.load(sums, rank, unused)
    if optimizer.origin is not None and rank.origin is not None:
        optimizer.origin.load(rank.origin, rank.requests)
    if saved.has_sums:
        optimizer.rollback.remember(optimizer.window)


def _check_scale(optimizer: CheckpointedOptimizer, saved: SavedWindow) -> None:
    scale = float(optimizer.loss_scale)
    if saved.has_sums and saved.loss_scale != scale:
        raise ValueError(
            f"The checkpoint's open window has gradients with the loss scale {saved.loss_scale:g}, and the engine's is "
            f"{scale:g}: load the optimizer state too, which holds the scale. Or load it without that window: "
            "load_checkpoint(..., discard_window=True)."
        )


def _window(rank: SavedRank) -> UpdateWindow:
    device = get_accelerator().current_device_name()
    on_device = rank.weight_on_device
    return UpdateWindow(
        micro_batches=rank.micro_batches,
        requests=rank.requests,
        request_ids=list(rank.request_ids),
        weights=WindowWeights(
            reported=rank.reported_weights,
            on_host=rank.weight_on_host,
            on_device=None if on_device is None else torch.tensor(on_device, dtype=get_norm_dtype(), device=device),
        ),
        checked=rank.checked,
        dropped=[DroppedRequest(**each) for each in rank.dropped],
        shared_out=rank.shared_out,
    )
