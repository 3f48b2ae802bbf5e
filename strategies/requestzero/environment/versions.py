"""The supported versions of DeepSpeed."""

from __future__ import annotations

from importlib import metadata

from requestzero._version import __version__

# The optimizer and the engine are subclasses of DeepSpeed's: they depend on the bodies of the methods that
# they override, so every DeepSpeed release has to be read (tests/test_upstream_contract.py) before it is added.
SUPPORTED_DEEPSPEED = "==0.19.8"


def require_supported_deepspeed() -> None:
    """Raise ImportError unless the installed DeepSpeed is supported."""
    from packaging.specifiers import SpecifierSet

    remedy = f'pip install "deepspeed{SUPPORTED_DEEPSPEED}"'
    try:
        found = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"requestzero {__version__} needs DeepSpeed {SUPPORTED_DEEPSPEED}, and none is installed. Run: {remedy}"
        ) from None
    # Compared by public version: a local build tag ("0.19.8+cu128") does not change the source.
    if not SpecifierSet(SUPPORTED_DEEPSPEED).contains(found.split("+")[0], prereleases=True):
        raise ImportError(
            f"requestzero {__version__} supports DeepSpeed {SUPPORTED_DEEPSPEED}, but {found} is installed. Run: "
            f"{remedy}"
        )
