"""The names in a DeepSpeed config. Written for DeepSpeed 0.19.8, which skips unknown top-level keys."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from requestzero.deepspeed_config import RETAIN_OPTION, Config

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


def nearest(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the known name that is most like ``name``, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_top_level_keys(config: Config, source: str) -> None:
    """Raise ValueError for a key that DeepSpeed does not know, or a section that is no mapping."""
    for key in config:
        if key not in TOP_LEVEL_KEYS:
            raise ValueError(f"{key!r} in {source} is no key of a DeepSpeed config.{nearest(str(key), TOP_LEVEL_KEYS)}")
    for name in ("zero_optimization", "fp16", "bf16", "data_types", "activation_checkpointing"):
        if not isinstance(config.get(name, {}), dict):
            raise ValueError(f"{name}={config[name]!r} in {source} is not allowed: give a mapping of its options.")


def check_zero_section(config: Config, source: str) -> None:
    """Raise ValueError for a ZeRO option that does not exist, or that only stage 3 has. Imports DeepSpeed.

    DeepSpeed itself looks at this section only when the engine is built.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    section: dict[str, Any] = {
        key: value for key, value in config.get("zero_optimization", {}).items() if key != RETAIN_OPTION
    }
    fields = DeepSpeedZeroConfig.model_fields
    names = {*fields, *(field.alias for field in fields.values() if field.alias), RETAIN_OPTION}
    for key in section:
        if key not in names:
            raise ValueError(
                f"zero_optimization.{key} in {source} is no ZeRO option of DeepSpeed.{nearest(key, names)}"
            )
        if key in STAGE_3_KEYS or key.startswith("stage3_"):
            raise ValueError(
                f"zero_optimization.{key} in {source} does not apply: it belongs to ZeRO stage 3, and RequestZeRO "
                "makes stages 1 and 2 request-safe; leave it out."
            )
    DeepSpeedZeroConfig(**copy.deepcopy({key: value for key, value in section.items() if value != "auto"}))


def wants_offload(config: Config) -> bool:
    """Whether a DeepSpeed config asks for optimizer offload.

    Raises:
        ValueError: to another device than the CPU.
    """
    section = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    device = section.get("device", "none") if isinstance(section, Mapping) else section
    if device not in (None, "none", "cpu"):
        raise ValueError(
            f"zero_optimization.offload_optimizer.device={device!r} does not apply: ZeRO 1 and 2 offload the "
            "optimizer to 'cpu' only."
        )
    return device == "cpu"
