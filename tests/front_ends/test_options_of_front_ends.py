"""Each front end has exactly the options that their owner says it has, with the owner's types and defaults."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

import pytest

from requestzero import RequestZeRO, RequestZeROFabric, RequestZeROPlugin
from requestzero.accelerate.options import OWN_OPTIONS, option_source
from requestzero.accelerate.plan import make_plan
from requestzero.config.keys import check_top_level_keys
from requestzero.config.nested import put
from requestzero.config.option_record import FrontEnd, Option, options_of
from requestzero.config.options import OWNERS, OverflowSettings, RequestZeROSettings
from requestzero.config.validation import Choice
from requestzero.config.values import check_zero_section
from requestzero.recipes.config_schema import OverflowConfig, ZeroConfig

TOP = options_of(RequestZeROSettings)
OVERFLOW = options_of(OverflowSettings)


def names(front_end: FrontEnd) -> set[str]:
    """The options at the top that a front end has; every one has the group ``overflow``."""
    return {name for name, option in TOP.items() if front_end in option.front_ends}


def example(option: Option) -> Any:
    """A value that is not the default."""
    values = option.rule.values if isinstance(option.rule, Choice) else (True, False, 1)
    return next(value for value in values if option.rule.accepts(value) and value != option.default)


def test_every_front_end_has_all_overflow_options() -> None:
    assert all(option.front_ends == frozenset(FrontEnd) for option in OVERFLOW.values())


EVERY = [option for owner in OWNERS for option in options_of(owner).values()]


@pytest.mark.parametrize("option", EVERY, ids=lambda option: option.path)
def test_engine(option: Option) -> None:
    """A DeepSpeed config takes the key of an option that has one, and no key by its name."""
    for key in option.keys:
        config: dict[str, Any] = {}
        put(config, key, option.to_key(example(option)))
        check_top_level_keys(config, "config")
        check_zero_section(config, "config")
    if option.path not in option.keys:
        named: dict[str, Any] = {}
        put(named, option.path, example(option))
        with pytest.raises(ValueError, match=option.name):
            check_top_level_keys(named, "config")


def test_lightning() -> None:
    parameters = inspect.signature(RequestZeRO.__init__).parameters
    others = {"self", "config", "overflow", "deepspeed_options"}
    assert parameters.keys() - others == names(FrontEnd.LIGHTNING)
    hints = get_type_hints(RequestZeRO.__init__)
    for name in names(FrontEnd.LIGHTNING):
        assert parameters[name].default == TOP[name].default, name
        assert hints[name] == TOP[name].type, name


def test_fabric() -> None:
    """Its loop divides by itself, as one under DDP does: the default of ``normalization`` is its own."""
    parameters = inspect.signature(RequestZeROFabric.__init__).parameters
    others = {"self", "config", "overflow", "deepspeed_options"}
    assert parameters.keys() - others == names(FrontEnd.FABRIC)
    hints = get_type_hints(RequestZeROFabric.__init__)
    for name in names(FrontEnd.FABRIC):
        assert parameters[name].default == (TOP[name].default if name != "normalization" else "sum"), name
        assert hints[name] == TOP[name].type, name


@pytest.mark.parametrize("name", TOP)
def test_accelerate_options(name: str) -> None:
    given = {name: example(TOP[name])}
    if name in names(FrontEnd.ACCELERATE):
        option_source(given)
    else:
        with pytest.raises(ValueError, match=f"'{name}' in the options of RequestZeROPlugin is no option"):
            option_source(given)


# Accelerate's own names of these.
STOCK = {
    "stage": "zero_stage",
    "offload_optimizer": "offload_optimizer_device",
    "offload_parameters": "offload_param_device",
}


def test_accelerate_arguments() -> None:
    own = set(vars(RequestZeROPlugin)["__annotations__"]) - {"hf_ds_config", "options"}
    assert own == {*OWN_OPTIONS} - STOCK.keys()
    assert {item.name for item in fields(RequestZeROPlugin)} > {*STOCK.values()}
    hints = get_type_hints(RequestZeROPlugin)
    for name in own - {"overflow"}:
        assert hints[name] == TOP[name].type | None, name
        assert vars(RequestZeROPlugin)[name] is None, "not given"


@pytest.mark.parametrize("name", sorted(names(FrontEnd.ACCELERATE)))
def test_accelerate_settings(name: str) -> None:
    """An option reaches the plan as an argument, in ``options``, and as a key of the DeepSpeed config."""
    nothing = {item.name: None for item in fields(RequestZeROPlugin)}
    needs = {"retain_gpu_grad_partition_until_step": {"offload_optimizer_device": "cpu"}}
    needs["offload_parameters"] = {"zero_stage": 3}
    option, value = TOP[name], example(TOP[name])
    places: list[dict[str, Any]] = [{"options": {name: value}}]
    if name not in STOCK:
        places.append({name: value})
    for key in option.keys:
        config: dict[str, Any] = {}
        put(config, key, option.to_key(value))
        places.append({"hf_ds_config": config})
    for place in places:
        assert getattr(make_plan({**nothing, **needs.get(name, {}), **place}, {}).settings, name) == value, place


@pytest.mark.parametrize(("config", "owner"), [(ZeroConfig, RequestZeROSettings), (OverflowConfig, OverflowSettings)])
def test_recipes(config: type, owner: type) -> None:
    options = options_of(owner)
    schema = options_of(config)
    assert schema.keys() == {name for name, option in options.items() if FrontEnd.RECIPES in option.front_ends}
    assert schema.keys() == {item.name for item in fields(config)}
    for name, option in schema.items():
        assert (option.type, option.default, option.rule) == (
            options[name].type,
            options[name].default,
            options[name].rule,
        )
    assert all(item.default is not MISSING for item in fields(config))
