"""DeepSpeed configurations as plain dictionaries: load, merge, extend with our options, refuse what cannot work.

Light on purpose (no torch, no DeepSpeed), so that every error comes before a process or a model exists.
"""

from __future__ import annotations

import base64
import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from requestzero.config.nearest import nearest
from requestzero.config.settings import RequestZeROSettings, check_retain

Config = dict[str, Any]

RETAIN_OPTION = "retain_gpu_grad_partition_until_step"
# A section of our own in a DeepSpeed config.
OWN_SECTION = "requestzero"
OWN_SECTION_OPTIONS = ("rank_agreement", "rank_dependent_parameters")


def load_config(config: Any, source: str = "config") -> Config:
    """The configuration as a new dictionary that shares nothing with what was given.

    Args:
        config: a mapping, an OmegaConf object, a path to a JSON or YAML file, a base64-encoded JSON text (DeepSpeed
            takes one too), or ``None`` (an empty configuration).
        source: how error messages name the argument.

    Raises:
        ValueError: not one of these, a value is missing (``???``), or the file does not hold a mapping.
        FileNotFoundError: the file does not exist, or is a directory.
    """
    if config is None:
        return {}
    if isinstance(config, (str, os.PathLike)):
        encoded = _decode(config) if isinstance(config, str) and not Path(config).suffix else None
        return _load_file(Path(config), source) if encoded is None else encoded
    if _is_omegaconf(config):
        config = _resolve(config, source)
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    raise ValueError(
        f"{source} is of type {type(config).__name__}: give a dict, an OmegaConf object, or the path of a JSON or "
        "YAML file."
    )


def _is_omegaconf(config: Any) -> bool:
    return type(config).__module__.split(".")[0] == "omegaconf"


def _resolve(config: Any, source: str) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"{source} cannot be resolved: {error}") from error


def _decode(text: str) -> Config | None:
    """The mapping that ``text`` encodes, or ``None`` where it is something else, such as a path."""
    try:
        loaded = json.loads(base64.b64decode(text, altchars=b"-_", validate=True))
    except ValueError:
        return None
    return loaded if isinstance(loaded, dict) else None


def _load_file(path: Path, source: str) -> Config:
    if not path.is_file():
        found = "is no file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"{source} names the file {str(path)!r}, which {found}.")
    import hjson

    text = path.read_text(encoding="utf-8")
    try:
        # Not by the YAML reader, for which JSON's tabs are errors. With comments, as DeepSpeed reads it.
        loaded = hjson.loads(text, object_pairs_hook=_unique) if path.suffix == ".json" else _load_yaml(path, source)
    except ValueError as error:
        raise ValueError(f"{source} names the file {str(path)!r}, which cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(
            f"{source} names the file {str(path)!r}, which holds {type(loaded).__name__} instead of a mapping."
        )
    return loaded


def _unique(pairs: list[tuple[str, Any]]) -> Config:
    keys = [key for key, _ in pairs]
    doubled = sorted({key for key in keys if keys.count(key) > 1})
    if doubled:
        raise ValueError(f"the key {doubled[0]!r} stands twice in one object")
    return dict(pairs)


def _load_yaml(path: Path, source: str) -> Any:
    import yaml
    from omegaconf import OmegaConf

    try:
        # OmegaConf reads 1e-5 as a number and refuses doubled keys, unlike a bare YAML reader.
        return _resolve(OmegaConf.load(path), source)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except OSError as error:
        raise ValueError(f"it does not hold a mapping ({error})") from error


def merge_configs(first: Mapping[str, Any], second: Mapping[str, Any], first_source: str, second_source: str) -> Config:
    """Both configurations in one; where both set a key it must be to the same value.

    Raises:
        ValueError: a key has two different values; the message names the key, both values and both sources.
    """
    return _merge(first, second, first_source, second_source, prefix="")


