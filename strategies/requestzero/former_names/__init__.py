"""Former names of modules (a file each), arguments and attributes: kept for a release, with a ``DeprecationWarning``.

``requestzero.__path__`` includes this folder, so that ``import requestzero.collate`` finds ``collate.py`` here.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def moved(former: str, current: str) -> None:
    """Put the module ``current`` in the place of the module ``former`` that is being imported, and warn."""
    warnings.warn(f"{former} has moved: import {current} instead.", DeprecationWarning, stacklevel=3)
    sys.modules[former] = import_module(current)


def renamed_argument(former: str, current: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Accept the argument ``current`` under the keyword ``former`` too, and warn."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def accepting(*args: P.args, **kwargs: P.kwargs) -> R:
            if former in kwargs:
                if current in kwargs:
                    raise TypeError(f"{former} is the former name of {current}: give one of them.")
                warnings.warn(f"{former} is now called {current}.", DeprecationWarning, stacklevel=2)
                kwargs[current] = kwargs.pop(former)
            return function(*args, **kwargs)

        return accepting

    return decorate


def renamed_attribute(former: str, current: str) -> property:
    """Return a property that reads ``current`` (dots allowed) under the name ``former``, and warns."""

    def read(self: Any) -> Any:
        warnings.warn(f"{former} is now called {current}.", DeprecationWarning, stacklevel=2)
        return attrgetter(current)(self)

    return property(read)
