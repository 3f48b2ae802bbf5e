"""Saves an open window beside DeepSpeed's files."""

from __future__ import annotations

from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from requestzero._version import __version__
from requestzero.zero.window_checkpoint import sums
from requestzero.zero.window_checkpoint.optimizer import CheckpointedOptimizer
from requestzero.zero.window_checkpoint.record import SavedRank, SavedWindow


def save(optimizer: CheckpointedOptimizer, folder: Path, *, stage: int, offload: bool, writes_record: bool) -> None:
    """Write the open window, between requests and with nothing left to reduce. Collective.

    Args:
        optimizer: owns the window, which stays as it is.
        folder: of the checkpoint; exists.
        stage: of ZeRO.
        offload: whether the optimizer is offloaded.
        writes_record: this rank writes the record, once the sums of all ranks are written.
    """
    window, group = optimizer.window, optimizer.ranks.group
    rank = _record(optimizer)
    if window.has_sum:
        get_accelerator().synchronize()  # the sums may have been written on several streams
        dtype = optimizer.gradient_accumulation_dtype
        checksum = sums.write(folder, dist.get_rank(group=group), optimizer.sums.owned_parts(), dtype)
        rank = replace(rank, checksum=checksum)
    optimizer.ranks.agreement.before_collective("the record of the window")  # a rank may have failed to write
    records: list[SavedRank] = [rank] * optimizer.ranks.size
    torch.distributed.all_gather_object(records, rank, group=group)
    if writes_record:
        SavedWindow(
            stage=stage,
            offload=offload,
            accumulation_dtype=str(optimizer.gradient_accumulation_dtype).removeprefix("torch."),
            loss_scale=float(optimizer.loss_scale),
            has_sums=window.has_sum,
            requestzero_version=__version__,
            deepspeed_version=version("deepspeed"),
            ranks=records,
        ).write(folder)


def _record(optimizer: CheckpointedOptimizer) -> SavedRank:
    window, held = optimizer.window, optimizer.sums
    weights, origin = window.weights, optimizer.origin
    return SavedRank(
        micro_batches=window.micro_batches,
        requests=window.requests,
        request_ids=window.request_ids[: window.requests],
        reported_weights=weights.reported,
        weight_on_host=float(weights.on_host),
        weight_on_device=None if weights.on_device is None else float(weights.on_device),
        checked=window.checked,
        dropped=[asdict(each) for each in window.dropped],
        edited=held.edited,
        unused=held.unused_parameters(),
        norms=held.norms(),
        origin=None if origin is None else origin.state(),
        shared_out=window.shared_out,
    )
