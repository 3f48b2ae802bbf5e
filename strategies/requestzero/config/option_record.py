"""The record of an option, from which every front end, every check of its value and the reference table derive.

A settings class declares its options with :func:`option`, each with a docstring under its field that says what it means
(:func:`~requestzero.config.reference_table.meanings_of` reads it); :func:`options_of` returns the records.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, get_type_hints

from requestzero.config import validation
from requestzero.config.validation import Rule

OWN_SECTIONS = ("overflow", "requestzero")
"""Sections of a DeepSpeed config that only this package reads."""

_METADATA = "requestzero"


class FrontEnd(Enum):
    """A place where users set options; the value is its name in the reference table."""

    ENGINE = "engine"
    """The DeepSpeed config, of ``requestzero.initialize`` and of every other front end."""
    LIGHTNING = "Lightning"
    FABRIC = "Fabric"
    ACCELERATE = "Accelerate"
    RECIPES = "recipes"


INTEGRATIONS = (FrontEnd.LIGHTNING, FrontEnd.FABRIC, FrontEnd.ACCELERATE, FrontEnd.RECIPES)


@dataclass(frozen=True)
class Option:
    """One option."""

    name: str
    group: str
    """Name of the mapping that the option stands in; ``""`` at the top."""
    type: Any
    default: Any
    rule: Rule
    """The values that it may have, ``None`` aside where that is the default."""
    front_ends: frozenset[FrontEnd]
    key: str | Mapping[str, str] | None
    """Its key in a DeepSpeed config, parts separated by dots, or one for each precision; ``None``: it has none."""
    own_key: bool
    """True where DeepSpeed does not know the key, though it stands in one of DeepSpeed's sections."""
    stored: Mapping[Any, Any]
    """Value of the option -> value of its key, where they differ."""

    @property
    def path(self) -> str:
        """The name with its group, as in ``"overflow.loss_scale"``."""
        return f"{self.group}.{self.name}" if self.group else self.name

    @property
    def keys(self) -> tuple[str, ...]:
        """Its keys in a DeepSpeed config, in all precisions."""
        return self.keys_in(None)

    @property
    def own_keys(self) -> tuple[str, ...]:
        """Those of :attr:`keys` that DeepSpeed does not know."""
        return tuple(key for key in self.keys if self.own_key or key.split(".")[0] in OWN_SECTIONS)

    def keys_in(self, precision: str | None) -> tuple[str, ...]:
        """Return the option's keys in a precision (``"fp32"``, ``"bf16"``, ``"fp16"``); ``None``: in all of them."""
        if self.key is None:
            return ()
        if isinstance(self.key, str):
            return (self.key,)
        return tuple(key for name, key in self.key.items() if precision in (None, name))

    def to_key(self, value: Any) -> Any:
        """Return the value of the key for a value of the option."""
        return next((stored for own, stored in self.stored.items() if own == value), value)

    def from_key(self, value: Any) -> Any:
        """Return the value of the option for a value of the key; 16.0 becomes 16, which is the same to DeepSpeed."""
        if isinstance(value, float) and value.is_integer() and not self.own_keys:
            return int(value)
        return next((own for own, stored in self.stored.items() if stored == value), value)

    def problem(self, value: Any, name: str = "") -> str | None:
        """Return what is wrong with a value, called ``name`` (by default :attr:`path`), or ``None``."""
        if value is None and self.default is None:
            return None
        return validation.problem(name or self.path, value, self.rule)


def option(
    default: Any,
    rule: Rule,
    *,
    key: str | Mapping[str, str] | None = None,
    own_key: bool = False,
    stored: Mapping[Any, Any] | None = None,
    front_ends: Collection[FrontEnd] = INTEGRATIONS,
) -> Any:
    """Return a dataclass field that declares an option; its meaning stands in the docstring under the field.

    Args:
        default: the option's default.
        rule: see :class:`Option` for this and the following arguments.
        key: an option with a key is in :attr:`FrontEnd.ENGINE`, too.
        own_key: by default false.
        stored: by default the key has the option's values.
        front_ends: by default all of them.
    """
    everywhere = frozenset(front_ends) | ({FrontEnd.ENGINE} if key else frozenset())
    traits = {"rule": rule, "front_ends": everywhere, "key": key, "own_key": own_key, "stored": stored or {}}
    return field(default=default, metadata={_METADATA: traits})


def options_of(owner: type) -> Mapping[str, Option]:
    """Return the options that a dataclass declares with :func:`option`, by name. Its ``group`` names their group."""
    if owner not in _KNOWN:
        _KNOWN[owner] = _read(owner)
    return _KNOWN[owner]


_KNOWN: dict[type, Mapping[str, Option]] = {}


def _read(owner: type) -> Mapping[str, Option]:
    hints = get_type_hints(owner)
    group = getattr(owner, "group", "")
    return {
        item.name: Option(item.name, group, hints[item.name], item.default, **item.metadata[_METADATA])
        for item in fields(owner)
        if _METADATA in item.metadata
    }


def names_in(owner: type, front_end: FrontEnd) -> tuple[str, ...]:
    """Return the names of the fields that a front end has: options, and groups of options."""
    options = options_of(owner)
    return tuple(
        item.name for item in fields(owner) if item.name not in options or front_end in options[item.name].front_ends
    )


def values_in(settings: Any, front_end: FrontEnd) -> dict[str, Any]:
    """Return the values of a settings object that a front end has, by the names of :func:`names_in`."""
    return {name: getattr(settings, name) for name in names_in(type(settings), front_end)}


def check_options(settings: Any) -> None:
    """Raise ValueError where an option of a settings object has a value that is not allowed."""
    for name, each in options_of(type(settings)).items():
        text = each.problem(getattr(settings, name))
        if text is not None:
            raise ValueError(text)
