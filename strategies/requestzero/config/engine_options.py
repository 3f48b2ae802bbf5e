"""The options of an engine that DeepSpeed's config does not have."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from requestzero.config.nested import Config, look_up
from requestzero.config.options import OverflowSettings, RequestZeROSettings
from requestzero.config.overflow import merged_overflow
from requestzero.config.own_keys import check_own_keys, pop_own_keys
from requestzero.config.precision import precision_of
from requestzero.config.reduction_time import reduction_time
from requestzero.config.stage_3 import STAGE as STAGE_3
from requestzero.config.stage_3 import check_combinations
from requestzero.config.translation import from_config


@dataclass(frozen=True)
class EngineOptions:
    """Options of :class:`~requestzero.zero.engine.RequestZeROEngine` that DeepSpeed's config classes do not know.

    Those of :class:`~requestzero.config.options.RequestZeROSettings` by the same names.
    """

    retain_gpu_grad_partition_until_step: bool | str = RequestZeROSettings.retain_gpu_grad_partition_until_step
    overflow: OverflowSettings = field(default_factory=OverflowSettings)
    """The config's sections ``overflow``, ``fp16`` and ``bf16`` together. The engine reads ``on_overflow``,
    ``max_consecutive_skips`` and, in fp32, ``check_grad_overflow``; the others reach it through DeepSpeed."""
    reduce_gradients_at: str | None = RequestZeROSettings.reduce_gradients_at
    abort: bool = RequestZeROSettings.abort
    rank_agreement: bool = RequestZeROSettings.rank_agreement
    rank_dependent_micro_batches: bool = RequestZeROSettings.rank_dependent_micro_batches
    rank_dependent_parameters: bool = RequestZeROSettings.rank_dependent_parameters
    compare_weights: bool = RequestZeROSettings.compare_weights


def take_engine_options(config: Config) -> EngineOptions:
    """Remove from ``config`` what DeepSpeed would reject or ignore, and return it.

    Raises:
        ValueError: a value that is not allowed, a key that does not exist or has another place, or options that
            disagree.
    """
    check_own_keys(config, "the DeepSpeed config")
    precision = precision_of(config)
    overflow = merged_overflow(OverflowSettings(), config, precision).resolved(precision)
    given = from_config(RequestZeROSettings, config)
    names = {item.name for item in fields(EngineOptions)} & given.keys()
    options = EngineOptions(overflow=overflow, **{name: given[name] for name in names})
    _check_combinations(options, config)
    pop_own_keys(config)
    return options


def _check_combinations(options: EngineOptions, config: Config) -> None:
    """Raise ValueError where an option disagrees with one of DeepSpeed's, or with another."""
    stage = look_up(config, "zero_optimization.stage", 0)
    check_combinations(stage, options.retain_gpu_grad_partition_until_step, options.rank_dependent_parameters)
    if stage in (1, 2, STAGE_3):
        on_overflow = options.overflow.on_overflow or "skip"
        unequal = options.rank_dependent_micro_batches
        reduction_time(stage, options.reduce_gradients_at, on_overflow, unequal, options.abort)
    if options.overflow.on_overflow == "drop_request" and config.get("managed_gradient_accumulation") is False:
        raise ValueError(
            "overflow.on_overflow='drop_request' and managed_gradient_accumulation=false disagree: without request "
            "ends nothing says where a request's gradients begin. Leave one of them out."
        )
    if options.rank_dependent_parameters and not look_up(config, "zero_optimization.ignore_unused_parameters", True):
        raise ValueError(
            "requestzero.rank_dependent_parameters=True reduces zeros for parameters that a rank has not used, so "
            "that zero_optimization.ignore_unused_parameters=False would see none of them: leave one of the two out."
        )
