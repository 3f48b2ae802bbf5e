"""Read-outs that were methods: properties whose values can still be called, for one release."""

from __future__ import annotations

import warnings
from typing import TypeVar

Number = TypeVar("Number", bound="_FormerMethod")


class _FormerMethod:
    """Mixed into a number."""

    def __call__(self: Number) -> Number:
        warnings.warn("This read-out is a property: leave the parentheses out.", DeprecationWarning, stacklevel=2)
        return self


class ReadoutInt(_FormerMethod, int):
    """An integer."""


class ReadoutFloat(_FormerMethod, float):
    """A floating-point number."""
