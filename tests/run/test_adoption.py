"""What becomes request-safe in a program that knows nothing of this package."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import DeepSpeedPlugin

from requestzero.run.__main__ import DESCRIPTION
from requestzero.run.adoption import Adoption
from support import adopted_facts, unchanged_loop
from support.class_names import optimizer_name
from support.paths import ACCELERATE_CONFIGS
from support.scripts import finish, start_module

LOOP = Path(unchanged_loop.__file__)
FRESH = {"python": sys.executable}
"""Nothing is imported before ``requestzero.run``: what it changes are imports."""
FRESH_RANKS = {"PYTHON_EXEC": sys.executable}
"""The same for what torchrun starts."""
WITH_TESTS = {"PYTHONPATH": f"{LOOP.parent.parent}:{Path(__file__).parents[2] / 'strategies'}"}
TORCHRUN = ("--standalone", "--nproc-per-node", "2", "-m", "requestzero.run")


def launch(stage: int = 2) -> tuple[str, ...]:
    """``accelerate launch`` with a shipped file."""
    file = ACCELERATE_CONFIGS / f"zero{stage}_cpu.yaml"
    return "accelerate.commands.launch", "--config_file", str(file), "--main_process_port", "0"


def trained(*stages: int) -> list[str]:
    """The facts of each of two ranks."""
    names = {2: optimizer_name(), 3: "RequestZeROStage3Optimizer"}
    return ["\n".join(f"2 {names[stage]} [-9.0, -9.0, -9.0]" for stage in stages)] * 2


def results(directory: Path) -> list[str]:
    return [path.read_text() for path in sorted(directory.glob("rank*.txt"))]


@pytest.fixture(scope="module")
def output() -> str:
    return finish(start_module("requestzero.run", str(adopted_facts.__file__), **FRESH, **WITH_TESTS))


def test_every_plugin_of_a_supported_stage_is_adopted(output: str) -> None:
    facts = json.loads(next(line for line in output.splitlines() if line.startswith("FACTS")).removeprefix("FACTS"))
    ours = "RequestZeROPlugin"
    assert facts == {
        "plain": [ours, True, True, 2],
        "by position": [ours, True, True, 1],
        "stage 3": [ours, True, True, 3],
        "stage 3 again": [ours, True, True, 3],
        "NVMe": ["DeepSpeedPlugin", False, True, 3],
        "stage 0": ["DeepSpeedPlugin", False, True, 0],
        "subclass": ["Named", True, True, 1, True, "hello"],
        "dataclass": ["More", True, True, 2, True, 4, 2],
        "again": ["More", True, True, 2, 4, 3],
        "fields": [len(dataclasses.fields(DeepSpeedPlugin)), True],
        "copied": ["More", True, True, 2],
        "pickled": [ours, True, True, 2],
        "arguments": [ours, True, True, 2],
        "arguments of stage 3": [ours, True, True, 3],
        "engine": ["RequestZeROEngine", True],
    }


def test_other_stages_are_told_once(output: str) -> None:
    told = [line for line in output.splitlines() if line.startswith("requestzero.run:")]
    assert len(told) == len(set(told)) == 2
    for key, line in zip(("offload_param.device='nvme'", "stage=0"), told, strict=True):
        assert f"an engine stays DeepSpeed's own. zero_optimization.{key} was asked" in line


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"config": {}, "config_params": {}}, "Its config is given in config and in config_params: give one"),
        ({}, "Its config is given nowhere: give one"),
        ({"config": "nowhere.json"}, "config names the file 'nowhere.json', which does not exist."),
        ({"args": SimpleNamespace(deepscale_config="old.json")}, "Its config is in args.deepscale_config, which"),
    ],
    ids=["twice", "nowhere", "no file", "old name"],
)
def test_an_unread_config_is_told(given: dict[str, Any], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not Adoption()._adopts_call(given)
    assert f"requestzero.run: an engine stays DeepSpeed's own. {told}" in capsys.readouterr().err


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_stages_of_initialize_are_those_that_the_help_names(stage: int) -> None:
    config = {"zero_optimization": {"stage": stage}}
    assert Adoption()._adopts_call({"config": {**config, "optimizer": {"type": "Adam"}}})
    assert Adoption()._adopts_call({"config": config, "optimizer": object()})
    assert "stages 1 to 3" in DESCRIPTION


def test_what_trains_nothing_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert not Adoption()._adopts_call({"config": {"zero_optimization": {"stage": 3}}})
    assert not capsys.readouterr().err


@pytest.mark.parametrize("stage", [2, 3])
def test_a_bare_accelerator_under_accelerate_launch(tmp_path: Path, stage: int) -> None:
    """With a shipped file, and a loader whose worker is spawned."""
    finish(start_module(*launch(stage), "-m", "requestzero.run", str(LOOP), "accelerate", str(tmp_path), **FRESH_RANKS))
    assert results(tmp_path) == trained(stage)


@pytest.mark.slow
def test_deepspeed_initialize_under_torchrun(tmp_path: Path) -> None:
    program = ("-m", "support.unchanged_loop", "deepspeed", str(tmp_path))
    output = finish(start_module("torch.distributed.run", *TORCHRUN, *program, **FRESH_RANKS, **WITH_TESTS))
    assert results(tmp_path) == trained(2, 3)
    assert "requestzero.run:" not in output


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--no-initialize",)])
def test_deepspeed_initialize_can_be_left_as_it_is(tmp_path: Path, options: tuple[str, ...]) -> None:
    program = tmp_path / "program.py"
    program.write_text("import deepspeed\nprint('wrapped', hasattr(deepspeed.initialize, '__wrapped__'))")
    output = finish(start_module("requestzero.run", *options, str(program), **FRESH, DS_ACCELERATOR="cpu"))
    assert f"wrapped {not options}" in output


def test_the_shipped_files_say_what_to_write_where_nothing_reads_them(tmp_path: Path) -> None:
    process = start_module(*launch(), str(LOOP), "accelerate", str(tmp_path))
    output, _ = process.communicate(timeout=150)
    assert process.returncode != 0
    assert "ValueError: Expected a string path to an existing deepspeed config" in output
    advice = "write Accelerator(deepspeed_plugin=RequestZeROPlugin()), or start the program with -m requestzero.run"
    assert advice in output
