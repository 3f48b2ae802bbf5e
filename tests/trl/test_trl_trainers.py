"""TRL's trainers, with our plugin in every way in which it can come in, make the weights that they make under DDP."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support import trl_cases
from support.accelerate_state import fresh
from support.class_names import optimizer_name
from support.ranks import RankGroup
from support.scripts import finish, start_module
from support.trl_cases import CASES, OFFLOAD, STAGE_2, STAGE_3, trainer_of, weights_of

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
PROGRAM = Path(trl_cases.__file__)
EVALUATED = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "load_best_model_at_end": True,
}


def mixed_before(config: type) -> type:
    from requestzero.transformers import RequestZeROTrainingArguments

    return type("Mixed", (RequestZeROTrainingArguments, config), {})


def mixed_after(config: type) -> type:
    from requestzero.transformers import RequestZeROTrainingArguments

    return type("Mixed", (config, RequestZeROTrainingArguments), {})


def put_in(args: Any) -> None:
    from requestzero import RequestZeROPlugin

    args.deepspeed_plugin = RequestZeROPlugin(hf_ds_config=args.hf_deepspeed_config)


def play(case: str, how: str, deepspeed: Any = STAGE_2, **options: Any) -> tuple[torch.Tensor, str]:
    """``how``: ``"ddp"``, ``"plugin"``, or where the arguments class is mixed in."""
    classes = {"before": mixed_before, "after": mixed_after}
    with fresh(**OFFLINE):
        given = {} if how == "ddp" else {"deepspeed": deepspeed}
        cpu = {"use_cpu": not torch.cuda.is_available()} if how in ("ddp", "plugin") else {}
        plugin = put_in if how == "plugin" else None
        trainer = trainer_of(case, classes.get(how), plugin, **given, **cpu, **options)
        trainer.train()
        optimizer = "" if how == "ddp" else type(trainer.deepspeed.optimizer).__name__
        return weights_of(trainer), optimizer


@pytest.fixture(scope="module")
def under_ddp(two_ranks: RankGroup) -> dict[str, torch.Tensor]:
    return {case: two_ranks.run(play, case, "ddp", timeout=300)[0][0] for case in CASES}


def check(found: tuple[torch.Tensor, str], expected: torch.Tensor, built: str | None = None) -> None:
    weights, optimizer = found
    assert optimizer == (built or optimizer_name())
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["before", "after", "plugin"])
@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_of_ddp(
    two_ranks: RankGroup, under_ddp: dict[str, torch.Tensor], case: str, how: str
) -> None:
    check(two_ranks.run(play, case, how)[0], under_ddp[case])


@pytest.mark.parametrize("case", ["sft", "dpo"])
def test_with_offload_that_retains_the_partition(
    two_ranks: RankGroup, under_ddp: dict[str, torch.Tensor], case: str
) -> None:
    check(two_ranks.run(play, case, "before", OFFLOAD)[0], under_ddp[case])


@pytest.mark.parametrize("case", ["sft", "dpo", "lora"])
def test_stage_3(two_ranks: RankGroup, under_ddp: dict[str, torch.Tensor], case: str) -> None:
    """The reference model of DPO is sharded too."""
    check(two_ranks.run(play, case, "before", STAGE_3)[0], under_ddp[case], "RequestZeROStage3Optimizer")


def test_the_best_model_at_the_end(two_ranks: RankGroup, tmp_path: Path) -> None:
    options = {**EVALUATED, "output_dir": str(tmp_path)}
    (expected, _), found = (two_ranks.run(play, "sft", how, **options)[0] for how in ("ddp", "plugin"))
    check(found, expected)


@pytest.mark.slow
def test_unchanged(under_ddp: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """All of them in one program."""
    paths = {"PYTHONPATH": f"{PROGRAM.parent.parent}:{os.environ.get('PYTHONPATH', '')}"}
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "requestzero.run")
    finish(
        start_module(*launcher, str(PROGRAM), str(tmp_path), PYTHON_EXEC=sys.executable, **OFFLINE, **paths),
        timeout=300,
    )
    found = torch.load(tmp_path / "found.pt")
    check(found.pop("sft at stage 3"), under_ddp["sft"], "RequestZeROStage3Optimizer")
    assert found.keys() == under_ddp.keys()
    for case in CASES:
        check(found[case], under_ddp[case])
