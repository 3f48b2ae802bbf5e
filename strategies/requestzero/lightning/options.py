"""The options of Lightning's ``DeepSpeedStrategy``: those that apply, and their DeepSpeed keys.

Written for Lightning 2.6, whose own strategy ignores most of its arguments without a word when ``config`` is given.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from lightning.pytorch.strategies import DeepSpeedStrategy

from requestzero.config.merge import Source, merge
from requestzero.config.nested import Config, put
from requestzero.config.option_record import options_of
from requestzero.config.options import OverflowSettings, RequestZeROSettings
from requestzero.config.suggestion import did_you_mean
from requestzero.config.translation import AUTO
from requestzero.config.validation import Boolean, Count, Rule, check
from requestzero.config.values import BUCKET_SIZES
from requestzero.lightning.strategy_facts import TRAINER, StrategyFacts

OWN_OPTIONS = TRAINER.own_options

DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(DeepSpeedStrategy.__init__).parameters.items()
    if name != "self" and name not in OWN_OPTIONS
}

LOSS_SCALE_OPTIONS = tuple(name for name in options_of(OverflowSettings) if name in DEFAULTS)
"""Options of ``DeepSpeedStrategy`` that are another way to write those of ``overflow``."""

KEYS = {
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "contiguous_gradients": "zero_optimization.contiguous_gradients",
    "overlap_comm": "zero_optimization.overlap_comm",
    "allgather_partitions": "zero_optimization.allgather_partitions",
    "reduce_scatter": "zero_optimization.reduce_scatter",
    "allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "pin_memory": "zero_optimization.offload_optimizer.pin_memory",
    "partition_activations": "activation_checkpointing.partition_activations",
    "cpu_checkpointing": "activation_checkpointing.cpu_checkpointing",
    "contiguous_memory_optimization": "activation_checkpointing.contiguous_memory_optimization",
    "synchronize_checkpoint_boundary": "activation_checkpointing.synchronize_checkpoint_boundary",
}
"""Options of ``DeepSpeedStrategy`` -> their keys in a DeepSpeed config."""

_RULES: dict[str, Rule] = {**BUCKET_SIZES, "logging_batch_size_per_gpu": Count(also=AUTO)}

_IN_CONFIG = "it is an option of ZeRO stage 3; write it into config, under zero_optimization"
_NVME = "it is for NVMe offload, whose gradients RequestZeRO cannot sum; leave it out"

NOT_APPLICABLE = {
    "zero_optimization": 'RequestZeRO is ZeRO 1, 2 or 3; use strategy="ddp" to train without ZeRO',
    "offload_optimizer_device": "RequestZeRO offloads the optimizer to the CPU only; leave it out",
    "remote_device": "modules of stage 3 are built on the device that trains; leave it out",
    "offload_params_device": "RequestZeRO offloads weights to the CPU only, by offload_parameters=True; leave it out",
    "params_buffer_count": _NVME,
    "params_buffer_size": _NVME,
    "max_in_cpu": _NVME,
    "sub_group_size": _IN_CONFIG,
    "load_full_weights": "a checkpoint of ZeRO stage 3 holds the parts of all ranks; leave it out",
    "nvme_path": _NVME,
    "optimizer_buffer_count": _NVME,
    "block_size": _NVME,
    "queue_depth": _NVME,
    "single_submit": _NVME,
    "overlap_events": _NVME,
    "thread_count": _NVME,
}


def check_options(options: Mapping[str, Any], strategy: StrategyFacts = TRAINER) -> None:
    """Raise where an option is not one of ``DeepSpeedStrategy``, or has no effect here.

    Raises:
        TypeError: an unknown name.
        ValueError: an option that does not apply, with the reason, or whose value is not allowed.
    """
    for name in options:
        if name not in DEFAULTS:
            raise TypeError(
                f"{strategy.name} has no option {name!r}: use its own ({', '.join(strategy.own_options)}) or those of "
                f"Lightning's DeepSpeedStrategy.{did_you_mean(name, [*strategy.own_options, *DEFAULTS])}"
            )
    for name, value in options.items():
        if name in NOT_APPLICABLE and value != DEFAULTS[name]:
            raise ValueError(f"{name}={value!r} does not apply: {NOT_APPLICABLE[name]}.")
        _check_value(name, value)


def _check_value(name: str, value: Any) -> None:
    if isinstance(DEFAULTS[name], bool):
        check(name, value, Boolean())
    if name in _RULES:
        check(name, value, _RULES[name])


def check_offload(settings: RequestZeROSettings, options: Mapping[str, Any]) -> None:
    """Raise ValueError where an option that is about offload was given without offload.

    Args:
        settings: the effective ones, from arguments and config.
        options: those of ``DeepSpeedStrategy``.
    """
    about_offload = {
        "pin_memory": options.get("pin_memory", False),
        "retain_gpu_grad_partition_until_step": settings.retain_gpu_grad_partition_until_step,
    }
    for name, value in about_offload.items():
        if value and not settings.offload_optimizer:
            raise ValueError(
                f"{name}={value!r} does not apply without optimizer offload: leave it out, or set "
                "offload_optimizer=True."
            )


def options_to_config(options: Mapping[str, Any], given: Collection[str], offload_optimizer: bool) -> Config:
    """Return the DeepSpeed keys of the options of ``DeepSpeedStrategy`` that were given."""
    config: Config = {}
    for name in options.keys() & KEYS.keys() & set(given):
        if name == "pin_memory" and not offload_optimizer:
            continue  # False, and there is no section of offload that could say otherwise
        put(config, KEYS[name], options[name])
    batch_size = options.get("logging_batch_size_per_gpu", AUTO)
    if batch_size != AUTO:
        config["train_micro_batch_size_per_gpu"] = batch_size
    return config


def merge_loss_scale(
    overflow: OverflowSettings, options: Mapping[str, Any], given: Collection[str]
) -> OverflowSettings:
    """Return ``overflow`` with the loss-scale arguments of ``DeepSpeedStrategy`` that were given.

    Raises:
        ValueError: one of them is also in ``overflow``, with another value.
    """
    arguments = {name: value for name, value in options.items() if name in LOSS_SCALE_OPTIONS and name in given}
    merged = merge(Source("an argument of RequestZeRO", arguments, "as"), Source("overflow", overflow.given()))
    return OverflowSettings(**merged)
