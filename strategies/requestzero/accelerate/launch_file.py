"""A config file of ``accelerate launch`` as the environment variables that it makes of it. For Accelerate 1.15."""

from __future__ import annotations

from pathlib import Path

from requestzero.accelerate.launch import FIELDS, FILE, PRECISION, VARIABLES
from requestzero.config.validation import as_mapping


def environment_of(config_file: Path) -> dict[str, str]:
    """Return what ``accelerate launch --config_file`` makes of a file, as far as :mod:`.launch` reads it.

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
    options = loaded.deepspeed_config
    shown = f"deepspeed_config={options!r} in {str(config_file)!r}"
    advice = "give a mapping of accelerate's DeepSpeed options"
    given = {**as_mapping("deepspeed_config", options, given=shown, advice=advice)}
    names = {"deepspeed_config_file": FILE, **{variable.option: name for name, variable in VARIABLES.items()}}
    environ = {name: str(given[option]) for option, name in names.items() if given.get(option) is not None}
    if loaded.mixed_precision is not None:
        environ[PRECISION] = given["mixed_precision"] = str(loaded.mixed_precision)
    return {**environ, FIELDS: ",".join(given)}
