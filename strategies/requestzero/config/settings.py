"""Every option of this package, each with its default, meaning and allowed values: the one owner of them.

Only the standard library is imported, so that a configuration can be checked before torch is loaded. The
Lightning strategy, the Hydra schema and the reference table in the README derive from these classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from requestzero.config.rules import LOSS_SCALE_KEYS, contradictions

STAGES = (1, 2)
GRAD_ACCUM_DTYPES = ("fp32", "bf16", "fp16")
NORMALIZATIONS = ("mean", "sum", "token")
INCOMPLETE_WINDOW = ("step", "drop")
ON_OVERFLOW = ("skip", "raise", "drop_request")  # the first is the default
OWN_OVERFLOW_KEYS = ("on_overflow", "max_consecutive_skips")


def _check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if not any(value == item and type(value) is type(item) for item in allowed):
        raise ValueError(f"{name}={value!r} is not allowed: use one of {', '.join(map(repr, allowed))}.")


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not allowed: use true or false.")


def check_retain(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is one of ``retain_gpu_grad_partition_until_step``, here called ``name``."""
    if not isinstance(value, bool) and value != "auto":
        raise ValueError(f"{name}={value!r} is not allowed: use true, false or 'auto'.")


def _check_integer(name: str, value: Any, lowest: int, highest: float = math.inf) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (whole and lowest <= value <= highest):
        limit = "" if highest == math.inf else f" and at most {highest}"
        raise ValueError(f"{name}={value!r} is not allowed: use a whole number of at least {lowest}{limit}.")


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


