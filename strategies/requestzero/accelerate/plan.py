"""Everything that is known before a process group exists, put together and checked: the plan of a plugin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from requestzero.accelerate.changes import Changes
from requestzero.accelerate.launch import PRECISION_PLACE, launched_sources
from requestzero.accelerate.options import (
    argument_source,
    describe_config,
    load_deepspeed_config,
    option_source,
    overflow_sources,
    settings_without_keys,
)
from requestzero.config.changes import without
from requestzero.config.files import load_config
from requestzero.config.keys import check_top_level_keys
from requestzero.config.merge import Source, merge
from requestzero.config.nested import Config, look_up, put
from requestzero.config.options import RequestZeROSettings
from requestzero.config.overflow import merged_overflow
from requestzero.config.own_keys import pop_own_keys
from requestzero.config.stage_3 import check_combinations
from requestzero.config.supported import check_supported, wants_offload
from requestzero.config.translation import AUTO, from_config
from requestzero.config.validation import Count, check
from requestzero.config.values import CLIPPING, check_zero_section

_STAGE = "zero_optimization.stage"

# What Accelerate writes into every config by itself, and what says nothing at any stage.
_INERT_KEYS: dict[str, tuple[Any, ...]] = {
    "offload_param": (None, {}, {"device": "none"}, {"device": "none", "nvme_path": None}),
    "stage3_gather_16bit_weights_on_model_save": (False, AUTO),
}


@dataclass(frozen=True)
class Plan:
    """A DeepSpeed config that everybody agrees on."""

    config: Config
    """Without our own keys, and with ``"auto"`` where it can be known only later."""
    own: Config
    """Our own keys, in their sections."""
    written: Config
    """Both without the precision that ``accelerate launch`` was told: sections ``fp16`` and ``bf16`` as written."""
    sources: list[Source]
    without_keys: RequestZeROSettings
    """The options that have no DeepSpeed key, and ``overflow``, as they were given."""
    settings: RequestZeROSettings
    steps: int | None
    """``gradient_accumulation_steps``, the requests in a window, where a place says it."""
    clipping: float | None
    """``gradient_clipping`` where a place says it."""

    def places_of(self, key: str) -> str:
        """Return the places that say a value of ``key``, for messages."""
        places = [source.place for source in self.sources if look_up(source.config, key) not in (None, AUTO)]
        return " and ".join(places) or "the plugin's DeepSpeed config"

    def changed(self, changes: Changes) -> Plan:
        """Return the plan in which the changes count in the place of whatever said the same keys before.

        Raises:
            ValueError: as :func:`make_plan` does.
        """
        kept = [Source(source.place, without(source.config, changes.keys)) for source in self.sources]
        return _make([*kept, *changes.sources], replace(self.without_keys, **changes.without_keys))


def make_plan(arguments: Mapping[str, Any], environ: Mapping[str, str]) -> Plan:
    """Merge the plugin's arguments, its ``options``, its DeepSpeed config and what ``accelerate launch`` passes on.

    Args:
        arguments: the plugin's, by name; ``None`` where not given.
        environ: the process's environment.

    Raises:
        ValueError: something is not allowed, does not apply, or is given twice with different values.
        FileNotFoundError: a file that is named does not exist.
    """
    options = load_config(arguments["options"], "options")
    own = settings_without_keys(arguments, options)
    sources = [
        argument_source(arguments),
        option_source(options),
        Source(describe_config(arguments["hf_ds_config"]), load_deepspeed_config(arguments["hf_ds_config"])),
        *launched_sources(environ),
    ]
    merge(*overflow_sources(arguments, options), *sources)  # whether they agree
    return _make(sources, own)


def _make(sources: list[Source], without_keys: RequestZeROSettings) -> Plan:
    stage = _stage_of(merge(*sources))
    for source in sources:
        _check_source(source, stage)
    config = merge(*sources)
    written = merge(*[source for source in sources if not source.place.startswith(PRECISION_PLACE)])
    put(config, _STAGE, stage)
    check_supported(config)
    settings = _settings(config, written, without_keys)
    own = pop_own_keys(config)
    return Plan(
        config=config,
        own=own,
        written=written,
        sources=sources,
        without_keys=without_keys,
        settings=settings,
        steps=_said_steps(config),
        clipping=_said_clipping(config),
    )


def _stage_of(config: Config) -> Any:
    stage = look_up(config, _STAGE)
    return RequestZeROSettings.stage if stage in (None, AUTO) else stage


def _check_source(source: Source, stage: Any) -> None:
    check_top_level_keys(source.config, source.place)
    _drop_inert_keys(source.config.get("zero_optimization", {}))
    check_zero_section(source.config, source.place, stage)
    if source.config.get("managed_gradient_accumulation") is False:
        raise ValueError(
            f"managed_gradient_accumulation=False in {source.place} is not possible, since the plugin marks the ends "
            "of requests: leave it out."
        )


def _drop_inert_keys(zero: Config) -> None:
    for key, nothing in _INERT_KEYS.items():
        if key in zero and zero[key] in nothing:
            del zero[key]


def _settings(config: Config, written: Config, own: RequestZeROSettings) -> RequestZeROSettings:
    """Return the settings that have no DeepSpeed key, ``own``, with the others as the config says them."""
    if look_up(config, "zero_optimization.offload_optimizer.device") != AUTO:  # which Accelerate takes for none
        wants_offload(config)
    overflow = merged_overflow(own.overflow, written)
    settings = replace(own, **from_config(RequestZeROSettings, config), overflow=overflow)
    retain = settings.retain_gpu_grad_partition_until_step
    check_combinations(settings.stage, retain, settings.rank_dependent_parameters)
    if retain and not settings.offload_optimizer:
        raise ValueError(
            f"retain_gpu_grad_partition_until_step={retain!r} does not apply without optimizer offload: leave it out, "
            "or set zero_optimization.offload_optimizer.device to 'cpu' (accelerate's offload_optimizer_device)."
        )
    return settings


def _said_steps(config: Config) -> int | None:
    steps = config.setdefault("gradient_accumulation_steps", AUTO)
    if steps == AUTO:
        return None
    advice = "give the number of requests in an update window, a whole number above 0, or 'auto'"
    check("gradient_accumulation_steps", steps, Count(), advice=advice)
    return steps


def _said_clipping(config: Config) -> float | None:
    clipping = config.get("gradient_clipping", AUTO)
    if clipping == AUTO:
        return None
    advice = (
        "give the largest norm of the gradient, 0 for no clipping, or 'auto' to have accelerator.clip_grad_norm_ say it"
    )
    check("gradient_clipping", clipping, CLIPPING, advice=advice)
    return float(clipping)
