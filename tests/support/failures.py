"""Errors on ranks, as text: cheaper than a rank group that has to be started again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.ranks import RankGroup


def failure(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the error of the call on this rank: the name of its class, and its text."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def assert_fails(ranks: RankGroup, message: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Every rank raises what matches ``message``, which begins with the kind of error."""
    for text in ranks.run(failure, function, *args, **kwargs):
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(text)
