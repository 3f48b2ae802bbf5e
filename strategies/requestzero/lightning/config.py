"""The DeepSpeed config of a ``RequestZeRO``: its arguments and the user's config, merged, nothing ignored."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from lightning.pytorch.strategies import DeepSpeedStrategy
from typing_extensions import override

from requestzero.config.files import load_config
from requestzero.config.keys import check_top_level_keys
from requestzero.config.merge import Source, merge, overlay
from requestzero.config.nested import Config
from requestzero.config.overflow import merged_overflow, overflow_to_config
from requestzero.config.precision import PRECISIONS
from requestzero.config.settings import OverflowSettings, RequestZeROSettings
from requestzero.config.supported import check_supported, wants_offload
from requestzero.config.translation import AUTO, KEYS_WITH_AUTO, from_config, to_config
from requestzero.config.values import check_values, check_zero_section
from requestzero.lightning.options import check_offload, options_to_config

ARGUMENTS = "the arguments of RequestZeRO"


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


def read_user_config(config: Any) -> Source:
    """Return the user's config as a new dictionary, and how messages name the place where it stands.

    As in Lightning, the environment variable ``PL_DEEPSPEED_CONFIG_PATH`` names a file that is read when
    there is no ``config``.

    Raises:
        ValueError: it cannot be read, holds a key that DeepSpeed does not know, or one that Lightning or this
            strategy decides.
    """
    source, variable = "config", DeepSpeedStrategy.DEEPSPEED_ENV_VAR
    if config is None and variable in os.environ:
        config, source = os.environ[variable], f"the file in ${variable}"
    loaded = load_config(config, source)
    check_top_level_keys(loaded, source)
    _check_automatic(loaded, source)
    _check_loop_keys(loaded, source)
    return Source(source, loaded)


def _check_automatic(value: Any, source: str, path: str = "") -> None:
    if value == AUTO and path not in KEYS_WITH_AUTO:
        raise ValueError(
            f"{path}='auto' in {source} is not possible under Lightning, which has no place to take it from: "
            "set a value, or leave the key out."
        )
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_automatic(item, source, f"{path}.{key}".lstrip("."))


def _check_loop_keys(config: Config, source: str) -> None:
    if config.pop("gradient_accumulation_steps", 1) != 1:
        raise ValueError(
            f"gradient_accumulation_steps in {source} must be 1 or left out, since the strategy divides the "
            "window's sum itself: use Trainer(accumulate_grad_batches=...) for requests per update."
        )
    if config.get("managed_gradient_accumulation") is False:
        raise ValueError(
            f"managed_gradient_accumulation=False in {source} is not possible, since the strategy marks the "
            "ends of requests: leave it out."
        )
    if "train_batch_size" in config:
        raise ValueError(
            f"train_batch_size={config['train_batch_size']!r} in {source} is decided by the data loader and "
            "Trainer(accumulate_grad_batches=...): leave it out."
        )


def merge_arguments(
    settings: RequestZeROSettings, options: Mapping[str, Any], given: Collection[str], config: Any
) -> tuple[Config, RequestZeROSettings]:
    """Return the DeepSpeed config, and the settings as all places together have decided them.

    The config is Lightning's defaults, then the arguments that were given and the user's keys.

    Args:
        settings: our own arguments. The keys of ``overflow`` depend on the precision, so they are only compared.
        options: the arguments of Lightning's ``DeepSpeedStrategy``.
        given: names of the arguments that were given.
        config: the user's config, see :func:`read_user_config`.

    Raises:
        ValueError: a key has one value in the arguments and another in the user's config, does not apply to ZeRO 1
            and 2, or has a value that is not allowed.
        FileNotFoundError: ``config`` names a file that does not exist.
    """
    user = read_user_config(config)
    offloads = settings.offload_optimizer or wants_offload(user.config)
    arguments = merge(
        Source(ARGUMENTS, _settings_given(settings, given, offloads)),
        Source(ARGUMENTS, options_to_config(options, given, offloads)),
    )
    merge(Source("overflow", to_config(OverflowSettings, settings.overflow.given())), user)
    merged = overlay(default_config(offloads), merge(Source(ARGUMENTS, arguments), user))
    check_supported(merged)
    check_zero_section(user.config, user.place)
    check_values(user.config, user.place)
    effective = effective_settings(merged, settings)
    check_offload(effective, options)
    return merged, effective


def _settings_given(settings: RequestZeROSettings, given: Collection[str], offloads: bool) -> Config:
    """Return the DeepSpeed keys of those settings that are among the arguments ``given``.

    ``offload_optimizer=False`` has none where nobody wants offload: a section without offload would say nothing.
    """
    names = set(given) if offloads else set(given) - {"offload_optimizer"}
    return to_config(RequestZeROSettings, {name: value for name, value in vars(settings).items() if name in names})


def effective_settings(config: Config, settings: RequestZeROSettings) -> RequestZeROSettings:
    """Return ``settings`` as the merged config has decided them.

    Raises:
        ValueError: a value that is not allowed.
    """
    overflow = merged_overflow(settings.overflow, config)
    return replace(settings, **from_config(RequestZeROSettings, config), overflow=overflow)


def with_precision(config: Config, overflow: OverflowSettings, precision: str) -> Config:
    """Return ``config`` for ``Trainer(precision=precision)``.

    Raises:
        ValueError: the config or an overflow option is for another precision.
    """
    dtype = PRECISIONS[precision]
    for name in ("fp16", "bf16"):
        enabled = config.get(name, {}).get("enabled")
        if enabled is not None and enabled != (name == dtype):
            raise ValueError(
                f"{name}.enabled is {enabled!r} in config, but the Trainer has precision={precision!r}: "
                "leave it out of config, where the Trainer's precision is put in."
            )
    merged = merged_overflow(overflow, config, dtype)
    result = overlay(config, overflow_to_config(merged, dtype))
    return result if dtype == "fp32" else overlay(result, {dtype: {"enabled": True}})


def check_retained(settings: RequestZeROSettings, precision: str) -> None:
    """Raise ValueError where ``retain_gpu_grad_partition_until_step`` has nothing to keep.

    Only with fp32 accumulation on a 16-bit model is there a device partition of its own, beside the reduced
    gradients that go to the host.
    """
    retain = settings.retain_gpu_grad_partition_until_step
    sixteen_bit = PRECISIONS[precision] != "fp32"
    if retain and not (sixteen_bit and settings.grad_accum_dtype == "fp32"):
        raise ValueError(
            f"retain_gpu_grad_partition_until_step={retain!r} does nothing with Trainer(precision={precision!r}) and "
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
