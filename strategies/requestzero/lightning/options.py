"""Which options of Lightning's ``DeepSpeedStrategy`` apply to ZeRO 1 and 2, and what they turn into.

Written for Lightning 2.6, whose own strategy ignores most of its arguments without a word when ``config`` is
given.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import DeepSpeedStrategy

from requestzero.deepspeed_keys import nearest
from requestzero.settings import OverflowSettings

OWN_OPTIONS = (
    "stage",
    "offload_optimizer",
    "retain_gpu_grad_partition_until_step",
    "grad_accum_dtype",
    "normalization",
    "incomplete_window",
    "overflow",
    "config",
)

DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(DeepSpeedStrategy.__init__).parameters.items()
    if name != "self" and name not in OWN_OPTIONS
}

LOSS_SCALE_OPTIONS = (
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "min_loss_scale",
)

_STAGE_3 = "it belongs to ZeRO stage 3, and RequestZeRO makes stages 1 and 2 request-safe; leave it out"
_NVME = "it is for NVMe offload, which only ZeRO stage 3 has; leave it out"

NOT_APPLICABLE = {
    "zero_optimization": 'RequestZeRO is ZeRO 1 or 2; use strategy="ddp" to train without ZeRO',
    "offload_optimizer_device": "ZeRO 1 and 2 offload the optimizer to the CPU only; leave it out",
    "remote_device": _STAGE_3,
    "offload_parameters": _STAGE_3,
    "offload_params_device": _STAGE_3,
    "params_buffer_count": _STAGE_3,
    "params_buffer_size": _STAGE_3,
    "max_in_cpu": _STAGE_3,
    "sub_group_size": _STAGE_3,
    "load_full_weights": _STAGE_3,
    "nvme_path": _NVME,
    "optimizer_buffer_count": _NVME,
    "block_size": _NVME,
    "queue_depth": _NVME,
    "single_submit": _NVME,
    "overlap_events": _NVME,
    "thread_count": _NVME,
}


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that differ from their defaults: LightningCLI passes every default on as if given."""
    return {name: value for name, value in options.items() if value is not DEFAULTS[name] and value != DEFAULTS[name]}


def check_options(options: Mapping[str, Any]) -> None:
    """Raise where an option is not one of ``DeepSpeedStrategy``, or has no effect under ZeRO 1 and 2.

    Raises:
        TypeError: an unknown name.
        ValueError: an option that does not apply, with the reason.
    """
    for name in options:
        if name not in DEFAULTS:
            raise TypeError(
                f"RequestZeRO has no option {name!r}: use its own ({', '.join(OWN_OPTIONS)}) or those of "
                f"Lightning's DeepSpeedStrategy.{nearest(name, [*OWN_OPTIONS, *DEFAULTS])}"
            )
    for name, value in given_options(options).items():
        if name in NOT_APPLICABLE:
            raise ValueError(f"{name}={value!r} does not apply: {NOT_APPLICABLE[name]}.")


def check_offload_options(options: Mapping[str, Any], retain: bool, offload_optimizer: bool) -> None:
    """Raise ValueError where an argument that is about offload was given without offload."""
    given = {"pin_memory": options.get("pin_memory", False), "retain_gpu_grad_partition_until_step": retain}
    for name, value in given.items():
        if value and not offload_optimizer:
            raise ValueError(
                f"{name}={value!r} does not apply without optimizer offload: leave it out, or set "
                "offload_optimizer=True."
            )


def merge_loss_scale(overflow: OverflowSettings, options: Mapping[str, Any]) -> OverflowSettings:
    """``overflow`` with the loss-scale arguments of ``DeepSpeedStrategy`` that were given.

    Raises:
        ValueError: one of them is also in ``overflow``, with another value.
    """
    given = {name: value for name, value in given_options(options).items() if name in LOSS_SCALE_OPTIONS}
    for name, value in given.items():
        other = getattr(overflow, name)
        if other is not None and other != value:
            raise ValueError(
                f"{name} is {value!r} as an argument of RequestZeRO and {other!r} in overflow: set it in one "
                "place, or to the same value."
            )
    return dataclasses.replace(overflow, **given)
