"""The parts that a ZeRO-1/2 optimizer owns, built from what DeepSpeed's constructor has laid out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from requestzero.config.reduction_time import ReduceAt
from requestzero.zero.common.divisor import StepDivisor
from requestzero.zero.common.ranks import Ranks
from requestzero.zero.common.reduction_schedule import ReductionSchedule
from requestzero.zero.common.rollback import RequestRollback
from requestzero.zero.common.step_norm import StepNorm
from requestzero.zero.common.window_options import WindowOptions
from requestzero.zero.overflow.origin import OverflowOrigin
from requestzero.zero.stage_1_and_2.accumulators.choice import SumOptions, choose_sums
from requestzero.zero.stage_1_and_2.accumulators.fragments import GradientFragments
from requestzero.zero.stage_1_and_2.accumulators.gradient_sums import GradientSums
from requestzero.zero.stage_1_and_2.accumulators.muon import Updates
from requestzero.zero.stage_1_and_2.bucket import Bucket
from requestzero.zero.stage_1_and_2.bucket_collective import BucketCollective, ReductionOptions
from requestzero.zero.stage_1_and_2.gradient_reduction import GradientReduction, Route
from requestzero.zero.stage_1_and_2.layout import Parameter, PartitionLayout
from requestzero.zero.stage_1_and_2.local_gradients import LocalGradients
from requestzero.zero.stage_1_and_2.local_memory import LocalMemory
from requestzero.zero.stage_1_and_2.weight_gathers import WeightGathers
from requestzero.zero.stage_1_and_2.written_weights import WrittenWeights


@dataclass(frozen=True)
class OptimizerParts:
    """Owned by one optimizer."""

    layout: PartitionLayout
    ranks: Ranks
    sums: GradientSums
    local: LocalGradients
    schedule: ReductionSchedule
    reduction: GradientReduction
    divisor: StepDivisor
    norm: StepNorm
    origin: OverflowOrigin | None
    rollback: RequestRollback
    written: WrittenWeights
    gathers: WeightGathers
    fragments: dict[int, GradientFragments]
    """By group: where ``safe_get_full_grad`` and ``safe_set_full_grad`` find gradients."""


def build_parts(
    optimizer: DeepSpeedZeroOptimizer,
    options: WindowOptions,
    window_is_open: Callable[[], bool],
) -> OptimizerParts:
    """Build the parts of a ``RequestZeROOptimizer``, when the constructor of DeepSpeed's class has run.

    Args:
        optimizer: has laid out parameters and partitions.
        options: of the engine.
        window_is_open: tells whether the window has had any gradient.
    """
    layout = PartitionLayout(optimizer)
    ranks = Ranks(optimizer.dp_process_group, optimizer._model_parallel_all_reduce)
    names = [optimizer.param_names[param] for param in layout.params]

    def host_is_needed() -> bool:
        return rollback.has_saved_sums

    sums = choose_sums(layout.groups, names, _sum_options(optimizer, layout, options, window_is_open, host_is_needed))
    divisor = StepDivisor(ranks.size, _mean_to_sum(optimizer, ranks))
    local = LocalGradients(optimizer.gradient_accumulation_dtype)
    schedule = _schedule(optimizer, options, layout, local, ranks)
    origin = OverflowOrigin(sums, names) if options.records_origin else None
    rollback = RequestRollback(sums.accumulators, copies=options.drops_requests or options.aborts)
    reduction = _build_reduction(optimizer, layout, ranks, sums, local, schedule, options, rollback)
    if origin is not None:
        reduction.observers.append(origin.record)
    return OptimizerParts(
        layout=layout,
        ranks=ranks,
        sums=sums,
        local=local,
        schedule=schedule,
        reduction=reduction,
        divisor=divisor,
        norm=StepNorm(
            sums,
            divisor,
            ranks,
            refuses_unused=optimizer.cpu_offload and not optimizer.ignore_unused_parameters,
            average_expert_norms=_expert_norms(optimizer) if optimizer.has_moe_layers else None,
        ),
        origin=origin,
        rollback=rollback,
        written=WrittenWeights(optimizer, layout, options.compares_weights),
        gathers=WeightGathers(layout.groups, lambda: optimizer.bit16_groups_flat, ranks),
        fragments={each.group.index: GradientFragments(each) for each in sums.accumulators},
    )


def _sum_options(
    optimizer: DeepSpeedZeroOptimizer,
    layout: PartitionLayout,
    options: WindowOptions,
    window_is_open: Callable[[], bool],
    host_is_needed: Callable[[], bool],
) -> SumOptions:
    def counts(param_id: int) -> bool:
        """DeepSpeed's rule against counting twice what pipeline or model parallelism replicates."""
        param = layout.params[param_id]
        if getattr(param, PIPE_REPLICATED, False):
            return False
        return is_model_parallel_parameter(param) or optimizer.model_parallel_rank == 0

    def apply_muon(index: int, wholes: list[torch.Tensor]) -> Updates:
        optimizer.all_grad_tensors[index] = wholes
        return optimizer.get_flat_partition(  # type: ignore[no-any-return]
            optimizer.params_in_partition[index],
            optimizer.first_offset[index],
            optimizer.partition_size[index],
            dtype=optimizer.gradient_accumulation_dtype,
            device=wholes[0].device if wholes else torch.device(optimizer.device),
            param_group_idx=index,
            return_tensor_list=True,
        )

    def host_gradient(index: int) -> torch.Tensor:
        gradient = optimizer.single_partition_of_fp32_groups[index].grad
        assert gradient is not None
        return gradient

    return SumOptions(
        offloads=optimizer.cpu_offload,
        dtype=optimizer.gradient_accumulation_dtype,
        model_dtype=optimizer.dtype,
        bucket_dtype=_bucket_dtype(optimizer),
        is_muon=lambda index: is_muon_group(optimizer, index),
        counts=counts,
        host_gradient=host_gradient,
        window_is_open=window_is_open,
        host_is_needed=host_is_needed,
        muon_params=lambda index: {layout.id_of(param): param for param in optimizer.params_in_partition[index]},
        apply_muon=apply_muon,
        scale=lambda: float(optimizer.loss_scale),
        retain=options.retain,
    )


