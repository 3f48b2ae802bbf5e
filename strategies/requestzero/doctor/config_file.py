"""The DeepSpeed config in a file: DeepSpeed's own, or one of ``accelerate launch`` that contains or names one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from requestzero.config.engine_options import take_engine_options
from requestzero.config.files import load_config
from requestzero.config.keys import check_top_level_keys
from requestzero.config.nested import Config
from requestzero.config.options import RequestZeROSettings
from requestzero.config.supported import check_supported
from requestzero.config.values import check_values, check_zero_section

# Keys that only accelerate's files have.
_ACCELERATE_KEYS = {"compute_environment", "deepspeed_config", "distributed_type"}


@dataclass(frozen=True)
class ConfigFile:
    """A file's DeepSpeed config."""

    config: Config
    """The DeepSpeed config, requestzero's keys included."""
    launched: Mapping[str, str] | None = field(default=None)
    """The environment variables that ``accelerate launch`` makes of its file; ``None`` for a DeepSpeed file."""

    def refusal(self) -> str | None:
        """Return why requestzero refuses the config, as its front ends say it, or ``None`` where it does not.

        Keys that nobody reads are reported too, and values that DeepSpeed would reject later.
        """
        try:
            if self.launched is None:
                _check(self.config)
            else:
                _check_launched(self.launched)
        except ValueError as error:
            return str(error)
        return None


def read_config_file(path: Path) -> ConfigFile:
    """Read the DeepSpeed config of a file.

    Raises:
        ValueError: it cannot be read, or is a file of ``accelerate launch`` without DeepSpeed.
        FileNotFoundError: it, or a file that it names, does not exist.
    """
    config = load_config(path, "CONFIG")
    return _read_accelerate_file(path) if _ACCELERATE_KEYS & config.keys() else ConfigFile(config)


def _read_accelerate_file(path: Path) -> ConfigFile:
    from requestzero.accelerate.launch import launched_sources
    from requestzero.accelerate.launch_file import environment_of
    from requestzero.config.merge import merge
    from requestzero.config.nested import look_up, put
    from requestzero.config.translation import AUTO

    environ = environment_of(path)
    config = merge(*launched_sources(environ))
    if look_up(config, "zero_optimization.stage") in (None, AUTO):
        put(config, "zero_optimization.stage", RequestZeROSettings.stage)  # which is accelerate's default as well
    return ConfigFile(config, environ)


def _check(config: Config) -> None:
    """Raise ValueError for what ``requestzero.initialize`` refuses, or the Lightning strategy in addition."""
    taken = copy.deepcopy(config)
    take_engine_options(taken)
    check_supported(taken)
    for check in (check_top_level_keys, check_zero_section, check_values):
        check(config, "CONFIG")


def _check_launched(environ: Mapping[str, str]) -> None:
    from requestzero import RequestZeROPlugin
    from requestzero.accelerate.plan import make_plan

    make_plan(dict.fromkeys(item.name for item in fields(RequestZeROPlugin)), environ)
