"""What ``accelerate launch`` passes on to the processes that it starts, as DeepSpeed keys.

Written for Accelerate 1.15. It passes everything in environment variables; those of its config file and of its flags
are the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from accelerate.utils import str_to_bool

from requestzero.config.files import load_config
from requestzero.config.merge import Source
from requestzero.config.nested import Config, put
from requestzero.config.options import RequestZeROSettings
from requestzero.config.translation import AUTO

NONE = "none"
SAVE_16BIT = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
"""DeepSpeed key of ``zero3_save_16bit_model``."""
PRECISION_PLACE = "accelerate's mixed_precision"
PRECISION = "ACCELERATE_MIXED_PRECISION"
FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
INIT_FLAG = "ACCELERATE_DEEPSPEED_ZERO3_INIT"
FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"
"""Variable with the keys that stand under ``deepspeed_config`` in Accelerate's config file."""


def _boolean(text: str) -> bool:
    return bool(str_to_bool(text))


@dataclass(frozen=True)
class Variable:
    """An environment variable that ``accelerate launch`` sets."""

    option: str
    """Accelerate's name of the option."""
    key: str
    """Its key in a DeepSpeed config."""
    kind: Callable[[str], Any] = str
    nothing: str | None = None
    """The value that asks for nothing."""

    def read(self, text: str) -> Any:
        """Return the key's value.

        Raises:
            ValueError: ``text`` is no number, or neither true nor false, where that is needed.
        """
        return text if text == AUTO else self.kind(text)


VARIABLES = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": Variable("zero_stage", "zero_optimization.stage", int),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": Variable(
        "offload_optimizer_device", "zero_optimization.offload_optimizer.device"
    ),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": Variable(
        "offload_param_device", "zero_optimization.offload_param.device"
    ),
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": Variable("zero3_save_16bit_model", SAVE_16BIT, _boolean),
    "ACCELERATE_GRADIENT_CLIPPING": Variable("gradient_clipping", "gradient_clipping", float, nothing=NONE),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": Variable(
        "gradient_accumulation_steps", "gradient_accumulation_steps", int
    ),
}


def launched_sources(environ: Mapping[str, str]) -> list[Source]:
    """Return a source for each option of ``accelerate launch`` that was given, and one for the DeepSpeed file it names.

    Raises:
        ValueError: a variable has a value that cannot be read, or the file cannot; or one of our options stands where
            Accelerate does not read it.
        FileNotFoundError: the file does not exist.
    """
    _check_fields(environ)
    sources = []
    for name, variable in VARIABLES.items():
        text = environ.get(name)
        if text is not None and text != variable.nothing:
            sources.append(_source(name, variable, text))
    precision = launched_precision(environ)
    if precision is not None:
        sources.append(Source(f"{PRECISION_PLACE}={precision!r}", precision_config(precision)))
    file = environ.get(FILE, NONE)
    if file != NONE:
        sources.append(Source(f"the DeepSpeed file {file!r}", load_config(file, "accelerate's deepspeed_config_file")))
    return sources


def _check_fields(environ: Mapping[str, str]) -> None:
    """Raise ValueError where Accelerate's file has an option of ours, of which it passes on the name only."""
    names = {item.name for item in fields(RequestZeROSettings)}
    for name in environ.get(FIELDS, "").split(","):
        if name in names:
            raise ValueError(
                f"{name!r} stands under deepspeed_config in accelerate's config file, which accelerate does not pass "
                "on: put it into the DeepSpeed file that deepspeed_config_file names, or into RequestZeROPlugin(...)."
            )


def _source(name: str, variable: Variable, text: str) -> Source:
    config: Config = {}
    put(config, variable.key, _read(name, variable, text))
    return Source(f"accelerate's {variable.option}", config)


def _read(name: str, variable: Variable, text: str) -> Any:
    try:
        return variable.read(text)
    except ValueError:
        needed = "true or false" if variable.kind is _boolean else "a number"
        raise ValueError(
            f"${name}={text!r} is not allowed: accelerate's {variable.option} has to be {needed}."
        ) from None


def launched_init_flag(environ: Mapping[str, str]) -> bool | None:
    """Return accelerate's ``zero3_init_flag``, which has no DeepSpeed key; ``None`` where nobody has said anything.

    Raises:
        ValueError: it is neither true nor false.
    """
    text = environ.get(INIT_FLAG)
    return None if text is None else _read(INIT_FLAG, Variable("zero3_init_flag", "", _boolean), text)


def launched_precision(environ: Mapping[str, str]) -> str | None:
    """Return the precision that ``accelerate launch`` was told, ``"no"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``, if any.

    It passes ``"no"`` on also where nobody has said anything, unless its config file did.
    """
    precision = environ.get(PRECISION, "no").lower()
    in_file = "mixed_precision" in environ.get(FIELDS, "").split(",")
    return precision if precision != "no" or in_file else None


def precision_config(precision: str) -> Config:
    """Return the DeepSpeed keys of Accelerate's ``mixed_precision``.

    Raises:
        ValueError: another precision than ``"no"``, ``"bf16"`` and ``"fp16"``.
    """
    if precision not in ("no", "bf16", "fp16"):
        raise ValueError(f"mixed_precision={precision!r} is not possible here: use no, bf16 or fp16.")
    return {name: {"enabled": name == precision} for name in ("bf16", "fp16")}
