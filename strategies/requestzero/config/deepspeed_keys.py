"""The names in a DeepSpeed config. Written for DeepSpeed 0.19.8, which skips unknown top-level keys."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from requestzero.config.deepspeed_config import OWN_SECTION, RETAIN_OPTION, Config, take_own_section
from requestzero.config.nearest import nearest
from requestzero.config.overflow_config import OVERFLOW_SECTION, check_overflow_section

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

OWN_SECTIONS = frozenset([OVERFLOW_SECTION, OWN_SECTION])
"""Sections that only this package reads."""

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
    """
    for key in config:
        if key in REMOVED_KEYS:
            raise ValueError(f"{key!r} in {source} is not possible: {_removal(key)}")
        if key not in TOP_LEVEL_KEYS and key not in OWN_SECTIONS:
            near = nearest(str(key), TOP_LEVEL_KEYS | OWN_SECTIONS)
            raise ValueError(f"{key!r} in {source} is no key of a DeepSpeed config.{near}")
    for name in ("zero_optimization", *SECTION_KEYS):
        if not isinstance(config.get(name, {}), dict):
            raise ValueError(f"{name}={config[name]!r} in {source} is not allowed: give a mapping of its options.")
    for name, known in SECTION_KEYS.items():
        for key in config.get(name, {}):
            if key not in known:
                raise ValueError(
                    f"{name}.{key} in {source} is no option of DeepSpeed's {name}.{nearest(str(key), known)}"
                )
    check_overflow_section(config, source)
    take_own_section(dict(config))


def _removal(key: str) -> str:
    """What DeepSpeed says of a section that it has removed."""
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS

    return _REMOVED_TOP_LEVEL_CONFIG_KEYS.get(key, "DeepSpeed has removed it; leave it out.")


def check_zero_section(config: Config, source: str) -> None:
    """Raise ValueError for a ZeRO option that does not exist, that only stage 3 has, or with a wrong value.

    DeepSpeed, which is imported for it, looks at this section only when the engine is built.
    """
    from deepspeed.runtime.config import _REMOVED_ZERO_CONFIG_KEYS
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    section: dict[str, Any] = {
        key: value for key, value in config.get("zero_optimization", {}).items() if key != RETAIN_OPTION
    }
    fields = DeepSpeedZeroConfig.model_fields
    names = {*fields, *(field.alias for field in fields.values() if field.alias), RETAIN_OPTION}
    for key in section:
        if key in _REMOVED_ZERO_CONFIG_KEYS:
            raise ValueError(f"zero_optimization.{key} in {source} is not possible: {_REMOVED_ZERO_CONFIG_KEYS[key]}")
        if key not in names:
            raise ValueError(
                f"zero_optimization.{key} in {source} is no ZeRO option of DeepSpeed.{nearest(str(key), names)}"
            )
        if key in STAGE_3_KEYS or key.startswith("stage3_"):
            raise ValueError(
                f"zero_optimization.{key} in {source} does not apply: it belongs to ZeRO stage 3, and RequestZeRO "
                "makes stages 1 and 2 request-safe; leave it out."
            )
    parsed = _parse(DeepSpeedZeroConfig, section, "zero_optimization", source)
    for key in section.keys() & BUCKET_SIZES:
        if section[key] != "auto":
            check_bucket_size(key, getattr(parsed, key), f"zero_optimization.{key}={section[key]!r} in {source}")


BUCKET_SIZES = frozenset(["allgather_bucket_size", "reduce_bucket_size"])


def check_bucket_size(name: str, size: Any, given: str) -> None:
    """Raise ValueError unless ``size``, in elements, is one that ZeRO 1 and 2 accept.

    Args:
        name: one of ``BUCKET_SIZES``.
        given: what was given where, for the message.
    """
    whole = isinstance(size, int) and not isinstance(size, bool) and size > 0
    if name == "allgather_bucket_size" and (not whole or size % 2):
        raise ValueError(f"{given} is not allowed: use an even whole number above 0, in elements.")
    if not whole:
        raise ValueError(f"{given} is not allowed: use a whole number above 0, in elements.")


def check_values(config: Config, source: str) -> None:
    """Raise ValueError for a value of clipping, communication, dtypes, ``fp16`` or ``bf16`` that is not allowed.

    DeepSpeed, which is imported for it, would find it when the engine is built, or take it for something else.
    """
    from deepspeed.runtime.config import DtypeEnum
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config

    _check_clipping(config.get("gradient_clipping", 0.0), source)
    for key in ("communication_data_type", "seq_parallel_communication_data_type"):
        value = config.get(key)
        if value is not None and str(value).lower() not in ("fp16", "bf16", "fp32"):
            raise ValueError(f"{key}={value!r} in {source} is not allowed: use 'fp16', 'bf16' or 'fp32'.")
    for key in ("param_dtype", "buffer_dtype"):
        value = config.get("data_types", {}).get(key)
        if value is not None and value not in DtypeEnum._value2member_map_:
            raise ValueError(f"data_types.{key}={value!r} in {source} is not allowed: use 'fp16', 'bf16' or 'fp32'.")
    fp16 = _parse(DeepSpeedFP16Config, config.get("fp16", {}), "fp16", source)
    bf16 = _parse(DeepSpeedBF16Config, config.get("bf16", {}), "bf16", source)
    if fp16.enabled and bf16.enabled:
        raise ValueError(f"fp16.enabled and bf16.enabled in {source} are both true: turn one of them off.")


def _check_clipping(value: Any, source: str) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
    if value != "auto" and (not number or value < 0):
        raise ValueError(
            f"gradient_clipping={value!r} in {source} is not allowed: use the largest norm of the gradient, or 0 for "
            "no clipping."
        )


def _parse(model: Any, values: Mapping[str, Any], section: str, source: str) -> Any:
    """``values`` as DeepSpeed's own model of a section reads them; ValueError with the full key otherwise."""
    from pydantic import ValidationError

    try:
        # A copy without "auto", which only a front end could replace.
        return model(**copy.deepcopy({key: value for key, value in values.items() if value != "auto"}))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join([section, *map(str, first["loc"])])
        raise ValueError(f"{name}={first['input']!r} in {source} is not allowed: {first['msg']}.") from error


def wants_offload(config: Config) -> bool:
    """Whether a DeepSpeed config asks for optimizer offload.

    Raises:
        ValueError: to another device than the CPU, or without naming one, where DeepSpeed would not offload.
    """
    section = config.get("zero_optimization", {}).get("offload_optimizer")
    if isinstance(section, Mapping) and "device" not in section:
        raise ValueError(
            f"zero_optimization.offload_optimizer={dict(section)!r} names no device, which DeepSpeed takes for no "
            "offload: set zero_optimization.offload_optimizer.device to 'cpu', or leave the section out."
        )
    device = section["device"] if isinstance(section, Mapping) else section
    if device not in (None, "none", "cpu"):
        raise ValueError(
            f"zero_optimization.offload_optimizer.device={device!r} does not apply: ZeRO 1 and 2 offload the "
            "optimizer to 'cpu' only."
        )
    return device == "cpu"