def _merge(
    first: Mapping[str, Any], second: Mapping[str, Any], first_source: str, second_source: str, prefix: str
) -> Config:
    merged = copy.deepcopy(dict(first))
    for key, value in second.items():
        if key not in merged:
            merged[key] = copy.deepcopy(value)
        elif isinstance(merged[key], Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(merged[key], value, first_source, second_source, f"{prefix}{key}.")
        elif merged[key] != value or isinstance(merged[key], bool) != isinstance(value, bool):
            raise ValueError(
                f"{prefix}{key} is {merged[key]!r} in {first_source} and {value!r} in {second_source}: set it in one "
                "place, or to the same value."
            )
    return merged


def settings_to_config(settings: RequestZeROSettings) -> Config:
    """The DeepSpeed keys of everything in ``settings`` that is set, except overflow (its keys depend on precision)."""
    zero: Config = {"stage": settings.stage}
    if settings.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if settings.retain_gpu_grad_partition_until_step:
        zero[RETAIN_OPTION] = settings.retain_gpu_grad_partition_until_step
    config: Config = {"zero_optimization": zero}
    if settings.grad_accum_dtype is not None:
        config["data_types"] = {"grad_accum_dtype": settings.grad_accum_dtype}
    own = {name: getattr(settings, name) for name in OWN_SECTION_OPTIONS}
    if own != {name: getattr(RequestZeROSettings, name) for name in OWN_SECTION_OPTIONS}:
        config[OWN_SECTION] = own
    return config


def take_retain_option(config: Config) -> bool | str:
    """Remove ``zero_optimization.retain_gpu_grad_partition_until_step`` from ``config`` and return its value.

    DeepSpeed's own schema does not know the key yet and would reject it.

    Raises:
        ValueError: the value is neither a bool nor ``"auto"``.
    """
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or RETAIN_OPTION not in zero:
        return False
    value: bool | str = zero.pop(RETAIN_OPTION)
    check_retain(f"zero_optimization.{RETAIN_OPTION}", value)
    return value


def take_own_section(config: Config) -> Config:
    """Remove the section ``requestzero`` from ``config``; what it sets, by the options' names.

    Raises:
        ValueError: it is no mapping, or holds a key that does not exist or a value that is not a bool.
    """
    section = section_of(config, OWN_SECTION)
    config.pop(OWN_SECTION, None)
    for name, value in section.items():
        if name not in OWN_SECTION_OPTIONS:
            near = nearest(str(name), OWN_SECTION_OPTIONS)
            raise ValueError(f"{OWN_SECTION}.{name} is no option: use {' or '.join(OWN_SECTION_OPTIONS)}.{near}")
        if not isinstance(value, bool):
            raise ValueError(f"{OWN_SECTION}.{name}={value!r} is not allowed: use true or false.")
    return dict(section)


def check_supported(config: Mapping[str, Any], model: Any = None) -> None:
    """Raise ValueError where the configuration asks for something that the request-safe optimizer does not do.

    Args:
        config: a DeepSpeed configuration.
        model: the module to train, if there is one yet.
    """
    zero = section_of(config, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in (1, 2):
        advice = "call deepspeed.initialize for it" if stage == 3 else "set it to 1 or 2, or use plain DDP"
        raise ValueError(
            f"zero_optimization.stage={stage!r} was asked, and requestzero makes stages 1 and 2 request-safe: {advice}."
        )
    if zero.get("zenflow") is not None:
        raise ValueError(
            "zero_optimization.zenflow was asked, which keeps a gradient path of its own: remove it "
            "(offload_optimizer alone is supported), or call deepspeed.initialize for ZenFlow."
        )
    if section_of(config, "compile").get("deepcompile"):
        raise ValueError(
            "compile.deepcompile was asked, which reduces gradients inside compiled graphs: set it to false, or call "
            "deepspeed.initialize for DeepCompile."
        )
    if section_of(config, "hybrid_engine").get("enabled"):
        raise ValueError(
            "hybrid_engine.enabled was asked, which is an engine class of its own: set it to false, or call "
            "deepspeed.initialize for the hybrid engine."
        )
    if any(base.__name__ == "PipelineModule" for base in type(model).__mro__):
        raise ValueError(
            "The model is a PipelineModule, whose engine owns the micro-batch schedule: pass a plain "
            "torch.nn.Module, or call deepspeed.initialize for pipelines."
        )


def section_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The section ``name`` of a DeepSpeed config; empty where there is none. ValueError where it is no mapping."""
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={value!r} is not allowed: DeepSpeed wants a mapping there.")
    return value
