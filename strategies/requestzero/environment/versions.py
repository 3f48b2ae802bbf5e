"""The gate: whether the installed DeepSpeed is one that this package was proved with."""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from requestzero._version import __version__
from requestzero.environment.proved_sources import differences, proved_sources

UNPROVED = "REQUESTZERO_UNPROVED_DEEPSPEED"
"""Environment variable: ``1`` lets a DeepSpeed run that was not proved."""

_NAMED = 8
"""Most definitions that a message names."""


def require_supported_deepspeed() -> None:
    """Raise ImportError unless what is relied on is in the installed DeepSpeed as it was proved.

    The optimizer and the engine are subclasses of DeepSpeed's and depend on the bodies of the methods that they
    override: what counts is the source of these and not the number of the version. With the environment variable
    :data:`UNPROVED` at ``1`` there is a warning instead, one in each process group.
    """
    _require(stage_3=False)


def require_supported_stage_3() -> None:
    """Raise ImportError unless what only ZeRO 3 relies on is as it was proved, which is so in fewer releases.

    See :func:`require_supported_deepspeed`.
    """
    _require(stage_3=True)


def _require(stage_3: bool) -> None:
    package = deepspeed_folder()
    if package is None:
        raise ImportError(f"requestzero {__version__} needs DeepSpeed, and none is installed. Run: {pip_line()}")
    different = differences(package, stage_3)
    if different and os.environ.get(UNPROVED) == "1":
        _warn(_finding(package, different))
    elif different:
        consent = f"{UNPROVED}=1 " if stage_3 else ""  # without it the self-test leaves a refused stage 3 out
        raise ImportError(
            f"{_finding(package, different)} Run: {pip_line()}\nOr test the installed version on this machine: "
            f"{consent}python -m requestzero.doctor --verify. {UNPROVED}=1 lets it run, with a warning."
        )


def deepspeed_is_proved() -> bool:
    """Return whether a DeepSpeed is installed, with what is relied on as it was proved."""
    return different_definitions() == ()


def different_definitions(stage_3: bool = False) -> tuple[str, ...] | None:
    """Return what the installed DeepSpeed has not as it was proved, ``"module:Class.method"``; ``None`` without one.

    Args:
        stage_3: of what only ZeRO 3 relies on; else of the rest.
    """
    package = deepspeed_folder()
    return None if package is None else differences(package, stage_3)


def deepspeed_folder() -> Path | None:
    """Return the folder of the installed package, which is not imported; ``None`` without one."""
    spec = find_spec("deepspeed")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(places[0]) if places else None


def pip_line() -> str:
    """Return the command that installs the newest release that was proved."""
    return f'pip install "deepspeed=={proved_sources().versions[-1]}"'


def proved_range() -> str:
    """Return the releases that were proved, in words."""
    *others, last = proved_sources().versions
    return f"{', '.join(others)} and {last}" if others else last


def _finding(package: Path, different: tuple[str, ...]) -> str:
    named = ", ".join(name.replace(":", ".") for name in different[:_NAMED])
    rest = len(different) - _NAMED
    more = f" and {rest} more (python -m requestzero.doctor --json names them)" if rest > 0 else ""
    return (
        f"requestzero {__version__} was proved with DeepSpeed {proved_range()}. In the installed {_version()} "
        f"({package}) {len(different)} of the {len(proved_sources().definitions)} definitions that it relies on "
        f"differ: {named}{more}."
    )


def _version() -> str:
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return "DeepSpeed without metadata"


@cache
def _warn(message: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        warnings.warn(f"{message} It runs since {UNPROVED}=1.", stacklevel=3)
