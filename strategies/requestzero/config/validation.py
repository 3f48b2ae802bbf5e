"""Rules for single values, and the one error for a value that breaks a rule.

Only the standard library is imported, so that values can be checked before torch is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol


class Rule(Protocol):
    """The values that something may have. ``str(rule)`` describes them, as in "use true or false"."""

    def accepts(self, value: Any) -> bool:
        """Return true if ``value`` keeps the rule."""


def problem(name: str, value: Any, rule: Rule, *, given: str = "", advice: str = "") -> str | None:
    """Return the text for a value that breaks its rule, or ``None`` where it keeps it.

    Args:
        name: of what has the value, for the text.
        value: the value.
        rule: the rule.
        given: what was given, as the text shows it; by default ``name=value``.
        advice: what to do, as the text says it; by default "use" and the rule.
    """
    if rule.accepts(value):
        return None
    return _text(name, value, given, advice or f"use {rule}")


def _text(name: str, value: Any, given: str, advice: str) -> str:
    return f"{given or f'{name}={value!r}'} is not allowed: {advice}."


def check(name: str, value: Any, rule: Rule, *, given: str = "", advice: str = "") -> None:
    """Raise ValueError, with the text of :func:`problem`, unless ``value`` keeps its rule."""
    text = problem(name, value, rule, given=given, advice=advice)
    if text is not None:
        raise ValueError(text)


@dataclass(frozen=True)
class Choice:
    """One of a few values, of the same type too: ``True`` is not 1."""

    values: tuple[Any, ...]
    quoted: bool = True
    """Show the values as Python writes them; false: as YAML and command lines do."""

    def accepts(self, value: Any) -> bool:
        return any(value == item and type(value) is type(item) for item in self.values)

    def __str__(self) -> str:
        return f"one of {', '.join(map(repr if self.quoted else str, self.values))}"


@dataclass(frozen=True)
class Boolean:
    """``True`` or ``False``, and not 1 or 0."""

    also: str | None = None
    """A word that is allowed too."""

    def accepts(self, value: Any) -> bool:
        return isinstance(value, bool) or (self.also is not None and value == self.also)

    def __str__(self) -> str:
        return "true or false" if self.also is None else f"true, false or {self.also!r}"


@dataclass(frozen=True)
class WholeNumber:
    """An int within limits, which are allowed themselves."""

    lowest: int
    highest: float = math.inf
    as_float: bool = False
    """Allow 16.0 for 16."""

    def accepts(self, value: Any) -> bool:
        whole = _is_int(value) or (self.as_float and isinstance(value, float) and value.is_integer())
        return whole and self.lowest <= value <= self.highest

    def __str__(self) -> str:
        limit = "" if self.highest == math.inf else f" and at most {self.highest}"
        return f"a whole number of at least {self.lowest}{limit}"


@dataclass(frozen=True)
class Count:
    """An int above 0."""

    even: bool = False
    unit: str = ""
    """Unit of the count, in messages."""
    also: str | None = None
    """A word that is allowed too."""

    def accepts(self, value: Any) -> bool:
        if self.also is not None and value == self.also:
            return True
        return _is_int(value) and value > 0 and not (self.even and value % 2)

    def __str__(self) -> str:
        unit = f", in {self.unit}" if self.unit else ""
        also = "" if self.also is None else f", or {self.also!r}"
        return f"{'an even' if self.even else 'a'} whole number above 0{unit}{also}"


@dataclass(frozen=True)
class Number:
    """A number from ``lowest`` on, or ``above`` a limit; never NaN."""

    lowest: float | None = None
    above: float | None = None
    finite: bool = True

    def accepts(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        if isinstance(value, float) and (math.isnan(value) or (self.finite and math.isinf(value))):
            return False
        return (self.lowest is None or value >= self.lowest) and (self.above is None or value > self.above)

    def __str__(self) -> str:
        return f"a number of at least {self.lowest}" if self.above is None else f"a number above {self.above}"


@dataclass(frozen=True)
class Weight:
    """Weight of a micro-batch: a finite number of at least 0, or a tensor with one real element, which is not read."""

    def accepts(self, value: Any) -> bool:
        if hasattr(value, "numel"):
            return value.numel() == 1 and str(value.dtype) != "torch.bool" and not value.is_complex()
        number = isinstance(value, Real) and not isinstance(value, bool)
        return number and math.isfinite(value) and value >= 0

    def __str__(self) -> str:
        return (
            "a finite number of at least 0, such as the micro-batch's number of trainable tokens, or a tensor that "
            "holds one"
        )


def as_mapping(
    name: str, value: Any, *, given: str = "", advice: str = "give a mapping of its options"
) -> Mapping[str, Any]:
    """Return ``value``; ValueError, with a text as of :func:`problem`, unless it is a mapping."""
    if not isinstance(value, Mapping):
        raise ValueError(_text(name, value, given, advice))
    return value


def check_count(name: str, value: int | None, *, owner: str = "") -> None:
    """Raise ValueError unless ``value`` is ``None`` or a whole number above 0.

    Args:
        name: of the argument, for the message.
        value: its value.
        owner: the class or function that has the argument, for the message.
    """
    if value is not None:
        given = f"{owner}({name}={value!r})" if owner else ""
        check(name, value, Count(), given=given, advice="give a whole number above 0")


def check_weight(weight: Any) -> None:
    """Raise ValueError unless ``weight`` is a finite number of at least 0, or a tensor with one real element.

    A tensor is not read, not even for the message, since that would wait for the device: ``step`` checks the sum.
    """
    if not Weight().accepts(weight):
        shown = _shape(weight) if hasattr(weight, "numel") else repr(weight)
        raise ValueError(_text("weight", weight, f"weight={shown}", f"use {Weight()}"))


def _shape(tensor: Any) -> str:
    return f"a tensor of shape {list(tensor.shape)} and dtype {str(tensor.dtype).removeprefix('torch.')}"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
