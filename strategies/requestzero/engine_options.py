"""What an engine is told beside DeepSpeed's own options, and where it stands in a DeepSpeed config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from requestzero.deepspeed_config import OVERFLOW_SECTION, Config, take_retain_option
from requestzero.nearest import nearest
from requestzero.settings import OWN_OVERFLOW_KEYS, OverflowSettings


@dataclass(frozen=True)
class EngineOptions:
    """Options of :class:`~requestzero.optimizer.engine.RequestZeROEngine` that DeepSpeed's config classes do not know.

    See :mod:`requestzero.settings`, which owns their meaning and defaults.
    """

    retain_gpu_grad_partition_until_step: bool = False
    """DeepSpeed key: ``zero_optimization.retain_gpu_grad_partition_until_step``."""
    overflow: OverflowSettings = field(default_factory=OverflowSettings)
    """Only ``on_overflow``, ``max_consecutive_skips`` and, in fp32, ``check_grad_overflow`` are read: the others stand
    in DeepSpeed's own ``fp16`` and ``bf16`` sections. Key: the config's section ``overflow``."""


def take_engine_options(config: Config) -> EngineOptions:
    """Remove from ``config`` what DeepSpeed would reject or ignore, and return it.

    Raises:
        ValueError: a value that is not allowed, a key that does not exist or has another place, or options that
            disagree.
    """
    options = EngineOptions(
        retain_gpu_grad_partition_until_step=take_retain_option(config),
        overflow=_take_overflow(config),
    )
    check_overflow_policy(options.overflow, config)
    return options


def _take_overflow(config: Config) -> OverflowSettings:
    """Remove the section ``overflow`` and return it as settings."""
    section = config.pop(OVERFLOW_SECTION, {})
    if not isinstance(section, Mapping):
        raise ValueError(f"overflow={section!r} is not allowed: give a mapping of its options.")
    precision = precision_of(config)
    allowed = (*OWN_OVERFLOW_KEYS, *(["check_grad_overflow"] if precision == "fp32" else []))
    for key in section:
        if key not in allowed:
            raise ValueError(f"overflow.{key} {_refusal(str(key), precision, allowed)}")
    return OverflowSettings.build(section)


def _refusal(key: str, precision: str, allowed: tuple[str, ...]) -> str:
    """Why ``overflow.key`` does not stand in a DeepSpeed config of this precision, and what to do."""
    if key == "check_grad_overflow" and precision == "bf16":
        return "in a DeepSpeed config is for fp32; the precision is bf16: use bf16.check_grad_overflow."
    if key == "check_grad_overflow":
        return "in a DeepSpeed config is for fp32; the precision is fp16, which always checks: leave it out."
    if any(key == item.name for item in fields(OverflowSettings)):
        return f"has its own place in a DeepSpeed config: use fp16.{key}."
    return f"is no overflow option: use one of {', '.join(allowed)}.{nearest(key, allowed)}"


def precision_of(config: Mapping[str, Any]) -> str:
    """``"fp16"``, ``"bf16"`` or ``"fp32"``: what the sections of a DeepSpeed config turn on."""
    sections = {"fp16": config.get("fp16"), "bf16": _bf16_section(config)}
    return next((name for name, section in sections.items() if (section or {}).get("enabled") is True), "fp32")


def _bf16_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("bf16") or config.get("bfloat16") or {}  # DeepSpeed knows the older name, too


def check_overflow_policy(overflow: OverflowSettings, config: Mapping[str, Any]) -> None:
    """Raise ValueError where the policy cannot work with the rest of a DeepSpeed config; names the keys that disagree.

    Args:
        overflow: ``on_overflow``, ``max_consecutive_skips`` and, in fp32, ``check_grad_overflow`` are looked at.
        config: a DeepSpeed config; the precision and its check, loss scale and managed accumulation are looked at.
    """
    own = overflow.own_options()
    if not own:
        return
    name, value = next(iter(own.items()))
    precision = precision_of(config)
    if precision == "fp32" and overflow.check_grad_overflow is not True:
        raise ValueError(
            f"overflow.{name}={value!r} needs overflow.check_grad_overflow=true, which is off by default in fp32: turn "
            "it on, or leave both out."
        )
    if precision == "bf16" and _bf16_section(config).get("check_grad_overflow") is False:
        raise ValueError(
            f"overflow.{name}={value!r} and bf16.check_grad_overflow=false disagree: without the check no overflow is "
            "seen. Turn it on, or leave the other out."
        )
    if overflow.on_overflow != "drop_request":
        return
    if precision == "fp16" and not config["fp16"].get("loss_scale", 0):
        raise ValueError(
            "overflow.on_overflow='drop_request' and a dynamic loss scale (fp16.loss_scale=0, the default) disagree: "
            "an overflow says there that the scale is too large for all requests. Set a static fp16.loss_scale, or "
            "use 'skip'."
        )
    if config.get("managed_gradient_accumulation") is False:
        raise ValueError(
            "overflow.on_overflow='drop_request' and managed_gradient_accumulation=false disagree: without request "
            "ends nothing says where a request's gradients begin. Leave one of them out."
        )
