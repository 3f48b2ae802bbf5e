"""Every option stands in one place with all that is known of it, and everything else follows from there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

import requestzero
from requestzero.config.engine_options import EngineOptions
from requestzero.config.keys import SECTION_KEYS, TOP_LEVEL_KEYS
from requestzero.config.nested import look_up, put
from requestzero.config.option_record import OWN_SECTIONS, FrontEnd, Option, option, options_of
from requestzero.config.options import OWNERS, OverflowSettings, RequestZeROSettings
from requestzero.config.own_keys import check_own_keys, pop_own_keys
from requestzero.config.reference_table import meanings_of, options_table
from requestzero.config.translation import from_config, to_config
from requestzero.config.validation import Choice, WholeNumber

ALL = [(owner, each) for owner in OWNERS for each in options_of(owner).values()]
GROUPS = {"overflow"}


def path_of(value: Any) -> str:
    return value.path if isinstance(value, Option) else ""


def test_every_field_of_an_owner_is_an_option_or_a_group() -> None:
    for owner in OWNERS:
        assert {item.name for item in fields(owner)} - GROUPS == options_of(owner).keys()
    assert len(ALL) == 24


@pytest.mark.parametrize(("owner", "known"), ALL, ids=path_of)
def test_an_option_has_all_its_metadata(owner: type, known: Option) -> None:
    assert known.problem(known.default) is None
    assert "a value that is not allowed" in str(known.problem("a value that is not allowed"))
    assert known.type is not None
    assert meanings_of(owner)[known.name].endswith(".")
    assert known.front_ends
    assert (FrontEnd.ENGINE in known.front_ends) == bool(known.keys)


@pytest.mark.parametrize(("owner", "known"), [pair for pair in ALL if pair[1].keys], ids=path_of)
def test_a_key_is_one_of_deepspeeds_or_of_ours(owner: type, known: Option) -> None:
    """DeepSpeed knows the keys that are not called our own, and no other."""
    sections = {**SECTION_KEYS, "zero_optimization": DeepSpeedZeroConfig.model_fields.keys()}
    for key in known.keys:
        section, name, *_ = key.split(".")
        assert section in TOP_LEVEL_KEYS.union(OWN_SECTIONS)
        assert (key in known.own_keys) == (section in OWN_SECTIONS or name not in sections[section])


@pytest.mark.parametrize(("owner", "known"), [pair for pair in ALL if pair[1].keys], ids=path_of)
def test_an_option_becomes_its_keys_and_comes_back(owner: type, known: Option) -> None:
    rule = known.rule
    values = rule.values if isinstance(rule, Choice) else (True, False, 1, 16)
    for value in (value for value in values if value is not None and rule.accepts(value)):
        for precision in ("fp32", "bf16", "fp16", None):
            config = to_config(owner, {known.name: value}, precision)
            assert all(look_up(config, key) is not None for key in known.keys_in(precision))
            assert from_config(owner, config) == ({known.name: value} if known.keys_in(precision) else {})


def test_an_engine_is_told_what_deepspeed_does_not_know() -> None:
    own = {known.name for known in options_of(RequestZeROSettings).values() if known.own_keys}
    assert {item.name for item in fields(EngineOptions)} == own | GROUPS
    for item in fields(EngineOptions):
        assert getattr(EngineOptions(), item.name) == getattr(RequestZeROSettings(), item.name)


def test_own_keys_are_removed_and_nothing_else() -> None:
    config: dict[str, Any] = {"train_batch_size": 1}
    for _, known in ALL:
        for key in known.keys:
            put(config, key, "anything")
    removed = pop_own_keys(config)
    for _, known in ALL:
        for key in known.keys:
            assert (look_up(removed, key) is not None) == (key in known.own_keys)
            assert (look_up(config, key) is not None) == (key not in known.own_keys)
    assert config["train_batch_size"] == 1


def test_a_wrong_value_of_our_own_key_is_told_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"^In file: overflow\.max_consecutive_skips=0 is not allowed: use a whole"):
        check_own_keys({"overflow": {"max_consecutive_skips": 0}}, "file")
    check_own_keys({"overflow": {"max_consecutive_skips": None}}, "file")


def test_front_ends_without_a_key_do_not_include_the_engine() -> None:
    declared = option(1, WholeNumber(0), front_ends=(FrontEnd.RECIPES,)).metadata
    assert next(iter(declared.values()))["front_ends"] == {FrontEnd.RECIPES}
    declared = option(1, WholeNumber(0), key="requestzero.x", front_ends=(FrontEnd.RECIPES,)).metadata
    assert next(iter(declared.values()))["front_ends"] == {FrontEnd.RECIPES, FrontEnd.ENGINE}


# --- a new option ---------------------------------------------------------------------------------------------------

MADE_UP = '''    made_up: int = option(3, WholeNumber(1), key="requestzero.made_up")
    """A number that a test has made up."""
'''
BEFORE = "    overflow: OverflowSettings = field("

# Prints where the option is found, by front end, and what is said of values that are wrong or differ.
SCRIPT = """
import json
from dataclasses import fields
from unittest.mock import patch

