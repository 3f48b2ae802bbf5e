"""The names in a DeepSpeed config. Written for DeepSpeed 0.19.8, which skips unknown top-level keys."""

from __future__ import annotations

# fmt: off
TOP_LEVEL_KEYS = frozenset([
    "activation_checkpointing", "aio", "autotuning", "bf16", "checkpoint", "comet", "comms_logger",
    "communication_data_type", "compile", "compression_training", "csv_monitor", "data_efficiency",
    "data_types", "dataloader_drop_last", "datastates_ckpt", "disable_allgather", "disable_python_gc",
    "dump_state", "expert_parallel", "flops_profiler", "fp16", "gradient_accumulation_steps",
    "gradient_allreduce_op", "gradient_clipping", "gradient_predivide_factor", "hybrid_engine",
    "keep_in_fp32_modules", "log_level", "managed_gradient_accumulation", "memory_breakdown", "nebula",
    "optimizer", "pipeline", "prescale_gradients", "scheduler", "seq_parallel_communication_data_type",
    "steps_per_print", "tensor_parallel", "tensorboard", "timers", "torch_autocast", "train_batch_size",
    "train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism", "vocabulary_size",
    "wall_clock_breakdown", "wandb", "weight_quantization", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "zero_optimization",
])
"""Sections and scalars of a DeepSpeed config."""

STAGE_3_KEYS = frozenset([
    "allgather_sequential", "cpu_offload_param", "gather_16bit_weights_on_model_save", "leaf_module",
    "max_live_parameters", "max_reuse_distance", "model_persistence_threshold",
    "module_granularity_threshold", "offload_param", "param_persistence_threshold", "prefetch_bucket_size",
    "sub_group_size", "use_all_reduce_for_fetch_params",
])
"""Keys of ``zero_optimization`` that only stage 3 reads, beside those whose name begins with ``stage3_``."""
# fmt: on
