"""Installed versions compared with the ranges in this package's metadata (``pyproject.toml``)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from requestzero.environment.machine import installed_versions
from requestzero.environment.ranges import DISTRIBUTION, is_allowed, requirements_of
from requestzero.environment.versions import different_definitions, proved_range

PYTHON = "Python"


@dataclass(frozen=True)
class Finding:
    """The installed and the supported version of one package."""

    name: str
    installed: str | None
    """``None`` if it is not installed."""
    supported: str
    """The supported range, in pip's notation; of DeepSpeed the releases that were proved."""
    optional: bool
    """True if only an extra needs it."""
    proved: bool | None = None
    """DeepSpeed: whether the sources that are relied on are as they were proved, which counts instead of the number."""
    different: tuple[str, ...] = ()
    """DeepSpeed: the definitions that are not."""
    different_at_stage_3: tuple[str, ...] = ()
    """DeepSpeed: likewise of those that only ZeRO 3 relies on, which is refused then."""

    @property
    def ok(self) -> bool:
        if self.installed is None:
            return self.optional
        if self.proved is not None:
            return self.proved
        return is_allowed(self.installed, self.supported)


def check_versions() -> list[Finding]:
    """Check Python and every package of :data:`requestzero.environment.machine.PACKAGES` without importing any.

    Raises:
        ImportError: requestzero is not installed, as in a checkout on ``PYTHONPATH``: it has no metadata then.
    """
    try:
        python = metadata.metadata(DISTRIBUTION)["Requires-Python"]
    except metadata.PackageNotFoundError:
        raise ImportError(
            "requestzero is not installed, so that nothing says which versions it supports. Run: pip install -e ."
        ) from None
    return [
        Finding(name, version, python, optional=False) if name == PYTHON else _finding(name, version)
        for name, version in installed_versions().items()
        if name != DISTRIBUTION
    ]


def _finding(name: str, version: str | None) -> Finding:
    ours = requirements_of(name)
    ranges = sorted({str(requirement.specifier) for requirement in ours})
    if name == "deepspeed":
        return _deepspeed(version)
    return Finding(name, version, ",".join(ranges), optional=all(each.marker is not None for each in ours))


def _deepspeed(version: str | None) -> Finding:
    different = different_definitions()
    return Finding(
        "deepspeed",
        version,
        proved_range(),
        optional=False,
        proved=different == (),
        different=different or (),
        different_at_stage_3=different_definitions(stage_3=True) or (),
    )