def _check_number(name: str, value: Any, lowest: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if value is not None and not (number and value >= lowest):
        raise ValueError(f"{name}={value!r} is not allowed: use a number of at least {lowest}.")


@dataclass(frozen=True)
class OverflowSettings:
    """What happens to gradients that are not finite, and how fp16 losses are scaled.

    ``None`` leaves the choice to the default for the precision in use.
    """

    check_grad_overflow: bool | None = None
    """Whether gradients are looked at for inf and NaN: on by default in bf16 and fp16 (where it cannot be off), off in
    fp32 (``overflow.check_grad_overflow`` in a DeepSpeed config). DeepSpeed key: ``bf16.check_grad_overflow``."""
    on_overflow: str | None = None
    """What happens then: ``"skip"`` (which ``None`` is) drops the window's update, ``"raise"`` ends the run with an
    error on all ranks that names parameters, request and rank, ``"drop_request"`` leaves only that request out of the
    window's update. DeepSpeed key: ``overflow.on_overflow``."""
    max_consecutive_skips: int | None = None
    """How many updates in a row may be skipped; the last of them ends the run with an error. ``None``: any number.
    DeepSpeed key: ``overflow.max_consecutive_skips``."""
    loss_scale: float | None = None
    """fp16 only. 0 scales the loss dynamically (DeepSpeed's default), a positive number statically.
    DeepSpeed key: ``fp16.loss_scale``."""
    initial_scale_power: int | None = None
    """fp16 only, dynamic. The first loss scale is 2 to this power (default 16).
    DeepSpeed key: ``fp16.initial_scale_power``."""
    loss_scale_window: int | None = None
    """fp16 only, dynamic. Updates without overflow after which the scale doubles (default 1000).
    DeepSpeed key: ``fp16.loss_scale_window``."""
    hysteresis: int | None = None
    """fp16 only, dynamic. Overflows that are tolerated before the scale is halved (default 2).
    DeepSpeed key: ``fp16.hysteresis``."""
    consecutive_hysteresis: bool | None = None
    """fp16 only, dynamic. Whether an update without overflow refills the hysteresis (default false).
    DeepSpeed key: ``fp16.consecutive_hysteresis``."""
    min_loss_scale: float | None = None
    """fp16 only, dynamic. The scale never falls below this whole number (default 1).
    DeepSpeed key: ``fp16.min_loss_scale``."""

    def __post_init__(self) -> None:
        for name in ("check_grad_overflow", "consecutive_hysteresis"):
            if getattr(self, name) is not None:
                _check_bool(f"overflow.{name}", getattr(self, name))
        if self.on_overflow is not None:
            _check_choice("overflow.on_overflow", self.on_overflow, ON_OVERFLOW)
        _check_integer("overflow.max_consecutive_skips", self.max_consecutive_skips, 1)
        _check_number("overflow.loss_scale", self.loss_scale, lowest=0)
        _check_integer("overflow.initial_scale_power", self.initial_scale_power, 0, highest=127)  # fp32's range
        for name in ("loss_scale_window", "hysteresis"):
            _check_integer(f"overflow.{name}", getattr(self, name), 1)
        smallest: Any = self.min_loss_scale
        _check_integer("overflow.min_loss_scale", int(smallest) if _is_whole(smallest) else smallest, 1)
        self.check()

    def check(self, precision: str | None = None) -> None:
        """Raise ValueError, with all that is wrong, where options contradict each other or the precision.

        Args:
            precision: the model's dtype, ``"fp32"``, ``"bf16"`` or ``"fp16"``; ``None`` where it is not known yet.
        """
        problems = contradictions(self.given(), precision)
        if problems:
            raise ValueError("\n".join(problems))

    @classmethod
    def build(cls, value: OverflowSettings | Mapping[str, Any] | None) -> OverflowSettings:
        """The settings given as an object, as a mapping of their names, or not at all."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"overflow={value!r} is not allowed: give OverflowSettings or a mapping of its fields.")
        known = [item.name for item in fields(cls)]
        unknown = sorted(set(map(str, value)) - set(known))
        if unknown:
            raise ValueError(f"overflow.{unknown[0]} is not an option: use one of {', '.join(known)}.")
        return cls(**{str(key): item for key, item in value.items()})

    def given(self) -> dict[str, Any]:
        """The options that were set, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def loss_scale_options(self) -> dict[str, Any]:
        """The fp16 loss-scale options that were set, by their DeepSpeed names."""
        return {name: value for name, value in self.given().items() if name in LOSS_SCALE_KEYS}

    def own_options(self) -> dict[str, Any]:
        """The options that were set and for which DeepSpeed has no place in any precision."""
        return {name: value for name, value in self.given().items() if name in OWN_OVERFLOW_KEYS}

    def resolved(self, precision: str) -> OverflowSettings:
        """With the defaults of ``check_grad_overflow`` and ``on_overflow`` put in."""
        check = precision != "fp32" if self.check_grad_overflow is None else self.check_grad_overflow
        return replace(self, check_grad_overflow=check, on_overflow=self.on_overflow or ON_OVERFLOW[0])


@dataclass(frozen=True)
class RequestZeROSettings:
    """The options that every way into this package shares (engine config, Lightning, Hydra)."""

    stage: int = 2
    """ZeRO stage: 1 partitions the optimizer state, 2 the gradients as well.
    DeepSpeed key: ``zero_optimization.stage``."""
    offload_optimizer: bool = False
    """Whether master weights, optimizer state and the optimizer step live on the CPU.
    DeepSpeed key: ``zero_optimization.offload_optimizer.device``."""
    retain_gpu_grad_partition_until_step: bool | str = False
    """With CPU offload and fp32 accumulation on a 16-bit model: true keeps the device's fp32 gradient partition
    until the step, false frees it at every request boundary and restores it for the next request; ``"auto"`` keeps it
    while the device has memory to spare, as each rank finds at every boundary. The weights are the same bit for bit.
    DeepSpeed key: ``zero_optimization.retain_gpu_grad_partition_until_step``."""
    grad_accum_dtype: str | None = None
    """dtype of the window's running gradient sum: ``"fp32"``, ``"bf16"`` or ``"fp16"``; ``None``: the model's.
    DeepSpeed key: ``data_types.grad_accum_dtype``."""
    normalization: str = "mean"
    """What the window's gradient sum is divided by at step time: ``"mean"``, the window's micro-batches per rank;
    ``"sum"``, nothing; the mean over data-parallel ranks is DeepSpeed's and is taken in both. ``"token"``: the sum over
    all ranks is divided by the weight of all of the window's micro-batches, such as their trained tokens; losses are
    sums then, and each micro-batch reports its weight."""
    incomplete_window: str = "step"
    """What happens at an epoch's end to a window with fewer requests than ``accumulate_grad_batches``: ``"step"``
    applies it, divided by its own number of micro-batches; ``"drop"`` discards it."""
    log_metrics: bool = True
    """Whether loggers get ``grad_norm`` and ``overflow/...`` (skipped updates, skips in a row, dropped requests, loss
    scale) of the updates that are logged. A metric of yours by the same name is left as it is."""
    rank_agreement: bool = True
    """Whether the data-parallel ranks agree, once per request, on what they are about to do, so that ranks that do not
    do the same raise an error instead of waiting for each other. Can be turned off where equal numbers of micro-batches
    are guaranteed. DeepSpeed key: ``requestzero.rank_agreement``."""
    rank_dependent_parameters: bool = False
    """Whether parameters may take part on some ranks only (adapters, experts, conditional branches): gradients are
    reduced at the end of the backward (stage 1: of the request), with zeros for absent ones, which gives up the overlap
    of reduction with the backward. DeepSpeed key: ``requestzero.rank_dependent_parameters``."""
    overflow: OverflowSettings = field(default_factory=OverflowSettings)
    """What happens to gradients that are not finite."""

    def __post_init__(self) -> None:
        _check_choice("stage", self.stage, STAGES)
        _check_bool("offload_optimizer", self.offload_optimizer)
        check_retain("retain_gpu_grad_partition_until_step", self.retain_gpu_grad_partition_until_step)
        _check_choice("grad_accum_dtype", self.grad_accum_dtype, (None, *GRAD_ACCUM_DTYPES))
        _check_choice("normalization", self.normalization, NORMALIZATIONS)
        _check_choice("incomplete_window", self.incomplete_window, INCOMPLETE_WINDOW)
        _check_bool("log_metrics", self.log_metrics)
        for name in ("rank_agreement", "rank_dependent_parameters"):
            _check_bool(name, getattr(self, name))
        object.__setattr__(self, "overflow", OverflowSettings.build(self.overflow))
