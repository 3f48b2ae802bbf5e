"""Public names are what they say, whichever module of the package was imported first."""

from __future__ import annotations

import pytest

import requestzero
from support.scripts import run_code


@pytest.mark.parametrize("name", [name for name in requestzero.__all__ if name != "__version__"])
def test_a_public_name_is_not_a_module(name: str) -> None:
    """Importing a submodule of the same name would put the module in the public name's place."""
    script = (
        "import requestzero\n"
        f"module = __import__(requestzero._LAZY[{name!r}], fromlist=['_'])\n"
        f"assert getattr(requestzero, {name!r}) is getattr(module, {name!r})\n"
    )
    run_code(script)


def test_every_public_name_resolves_and_is_listed() -> None:
    for name in requestzero.__all__:
        assert getattr(requestzero, name) is not None
    assert set(requestzero.__all__) <= set(dir(requestzero))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'requestzero' has no attribute 'RequestZero'"):
        _ = requestzero.RequestZero
