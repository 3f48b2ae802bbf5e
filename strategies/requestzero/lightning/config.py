"""The DeepSpeed config of a ``RequestZeRO``: its arguments, the user's config and the Trainer's options, merged."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from lightning.pytorch.strategies import DeepSpeedStrategy
from typing_extensions import override

from requestzero.config.merge import Source, merge, overlay
from requestzero.config.nested import Config, section_of
from requestzero.config.options import OverflowSettings, RequestZeROSettings
from requestzero.config.overflow import merged_overflow, overflow_to_config
from requestzero.config.own_keys import without_own_keys
from requestzero.config.precision import PRECISIONS
from requestzero.config.stage_3 import STAGE as STAGE_3
from requestzero.config.stage_3 import check_combinations, check_parameter_offload
from requestzero.config.supported import check_supported, wants_offload
from requestzero.config.translation import from_config, to_config
from requestzero.config.values import check_values, check_zero_section
from requestzero.lightning.options import check_offload, merge_loss_scale, options_to_config
from requestzero.lightning.strategy_facts import TRAINER, StrategyFacts
from requestzero.lightning.user_config import read_user_config


class _ArgumentsAsConfig(DeepSpeedStrategy):
    """Lightning's own translation of arguments into a DeepSpeed config, and nothing else."""

    @override
    def _load_config(self, config: Any) -> None:
        return None


def default_config(offload_optimizer: bool) -> Config:
    """Return what Lightning's strategy puts into the DeepSpeed config when no argument is given.

    Except that host memory is not to be pinned: DeepSpeed pins it unless told otherwise, and only from pinned memory
    is the reload of a gradient partition asynchronous.

    Building one also sets the level of DeepSpeed's logger: build the user's after it.
    """
    config = _ArgumentsAsConfig(offload_optimizer=offload_optimizer).config
    assert config is not None
    config["zero_optimization"].get("offload_optimizer", {}).pop("pin_memory", None)
    return config


def merge_arguments(
    own: Mapping[str, Any],
    options: Mapping[str, Any],
    given: Collection[str],
    config: Any,
    strategy: StrategyFacts = TRAINER,
) -> tuple[Config, RequestZeROSettings]:
    """Return the DeepSpeed config, and the settings as all places together have decided them.

    The config is Lightning's defaults, then the arguments that were given and the user's keys.

    Args:
        own: our own arguments. The keys of ``overflow`` depend on the precision, so they are only compared.
        options: the arguments of Lightning's ``DeepSpeedStrategy``.
        given: names of the arguments that were given.
        config: the user's config, see :func:`read_user_config`.
        strategy: whose arguments they are.

    Raises:
        ValueError: a key has one value in the arguments and another in the user's config, does not apply to ZeRO 1
            and 2, or has a value that is not allowed.
        FileNotFoundError: ``config`` names a file that does not exist.
    """
    overflow = merge_loss_scale(OverflowSettings.build(own["overflow"]), options, given)
    settings = RequestZeROSettings(**{**own, "overflow": overflow})
    user = read_user_config(config, strategy)
    place = f"the arguments of {strategy.name}"
    offloads = settings.offload_optimizer or wants_offload(user.config)
    arguments = merge(
        Source(place, _settings_given(settings, given, offloads)),
        Source(place, options_to_config(options, given, offloads)),
    )
    merge(Source("overflow", to_config(OverflowSettings, overflow.given())), user)
    merged = overlay(default_config(offloads), merge(Source(place, arguments), user))
    check_supported(merged)
    check_zero_section(user.config, user.place, merged["zero_optimization"]["stage"])
    check_parameter_offload(merged)
    check_values(user.config, user.place)
    effective = effective_settings(merged, settings)
    check_combinations(
        effective.stage, effective.retain_gpu_grad_partition_until_step, effective.rank_dependent_parameters
    )
    check_offload(effective, options)
    return merged, effective


def _settings_given(settings: RequestZeROSettings, given: Collection[str], offloads: bool) -> Config:
    """Return the DeepSpeed keys of those settings that are among the arguments ``given``.

    ``offload_optimizer=False`` has none where nobody wants offload: a section without offload would say nothing.
    """
    names = set(given) if offloads else set(given) - {"offload_optimizer"}
    if not settings.offload_parameters and settings.stage != STAGE_3:
        names.discard("offload_parameters")
    return to_config(RequestZeROSettings, {name: value for name, value in vars(settings).items() if name in names})


def effective_settings(config: Config, settings: RequestZeROSettings) -> RequestZeROSettings:
    """Return ``settings`` as the merged config has decided them.

    Raises:
        ValueError: a value that is not allowed.
    """
    overflow = merged_overflow(settings.overflow, config)
    return replace(settings, **from_config(RequestZeROSettings, config), overflow=overflow)


def config_without_optimizer(config: Config) -> Config:
    """Return the config of a stock engine that trains nothing: the precision, and stage 3, whose weights are cut."""
    theirs = without_own_keys(config)
    stage_3 = section_of(theirs, "zero_optimization").get("stage") == STAGE_3
    names = ("fp16", "bf16", *(("zero_optimization",) if stage_3 else ()))
    return {"train_micro_batch_size_per_gpu": 1, **{name: theirs[name] for name in names if name in theirs}}


def with_precision(config: Config, overflow: OverflowSettings, precision: str, owner: str = "Trainer") -> Config:
    """Return ``config`` for ``Trainer(precision=precision)``, or another owner of the precision.

    Raises:
        ValueError: the config or an overflow option is for another precision.
    """
    dtype = PRECISIONS[precision]
    for name in ("fp16", "bf16"):
        enabled = config.get(name, {}).get("enabled")
        if enabled is not None and enabled != (name == dtype):
            raise ValueError(
                f"{name}.enabled is {enabled!r} in config, but the {owner} has precision={precision!r}: "
                f"leave it out of config, where the {owner}'s precision is put in."
            )
    merged = merged_overflow(overflow, config, dtype)
    result = overlay(config, overflow_to_config(merged, dtype))
    return result if dtype == "fp32" else overlay(result, {dtype: {"enabled": True}})


def check_retained(settings: RequestZeROSettings, precision: str, owner: str = "Trainer") -> None:
    """Raise ValueError where ``retain_gpu_grad_partition_until_step`` has nothing to keep.

    Only with fp32 accumulation on a 16-bit model is there a device partition of its own, beside the reduced
    gradients that go to the host.
    """
    retain = settings.retain_gpu_grad_partition_until_step
    sixteen_bit = PRECISIONS[precision] != "fp32"
    if retain and not (sixteen_bit and settings.grad_accum_dtype == "fp32"):
        raise ValueError(
            f"retain_gpu_grad_partition_until_step={retain!r} does nothing with {owner}(precision={precision!r}) and "
            f"grad_accum_dtype={settings.grad_accum_dtype!r}: it needs fp32 accumulation on a 16-bit model, such as "
            "precision='bf16-true' with grad_accum_dtype='fp32'; or leave it out."
        )


def with_clipping(config: Config, gradient_clip_val: float | None) -> Config:
    """Return ``config`` with the Trainer's ``gradient_clip_val``; 0 (off) where neither says anything.

    DeepSpeed's own default is 1.0, which nobody who writes ``Trainer()`` asks for.

    Raises:
        ValueError: both say something, and not the same.
    """
    trainer = {} if gradient_clip_val is None else {"gradient_clipping": gradient_clip_val}
    merged = merge(Source("Trainer(gradient_clip_val=...)", trainer), Source("config", config))
    return {"gradient_clipping": 0.0, **merged}
