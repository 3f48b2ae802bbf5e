"""The parts that a ZeRO-3 optimizer owns, built from what DeepSpeed's constructor has laid out."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from requestzero.zero.common.divisor import StepDivisor
from requestzero.zero.common.ranks import Ranks
from requestzero.zero.common.rollback import RequestRollback
from requestzero.zero.common.step_norm import StepNorm
from requestzero.zero.common.window_options import WindowOptions
from requestzero.zero.overflow.origin import OverflowOrigin
from requestzero.zero.stage_3.layout import ShardLayout, check_one_group
from requestzero.zero.stage_3.reduction import BucketReduction
from requestzero.zero.stage_3.shard_sums import ShardSums
from requestzero.zero.stage_3.written_weights import WrittenShards


@dataclass(frozen=True)
class OptimizerParts:
    """Owned by one optimizer."""

    layout: ShardLayout
    ranks: Ranks
    sums: ShardSums
    reduction: BucketReduction
    divisor: StepDivisor
    norm: StepNorm
    origin: OverflowOrigin | None
    rollback: RequestRollback
    written: WrittenShards


def build_parts(optimizer: DeepSpeedZeroOptimizer_Stage3, options: WindowOptions) -> OptimizerParts:
    """Build the parts of a ``RequestZeROStage3Optimizer``, when the constructor of DeepSpeed's class has run.

    Args:
        optimizer: has cut parameters into shards.
        options: of the engine.

    Raises:
        ValueError: the shards are not those of the data-parallel ranks.
    """
    check_one_group(optimizer.sub_group_process_groups, optimizer.dp_process_group)
    layout = ShardLayout(optimizer)
    ranks = Ranks(optimizer.dp_process_group, optimizer._model_parallel_all_reduce)
    names = [optimizer.param_names[param] for param in layout.params]
    sums = _build_sums(optimizer, layout, names)
    divisor = StepDivisor(ranks.size, _mean_to_sum(optimizer))
    origin = OverflowOrigin(sums, names) if options.records_origin else None
    rollback = RequestRollback([sums], copies=options.drops_requests or options.aborts)
    reduction = BucketReduction(layout, optimizer.ipg_buckets, ranks, rollback.save_sums)
    if origin is not None:
        reduction.observers.append(origin.record)
    norm = StepNorm(sums, divisor, ranks, refuses_unused=False, average_expert_norms=None)
    written = WrittenShards(optimizer, layout, options.compares_weights)
    return OptimizerParts(layout, ranks, sums, reduction, divisor, norm, origin, rollback, written)


def _build_sums(optimizer: DeepSpeedZeroOptimizer_Stage3, layout: ShardLayout, names: list[str]) -> ShardSums:
    def counts(param_id: int) -> bool:
        """DeepSpeed's rule against counting twice what model parallelism replicates."""
        return optimizer.model_parallel_rank == 0 or is_model_parallel_parameter(layout.params[param_id])

    def factor(index: int) -> float:
        return float(optimizer.loss_scale) if optimizer._muon_update_lacks_loss_scale(index) else 1.0

    return ShardSums(
        layout,
        names,
        lambda: optimizer.grad_partitions_flat_buffer,
        optimizer.fp32_partitioned_groups_flat if optimizer.offload_optimizer else None,
        counts,
        factor if optimizer.use_muon else None,
    )


def _mean_to_sum(optimizer: DeepSpeedZeroOptimizer_Stage3) -> float:
    """DeepSpeed counts sequence-parallel ranks as one where it reduces without a reduce-scatter, and only there."""
    whole = optimizer.contiguous_gradients and not optimizer.reduce_scatter
    return float(optimizer.sequence_parallel_size if whole else 1)
