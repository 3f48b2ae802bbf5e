"""What an engine is told beside DeepSpeed's own options, and where it stands in a DeepSpeed config."""

from __future__ import annotations

from dataclasses import dataclass, field

from requestzero.config.nested import Config
from requestzero.config.own_keys import (
    OVERFLOW_SECTION,
    OWN_SECTION,
    check_overflow_section,
    take_own_section,
    take_retain_option,
)
from requestzero.config.precision import precision_of
from requestzero.config.settings import OverflowSettings
from requestzero.config.translation import merged_overflow


@dataclass(frozen=True)
class EngineOptions:
    """Options of :class:`~requestzero.zero.engine.RequestZeROEngine` that DeepSpeed's config classes do not know.

    See :mod:`requestzero.config.settings`, which owns their meaning and defaults.
    """

    retain_gpu_grad_partition_until_step: bool | str = False
    """DeepSpeed key: ``zero_optimization.retain_gpu_grad_partition_until_step``."""
    overflow: OverflowSettings = field(default_factory=OverflowSettings)
    """What the config's sections ``overflow``, ``fp16`` and ``bf16`` say together. The engine reads ``on_overflow``,
    ``max_consecutive_skips`` and, in fp32, ``check_grad_overflow``; the others reach it through DeepSpeed."""
    rank_agreement: bool = True
    """DeepSpeed key: ``requestzero.rank_agreement``."""
    rank_dependent_parameters: bool = False
    """DeepSpeed key: ``requestzero.rank_dependent_parameters``."""


def take_engine_options(config: Config) -> EngineOptions:
    """Remove from ``config`` what DeepSpeed would reject or ignore, and return it.

    Raises:
        ValueError: a value that is not allowed, a key that does not exist or has another place, or options that
            disagree.
    """
    zero = config.get("zero_optimization")
    ignores = zero.get("ignore_unused_parameters", True) if isinstance(zero, dict) else True
    options = EngineOptions(
        retain_gpu_grad_partition_until_step=take_retain_option(config),
        overflow=take_overflow(config),
        **take_own_section(config),
    )
    if options.rank_dependent_parameters and not ignores:
        raise ValueError(
            f"{OWN_SECTION}.rank_dependent_parameters=True reduces zeros for parameters that a rank has not used, so "
            "that zero_optimization.ignore_unused_parameters=False would see none of them: leave one of the two out."
        )
    return options


def take_overflow(config: Config) -> OverflowSettings:
    """Remove the section ``overflow``; the overflow options of the whole config, defaults put in.

    Raises:
        ValueError: as :func:`take_engine_options`.
    """
    check_overflow_section(config, "the DeepSpeed config")
    precision = precision_of(config)
    overflow = merged_overflow(OverflowSettings(), config, precision).resolved(precision)
    config.pop(OVERFLOW_SECTION, None)
    if overflow.on_overflow == "drop_request" and config.get("managed_gradient_accumulation") is False:
        raise ValueError(
            "overflow.on_overflow='drop_request' and managed_gradient_accumulation=false disagree: without request "
            "ends nothing says where a request's gradients begin. Leave one of them out."
        )
    return overflow