def text(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return str(error)

from requestzero import RequestZeRO, RequestZeROPlugin
from requestzero.accelerate.plan import make_plan
from requestzero.config.engine_options import take_engine_options
from requestzero.config.reference_table import options_table
from requestzero.recipes.config_check import zero_settings
from requestzero.recipes.config_schema import ZeroConfig
from requestzero.recipes.override_check import command_problems

def plan(**given):
    nothing = {item.name: None for item in fields(RequestZeROPlugin)}
    return make_plan({**nothing, **given}, {}).settings

def section(value):
    return {"requestzero": {"made_up": value}}

config = section(4)
take_engine_options(config)
print(json.dumps({
    "table": [row for row in options_table().splitlines() if "made_up" in row],
    "engine": config,
    "engine, wrong": text(take_engine_options, section(0)),
    "Lightning": RequestZeRO(config=section(4)).settings.made_up,
    "Lightning, wrong": text(RequestZeRO, config=section("x")),
    "Accelerate": [plan(options={"made_up": 4}).made_up, plan(hf_ds_config=section(4)).made_up, plan().made_up],
    "Accelerate, wrong": text(plan, options={"made_up": 0}),
    "Accelerate, both": text(plan, options={"made_up": 4}, hf_ds_config=section(5)),
    "recipes": ZeroConfig().made_up,
    "recipes, wrong": command_problems(["zero.made_up=0"], "lightning_sft"),
    "recipes, misspelt": command_problems(["zero.madeup=4"], "lightning_sft"),
}))
"""


def test_an_option_that_is_added_in_one_place_is_everywhere(tmp_path: Path) -> None:
    package = tmp_path / "requestzero"
    shutil.copytree(Path(requestzero.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    settings = package / "config" / "options.py"
    source = settings.read_text()
    assert source.count(BEFORE) == 1
    settings.write_text(source.replace(BEFORE, MADE_UP + BEFORE))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found == {
        "table": ["| `made_up` | `3` | A number that a test has made up. | all | `requestzero.made_up` |"],
        "engine": {},
        "engine, wrong": "In the DeepSpeed config: requestzero.made_up=0 is not allowed: use a whole number of at "
        "least 1.",
        "Lightning": 4,
        "Lightning, wrong": "In config: requestzero.made_up='x' is not allowed: use a whole number of at least 1.",
        "Accelerate": [4, 4, 3],
        "Accelerate, wrong": "made_up=0 is not allowed: use a whole number of at least 1.",
        "Accelerate, both": "requestzero.made_up is 4 in the options of RequestZeROPlugin and 5 in hf_ds_config: set "
        "it in one place, or to the same value.",
        "recipes": 3,
        "recipes, wrong": ["zero.made_up=0 is not allowed: use a whole number of at least 1."],
        "recipes, misspelt": ["'zero.madeup=4' is not allowed: there is no key 'zero.madeup'. Nearest: zero.made_up."],
    }


def test_the_table_is_made_of_the_classes_that_it_is_given() -> None:
    assert options_table([OverflowSettings]).count("\n") == 1 + len(options_of(OverflowSettings))
