"""The line of the user's program that a warning is about."""

from __future__ import annotations

from pathlib import Path

import pytest

import requestzero
from requestzero.zero.common.user_line import stacklevel_of_user

PACKAGE = Path(requestzero.__file__).parent


@pytest.mark.parametrize(
    ("file", "level"), [(PACKAGE / "zero" / "clipping.py", 2), (PACKAGE.with_name("requestzero_app.py"), 1)]
)
def test_a_program_beside_the_package_is_the_users(file: Path, level: int) -> None:
    found = {"stacklevel_of_user": stacklevel_of_user}
    exec(compile("level = stacklevel_of_user()", str(file), "exec"), found)
    assert found["level"] == level
