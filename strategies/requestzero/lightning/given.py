"""The arguments that a constructor call gives, as opposed to those that are left at their defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from typing_extensions import Self

from requestzero.lightning.options import DEFAULTS
from requestzero.lightning.strategy_facts import TRAINER, StrategyFacts


class NotesArguments:
    """A base whose objects have the call that makes them in ``_call`` when their ``__init__`` begins.

    A base of its own, since LightningCLI takes a ``__new__`` that a class defines itself for its signature.
    """

    _call: tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]
    """The constructor, its positional and its keyword arguments."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        instance = super().__new__(cls)
        instance._call = (cls.__init__, args, kwargs)
        return instance


def given_names(
    init: Callable[..., None],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    strategy: StrategyFacts = TRAINER,
) -> frozenset[str]:
    """Return the names of the arguments that a call of a strategy's ``__init__`` gives.

    Args:
        init: the constructor.
        args: its positional arguments.
        kwargs: its keyword arguments, those of ``DeepSpeedStrategy`` too.
        strategy: whose constructor it is.
    """
    signature = inspect.signature(init)
    bound = signature.bind_partial(None, *args, **kwargs).arguments
    values = {name: value for name, value in bound.items() if name not in ("self", "deepspeed_options")}
    values.update(bound.get("deepspeed_options", {}))
    if set(strategy.own_options) <= set(values):
        # LightningCLI (jsonargparse) passes every parameter on, and whoever expands a settings object into
        # arguments does the same: a default then says nothing about what the user wants.
        defaults = {**DEFAULTS, **{name: signature.parameters[name].default for name in strategy.own_options}}
        values = {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}
    return frozenset(values)