def is_muon_group(optimizer: DeepSpeedZeroOptimizer, index: int) -> bool:
    """Return whether the group's gradients become Muon updates before they are applied. The same on all ranks."""
    group = optimizer.bit16_groups[index]
    return bool(group) and bool(optimizer._is_muon_group(group))


def _bucket_dtype(optimizer: DeepSpeedZeroOptimizer) -> torch.dtype:
    """Stage 1 gathers its fp32 sums, stage 2 gradients in the dtype of the model."""
    dtype: torch.dtype = (
        optimizer.gradient_accumulation_dtype if optimizer.use_grad_accum_attribute else optimizer.dtype
    )
    return dtype


def _mean_to_sum(optimizer: DeepSpeedZeroOptimizer, ranks: Ranks) -> float:
    return float(optimizer.sequence_parallel_size if optimizer.gradient_average else ranks.size)


def _schedule(
    optimizer: DeepSpeedZeroOptimizer,
    options: WindowOptions,
    layout: PartitionLayout,
    local: LocalGradients,
    ranks: Ranks,
) -> ReductionSchedule:
    size = sum(param.numel() for param in layout.params) * optimizer.gradient_accumulation_dtype.itemsize
    memory = LocalMemory(size, local, ranks) if options.reduction.while_memory else None
    return ReductionSchedule(
        options.reduction,
        overlaps=optimizer.overlap_comm,
        fills_absent=options.fills_absent,
        keeps=lambda: memory is None or memory.suffices(),
    )


def _build_reduction(
    optimizer: DeepSpeedZeroOptimizer,
    layout: PartitionLayout,
    ranks: Ranks,
    sums: GradientSums,
    local: LocalGradients,
    schedule: ReductionSchedule,
    options: WindowOptions,
    rollback: RequestRollback,
) -> GradientReduction:
    def before_first() -> None:
        sums.wait_for_copies()
        if not schedule.mixes_requests:  # else no request can be taken out of the sum again
            rollback.save_sums()

    collective = BucketCollective(
        ReductionOptions(
            average=optimizer.gradient_average,
            partitioned=optimizer.reduce_scatter,
            to_owners=not optimizer.use_multi_rank_bucket_allreduce,
            divides_first=not optimizer.postscale_gradients,
            predivide_factor=optimizer.gradient_predivide_factor,
            sequence_parallel_size=optimizer.sequence_parallel_size,
        ),
        layout.groups,
        needs_whole=lambda index: is_muon_group(optimizer, index),
        ranks=ranks,
    )
    time = options.reduction
    return GradientReduction(
        layout,
        local,
        _arriving(optimizer, layout) if time.at is ReduceAt.BACKWARD or time.while_memory else None,
        _waiting(optimizer, layout, options) if time.at is not ReduceAt.BACKWARD else None,
        collective,
        sums.add,
        schedule,
        ranks,
        optimizer.is_gradient_accumulation_boundary,
        before_first,
    )


def _arriving(optimizer: DeepSpeedZeroOptimizer, layout: PartitionLayout) -> Route:
    """Return the route of gradients that are reduced as they come, in the dtype of the model."""
    buffers = 2 if optimizer.overlap_comm else 1
    return _route(optimizer, layout, optimizer.get_param_comm_dtype, optimizer.dtype, buffers)


def _waiting(optimizer: DeepSpeedZeroOptimizer, layout: PartitionLayout, options: WindowOptions) -> Route:
    """Return the route of sums of several micro-batches, in the dtype of the accumulation."""

    def comm_dtype(param: Parameter) -> torch.dtype:
        dtype: torch.dtype = options.reduces_sums_in or optimizer.get_param_comm_dtype(param)
        return dtype

    buffers = 2 if optimizer.overlap_comm else 0
    return _route(optimizer, layout, comm_dtype, optimizer.gradient_accumulation_dtype, buffers)


def _route(
    optimizer: DeepSpeedZeroOptimizer,
    layout: PartitionLayout,
    comm_dtype: Callable[[Parameter], torch.dtype],
    dtype: torch.dtype,
    buffers: int,
) -> Route:
    capacity, total = int(optimizer.reduce_bucket_size), sum(param.numel() for param in layout.params)
    shares = {param_id: shares for group in layout.groups for param_id, shares in group.shares.items()}
    dtypes = sorted({comm_dtype(param) for param in layout.params}, key=str)
    return Route({each: Bucket(each, dtype, capacity, buffers, total, shares) for each in dtypes}, comm_dtype)


def _expert_norms(optimizer: DeepSpeedZeroOptimizer) -> Callable[[list[torch.Tensor]], None]:
    def average(norms: list[torch.Tensor]) -> None:
        moved = [norm.to(optimizer.device) for norm in norms]
        optimizer._average_expert_grad_norms(moved)
        norms[:] = moved

    return average
