"""The names in a DeepSpeed config. Written for DeepSpeed 0.19.8, which skips unknown top-level keys."""

from __future__ import annotations

from requestzero.config.nested import Config, look_up
from requestzero.config.option_record import OWN_SECTIONS
from requestzero.config.own_keys import check_own_keys
from requestzero.config.removed_keys import removed_sections
from requestzero.config.suggestion import did_you_mean
from requestzero.config.validation import as_mapping

# fmt: off
TOP_LEVEL_KEYS = frozenset([
    "activation_checkpointing", "aio", "autotuning", "bf16", "checkpoint", "comet", "comms_logger",
    "communication_data_type", "compile", "csv_monitor", "data_efficiency", "data_types",
    "dataloader_drop_last", "datastates_ckpt", "disable_allgather", "disable_python_gc", "dump_state",
    "expert_parallel", "flops_profiler", "fp16", "gradient_accumulation_steps", "gradient_allreduce_op",
    "gradient_clipping", "gradient_predivide_factor", "hybrid_engine", "log_level",
    "managed_gradient_accumulation", "memory_breakdown", "optimizer", "pipeline", "prescale_gradients",
    "scheduler", "seq_parallel_communication_data_type", "steps_per_print", "tensor_parallel", "tensorboard",
    "timers", "torch_autocast", "train_batch_size", "train_micro_batch_size_per_gpu",
    "use_data_before_expert_parallelism", "vocabulary_size", "wall_clock_breakdown", "wandb",
    "weight_quantization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
])
"""Sections and scalars of a DeepSpeed config."""

REMOVED_KEYS = frozenset([
    "amp", "compression_training", "curriculum_learning", "eigenvalue", "elasticity", "graph_harvesting", "nebula",
    "progressive_layer_drop", "quantize_training", "sparse_attention", "sparse_gradients",
])
"""Sections that DeepSpeed once had and now refuses, each with a message of its own."""

SECTION_KEYS = {
    "activation_checkpointing": frozenset([
        "contiguous_memory_optimization", "cpu_checkpointing", "number_checkpoints", "partition_activations",
        "profile", "synchronize_checkpoint_boundary",
    ]),
    "bf16": frozenset([
        "bf16_master_weights_and_grads", "bf16_optimizer_states", "check_grad_overflow", "enabled",
        "immediate_grad_update",
    ]),
    "data_types": frozenset(["buffer_dtype", "grad_accum_dtype", "keep_in_fp32_modules", "param_dtype"]),
    "fp16": frozenset([
        "auto_cast", "consecutive_hysteresis", "enabled", "fp16_master_weights_and_grads", "hysteresis",
        "initial_scale_power", "loss_scale", "loss_scale_window", "min_loss_scale",
    ]),
}
"""Keys of sections in which DeepSpeed skips unknown ones, or finds them only when the engine is built."""

_NEWER_KEYS = {"disable_python_gc": "DISABLE_PYTHON_GC", "data_types.keep_in_fp32_modules": "KEEP_IN_FP32_MODULES"}
"""Keys that DeepSpeed reads since 0.19.8, and the constant that it names each by."""

STAGE_3_KEYS = frozenset([
    "allgather_sequential", "cpu_offload_param", "gather_16bit_weights_on_model_save", "leaf_module",
    "max_live_parameters", "max_reuse_distance", "model_persistence_threshold",
    "module_granularity_threshold", "offload_param", "param_persistence_threshold", "prefetch_bucket_size",
    "sub_group_size", "use_all_reduce_for_fetch_params",
])
"""Keys of ``zero_optimization`` that only stage 3 reads, beside those whose name begins with ``stage3_``."""
# fmt: on


def check_top_level_keys(config: Config, source: str) -> None:
    """Raise ValueError for a key that nobody knows, here, in a section of ``SECTION_KEYS`` or in one of our own.

    A section that is no mapping, and one that DeepSpeed has removed, are errors too.

    Args:
        config: a DeepSpeed config.
        source: its place, for messages.
    """
    for key in config:
        if key in REMOVED_KEYS:
            message = removed_sections().get(key, "DeepSpeed has removed it; leave it out.")
            raise ValueError(f"{key!r} in {source} is not possible: {message}")
        if key not in TOP_LEVEL_KEYS and key not in OWN_SECTIONS:
            near = did_you_mean(str(key), TOP_LEVEL_KEYS.union(OWN_SECTIONS))
            raise ValueError(f"{key!r} in {source} is no key of a DeepSpeed config.{near}")
    for name in ("zero_optimization", *SECTION_KEYS):
        section = config.get(name, {})
        as_mapping(name, section, given=f"{name}={section!r} in {source}")
    for name, known in SECTION_KEYS.items():
        for key in config.get(name, {}):
            if key not in known:
                raise ValueError(
                    f"{name}.{key} in {source} is no option of DeepSpeed's {name}.{did_you_mean(str(key), known)}"
                )
    refuse_unread_keys(config, source)
    check_own_keys(config, source)


def unread_keys() -> set[str]:
    """Return the keys that the installed DeepSpeed, an older one, would skip without a word."""
    from deepspeed.runtime import constants

    return {key for key, constant in _NEWER_KEYS.items() if not hasattr(constants, constant)}


def refuse_unread_keys(config: Config, source: str) -> None:
    """Raise ValueError for a key that the installed DeepSpeed, an older one, would skip without a word.

    Args:
        config: a DeepSpeed config.
        source: its place, for messages.
    """
    for key in _NEWER_KEYS:
        # DeepSpeed, which is slow to import, is asked last.
        if look_up(config, key) is not None and key in unread_keys():
            raise ValueError(
                f"{key} in {source} is not possible: the installed DeepSpeed does not read it. Leave it out, or run: "
                'pip install "deepspeed>=0.19.8"'
            )
