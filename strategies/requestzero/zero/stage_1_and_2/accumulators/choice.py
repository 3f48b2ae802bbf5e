"""The choice of an accumulator for each parameter group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from requestzero.zero.common.partition_traffic import PartitionTraffic
from requestzero.zero.stage_1_and_2.accumulators.accumulator import Accumulator, CountsInNorm
from requestzero.zero.stage_1_and_2.accumulators.device import DeviceAccumulator
from requestzero.zero.stage_1_and_2.accumulators.gradient_sums import GradientSums
from requestzero.zero.stage_1_and_2.accumulators.host_copies import HostCopies
from requestzero.zero.stage_1_and_2.accumulators.muon import MuonAccumulator, Updates
from requestzero.zero.stage_1_and_2.accumulators.offload_host_gradient import HostGradientAccumulator
from requestzero.zero.stage_1_and_2.accumulators.offload_partition import CopyStream, PartitionAccumulator
from requestzero.zero.stage_1_and_2.accumulators.retention import Retention
from requestzero.zero.stage_1_and_2.layout import GroupLayout, Parameter


@dataclass(frozen=True)
class SumOptions:
    """Options that decide where sums are kept, and functions of the optimizer that accumulators need."""

    offloads: bool
    """The optimizer step runs on the CPU."""
    dtype: torch.dtype
    """Of the accumulation."""
    model_dtype: torch.dtype
    bucket_dtype: torch.dtype
    is_muon: Callable[[int], bool]
    """Tells by its index whether a group's gradients become Muon updates."""
    counts: CountsInNorm
    host_gradient: Callable[[int], torch.Tensor]
    """Gives a group's host gradient by its index (CPU offload)."""
    window_is_open: Callable[[], bool]
    host_is_needed: Callable[[], bool]
    """Tells whether the window may go back to what the host gradients hold (CPU offload)."""
    muon_params: Callable[[int], dict[int, Parameter]]
    """Gives the parameters of which this rank owns a part, by id, in DeepSpeed's order."""
    apply_muon: Callable[[int, list[torch.Tensor]], Updates]
    """Turns a group's whole, divided gradients into updates."""
    scale: Callable[[], float]
    """Gives loss scale times divisor."""
    retain: bool | str
    """The option ``retain_gpu_grad_partition_until_step``."""


def choose_sums(groups: list[GroupLayout], names: list[str], options: SumOptions) -> GradientSums:
    """Return the sums of all groups, each where the options want it."""
    copies, traffic, stream = HostCopies(), PartitionTraffic(), CopyStream()
    accumulators = [_choose(group, options, copies, traffic, stream) for group in groups]
    offloaded = [each for each in accumulators if isinstance(each, PartitionAccumulator)]
    partition_bytes = sum(each.group.partition_size * each.dtype.itemsize for each in offloaded)
    return GradientSums(accumulators, names, copies, Retention(options.retain, partition_bytes), traffic)


def _choose(
    group: GroupLayout, options: SumOptions, copies: HostCopies, traffic: PartitionTraffic, stream: Callable[[], Any]
) -> Accumulator:
    index, dtype, counts = group.index, options.dtype, options.counts
    if not options.offloads:
        if options.is_muon(index):
            # In the dtype in which DeepSpeed keeps the momentum.
            return MuonAccumulator(
                group,
                options.bucket_dtype,
                counts,
                options.muon_params(index),
                lambda wholes: options.apply_muon(index, wholes),
                options.scale,
            )
        return DeviceAccumulator(group, dtype, counts)
    on_host = (group, dtype, counts, lambda: options.host_gradient(index), copies, options.window_is_open)
    if dtype == torch.float32 != options.model_dtype and not options.is_muon(index):
        return PartitionAccumulator(*on_host, traffic=traffic, stream=stream, host_is_needed=options.host_is_needed)
    return HostGradientAccumulator(*on_host)
