"""What ``accelerate launch`` passes on to the processes that it starts, as DeepSpeed keys.

Written for Accelerate 1.15. It passes everything in environment variables; those of its config file and of its flags
are the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from requestzero.config.files import load_config
from requestzero.config.merge import Source
from requestzero.config.nested import Config, put
from requestzero.config.settings import RequestZeROSettings
from requestzero.config.translation import AUTO
from requestzero.config.validation import as_mapping

NONE = "none"
PRECISION_PLACE = "accelerate's mixed_precision"
_PRECISION = "ACCELERATE_MIXED_PRECISION"
_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
_FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"


def _number(kind: type) -> Callable[[str], Any]:
    return lambda text: text if text == AUTO else kind(text)


# Variable -> (Accelerate's name of the option, DeepSpeed key, how to read it, the value that says nothing).
_VARIABLES: dict[str, tuple[str, str, Callable[[str], Any], str | None]] = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("zero_stage", "zero_optimization.stage", _number(int), None),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": (
        "offload_optimizer_device",
        "zero_optimization.offload_optimizer.device",
        str,
        None,
    ),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": (
        "offload_param_device",
        "zero_optimization.offload_param",
        str,
        NONE,
    ),
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": (
        "zero3_save_16bit_model",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        str,
        "false",
    ),
    "ACCELERATE_GRADIENT_CLIPPING": ("gradient_clipping", "gradient_clipping", _number(float), NONE),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        "gradient_accumulation_steps",
        "gradient_accumulation_steps",
        _number(int),
        None,
    ),
}


def environment_of(config_file: Path) -> dict[str, str]:
    """What ``accelerate launch --config_file`` makes of a file, as far as it is read here.

    Raises:
        ValueError: Accelerate cannot read the file, or it is not for DeepSpeed.
    """
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import DistributedType

    loaded = load_config_from_file(str(config_file))
    if loaded.distributed_type != DistributedType.DEEPSPEED:
        raise ValueError(
            f"{str(config_file)!r} is a file of accelerate launch with distributed_type={loaded.distributed_type}: "
            "give one for DEEPSPEED, or a DeepSpeed config."
        )
    given = dict(
        as_mapping(
            "deepspeed_config",
            loaded.deepspeed_config,
            given=f"deepspeed_config={loaded.deepspeed_config!r} in {str(config_file)!r}",
            advice="give a mapping of accelerate's DeepSpeed options",
        )
    )
    environ = {
        variable: str(given[option]) for variable, (option, *_) in _VARIABLES.items() if given.get(option) is not None
    }
    if given.get("deepspeed_config_file") is not None:
        environ[_FILE] = str(given["deepspeed_config_file"])
    if loaded.mixed_precision is not None:
        environ[_PRECISION] = str(loaded.mixed_precision)
        given["mixed_precision"] = loaded.mixed_precision
    return {**environ, _FIELDS: ",".join(given)}


def launched_sources(environ: Mapping[str, str]) -> list[Source]:
    """One source for each option of ``accelerate launch`` that was given, and one for the DeepSpeed file it names.

    Raises:
        ValueError: a variable has a value that cannot be read, or the file cannot; or one of our options stands where
            Accelerate does not read it.
        FileNotFoundError: the file does not exist.
    """
    _check_fields(environ)
    sources = []
    for variable, (option, key, read, nothing) in _VARIABLES.items():
        text = environ.get(variable)
        if text is not None and text != nothing:
            sources.append(_single(variable, option, key, text, read))
    precision = launched_precision(environ)
    if precision is not None:
        sources.append(Source(f"{PRECISION_PLACE}={precision!r}", precision_config(precision)))
    name = environ.get(_FILE, NONE)
    if name != NONE:
        sources.append(Source(f"the DeepSpeed file {name!r}", load_config(name, "accelerate's deepspeed_config_file")))
    return sources


def _check_fields(environ: Mapping[str, str]) -> None:
    """Accelerate tells which keys its file has under ``deepspeed_config``, and passes the values on of its own only."""
    names = {item.name for item in fields(RequestZeROSettings)}
    for name in environ.get(_FIELDS, "").split(","):
        if name in names:
            raise ValueError(
                f"{name!r} stands under deepspeed_config in accelerate's config file, which accelerate does not pass "
                "on: put it into the DeepSpeed file that deepspeed_config_file names, or into RequestZeROPlugin(...)."
            )


def _single(variable: str, option: str, key: str, text: str, read: Callable[[str], Any]) -> Source:
    config: Config = {}
    try:
        put(config, key, read(text))
    except ValueError:
        raise ValueError(f"${variable}={text!r} is not allowed: accelerate's {option} has to be a number.") from None
    return Source(f"accelerate's {option}", config)


def launched_precision(environ: Mapping[str, str]) -> str | None:
    """``"no"``, ``"bf16"``, ``"fp16"`` or ``"fp8"`` where ``accelerate launch`` was told one.

    It passes ``"no"`` on also where nobody has said anything, unless its config file did.
    """
    precision = environ.get(_PRECISION, "no").lower()
    in_file = "mixed_precision" in environ.get(_FIELDS, "").split(",")
    return precision if precision != "no" or in_file else None


def precision_config(precision: str) -> Config:
    """The DeepSpeed keys of Accelerate's ``mixed_precision``.

    Raises:
        ValueError: another precision than ``"no"``, ``"bf16"`` and ``"fp16"``.
    """
    if precision not in ("no", "bf16", "fp16"):
        raise ValueError(f"mixed_precision={precision!r} is not possible with ZeRO 1 and 2 here: use no, bf16 or fp16.")
    return {name: {"enabled": name == precision} for name in ("bf16", "fp16")}
