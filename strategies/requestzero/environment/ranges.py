"""The versions of Python and of packages that this package allows, as its metadata (``pyproject.toml``) says."""

from __future__ import annotations

from functools import cache
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from requestzero._version import __version__

DISTRIBUTION = "requestzero"


@cache
def requirements() -> tuple[Requirement, ...]:
    """Return what the package requires, with its extras.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not installed, as in a checkout on ``PYTHONPATH``.
    """
    return tuple(Requirement(text) for text in metadata.requires(DISTRIBUTION) or [])


def requirements_of(name: str) -> list[Requirement]:
    """Return what the package requires of the package ``name``; raises as :func:`requirements`."""
    return [requirement for requirement in requirements() if requirement.name == name]


def is_allowed(version: str, allowed: str) -> bool:
    """Return whether a version is in a range, both in pip's notation.

    By public version: a local build tag does not change the source.
    """
    return SpecifierSet(allowed).contains(version.split("+")[0], prereleases=True)


def require_allowed(*names: str) -> None:
    """Raise ImportError if one of the packages is installed in a version that is not allowed.

    Front ends override methods of these packages, which may not exist or do something else in other versions. Nothing
    is imported. Without metadata of this package nothing is known of the ranges, and nothing is raised; a package that
    is missing is for the import to tell.
    """
    wrong = [found for found in map(_not_allowed, names) if found is not None]
    if wrong:
        found = " and ".join(f"{name} {version} is installed" for name, version, _ in wrong)
        allowed = " and ".join(f"{name}{allowed}" for name, _, allowed in wrong)
        pip = " ".join(f'"{name}{allowed}"' for name, _, allowed in wrong)
        raise ImportError(f"{found}, and requestzero {__version__} allows {allowed}. Run: pip install {pip}")


def _not_allowed(name: str) -> tuple[str, str, str] | None:
    try:
        version, asked = metadata.version(name), requirements_of(name)
    except metadata.PackageNotFoundError:
        return None
    ranges = [str(requirement.specifier) for requirement in asked]
    return next(((name, version, allowed) for allowed in ranges if not is_allowed(version, allowed)), None)
