"""The Accelerate recipe, as a user starts it and in pieces."""

from __future__ import annotations

import csv
import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import patch_environment
from omegaconf import OmegaConf

from requestzero.recipes import accelerate_sft
from requestzero.recipes.csv_tracker import CsvTracker
from requestzero.recipes.errors import UsageError
from requestzero.recipes.launched import launch_problems, register_launched
from requestzero.recipes.override_check import command_problems
from support.accelerate_state import fresh
from support.paths import ACCELERATE_CONFIGS
from support.preloaded import executable
from support.ranks import RankGroup
from support.recipe_configs import TINY, compose_recipe
from support.scripts import finish, start_module

SMALL = [
    *TINY,
    "model.layers=1",
    "data.requests_per_update=2",
    "optimizer.warmup_steps=2",
    "trainer.max_steps=4",
]


def composed(*overrides: str) -> Any:
    register_launched()
    return compose_recipe(*SMALL, *overrides, recipe="accelerate_sft")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Five requests, two to an update: every epoch ends with a shorter window."""
    path = tmp_path_factory.mktemp("data") / "requests.jsonl"
    requests = [
        {"id": i, "texts": [f"text {i} {j} " * (1 + (i + j) % 4) for j in range(1 + 3 * i % 7)]} for i in range(5)
    ]
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return ["data=jsonl", f"data.path='{path}'"]


def masters(folder: Path) -> list[torch.Tensor]:
    """The flat fp32 master weights of both ranks in a DeepSpeed checkpoint."""
    files = sorted(folder.glob("*_mp_rank_00_optim_states.pt"))
    assert len(files) == 2
    states = [torch.load(file, weights_only=False)["optimizer_state_dict"] for file in files]
    return [tensor for state in states for tensor in state["single_partition_of_fp32_groups"]]


@pytest.mark.slow
def test_final_weights_are_those_of_the_lightning_recipe(tmp_path: Path, data: list[str]) -> None:
    """As users start them, bit for bit: weights and masters after four updates with clipping."""
    settings = [*SMALL, *data, "trainer.gradient_clip_val=0.5"]
    ours, lightning = tmp_path / "ours", tmp_path / "lightning"
    launch = ("accelerate.commands.launch", "--config_file", str(ACCELERATE_CONFIGS / "zero2_offload_cpu.yaml"))
    recipe = ("--main_process_port", "0", "-m", "requestzero.recipes.accelerate_sft")
    output = finish(start_module(*launch, *recipe, *settings, f"hydra.run.dir={ours}"))
    reference = ("requestzero.recipes.lightning_sft", *settings, "trainer.accelerator=cpu", "trainer.devices=2")
    finish(start_module(*reference, f"hydra.run.dir={lightning}"))
    folders = [ours / "checkpoints/update-4/pytorch_model", lightning / "checkpoints/update-4.ckpt/checkpoint"]
    found, expected = (
        torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)["module"] for folder in folders
    )
    assert len(found) > 10
    assert all(torch.equal(found[name], expected[f"model.{name}"]) for name in found)
    for tensor, wanted in zip(*map(masters, folders), strict=True):
        assert torch.equal(tensor, wanted)
    rows = [list(csv.DictReader((folder / "csv/metrics.csv").open())) for folder in (ours, lightning)]
    assert [float(row["loss"]) for row in rows[0]] == pytest.approx([float(row["loss"]) for row in rows[1]], rel=1e-5)
    assert [row["requests"] for row in rows[0]] == ["2", "4", "5", "7"]
    for name in ("grad_norm", "overflow/skipped_updates", "overflow/loss_scale", "overflow/dropped_requests"):
        assert [float(row[name]) for row in rows[0]] == pytest.approx([float(row[name]) for row in rows[1]], rel=1e-5)
    assert list((ours / "tensorboard").glob("events*"))
    assert "requestzero: end of run" in output
    assert output.count("updates applied") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lightning", "ours"]


def train(directory: str, *overrides: str) -> tuple[Any, list[str]]:
    """On this rank, in the process that is there already."""
    environment = {"local_world_size": "2"}
    with fresh(**environment):
        summary = accelerate_sft.run(composed(*overrides), Path(directory))
        return summary, sorted(path.name for path in Path(directory).rglob("update-*"))


def train_and_stay(directory: str, *overrides: str) -> Any:
    """``end_training`` leaves the process group, which the other tests of the session need."""
    from unittest import mock

    with mock.patch("accelerate.state.PartialState.destroy_process_group"):
        return train(directory, *overrides)


def test_resumed_equals_uninterrupted(two_ranks: RankGroup, tmp_path: Path, data: list[str]) -> None:
    whole, part, rest = (tmp_path / name for name in ("whole", "part", "rest"))
    (summary, names), (nothing, _) = two_ranks.run(
        train_and_stay, str(whole), "trainer.checkpoint_every_n_steps=3", "precision=bf16", *data
    )
    assert names == ["update-3", "update-4"]
    assert nothing is None
    assert (summary.updates_applied, summary.updates_skipped, summary.requests) == (4, 0, 7)
    two_ranks.run(train_and_stay, str(part), "trainer.max_steps=2", "precision=bf16", *data)
    state = part / "checkpoints/update-2"
    (resumed, _), _ = two_ranks.run(
        train_and_stay, str(rest), f"trainer.resume_from='{state}'", "precision=bf16", *data
    )
    paths = [folder / "checkpoints/update-4/pytorch_model" for folder in (whole, rest)]
    for tensor, wanted in zip(*map(masters, paths), strict=True):
        assert torch.equal(tensor, wanted)
    assert resumed.first_loss == summary.first_loss
    assert resumed.last_loss == summary.last_loss
    assert resumed.micro_batches == summary.micro_batches


def test_losses_at_stage_3_are_those_of_stage_2(two_ranks: RankGroup, tmp_path: Path, data: list[str]) -> None:
    """Within rounding: DeepSpeed's stage 3 has a linear function of its own."""
    settings = ["precision=fp32", *data]
    stage_2, stage_3 = (
        two_ranks.run(train_and_stay, str(tmp_path / name), f"zero={name}", *settings)[0][0]
        for name in ("stage2", "stage3_offload")
    )
    assert (stage_3.updates_applied, stage_3.requests) == (stage_2.updates_applied, stage_2.requests) == (4, 7)
    assert stage_3.first_loss == stage_2.first_loss > stage_3.last_loss
    assert stage_3.last_loss == pytest.approx(stage_2.last_loss, rel=1e-6)


LAUNCHED = {
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "pkg://requestzero.configs/accelerate/deepspeed/zero2_offload.yaml",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
}


def test_settings_are_those_of_the_launch() -> None:
    with patch_environment(**LAUNCHED):
        cfg = composed()
        assert (cfg.zero.stage, cfg.zero.offload_optimizer, cfg.zero.grad_accum_dtype) == (2, True, "fp32")
        assert cfg.precision.mode == "bf16-true"
        assert cfg.trainer.num_nodes == 2
        assert list(launch_problems(cfg)) == []
    cfg = composed()
    assert (cfg.zero.stage, cfg.zero.offload_optimizer, cfg.precision.mode) == (2, False, "32-true")
    assert cfg.trainer.num_nodes == 1


def test_overrides_that_contradict_the_launch(tmp_path: Path) -> None:
    with patch_environment(**LAUNCHED):
        cfg = composed("zero=stage1", "zero.offload_optimizer=false", "precision=fp32", "trainer.devices=8")
        with pytest.raises(UsageError) as caught:
            accelerate_sft.run(cfg, tmp_path)
    text = "\n".join(caught.value.problems)
    for key, given, said in (
        ("zero.stage", "1", "2"),
        ("zero.offload_optimizer", "False", "True"),
        ("trainer.devices", "8", "2"),
        ("precision.mode", "'32-true'", "'bf16-true'"),
    ):
        assert f"{key}={given} is not allowed: accelerate launch says {said}" in text
    assert len(caught.value.problems) == 4


def test_overflow_options_against_the_deepspeed_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.yaml"
    path.write_text("overflow: {on_overflow: raise}\nbf16: {check_grad_overflow: true}\n")
    with patch_environment(**{**LAUNCHED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}):
        cfg = composed("overflow=drop_request", "overflow.check_grad_overflow=true")
        assert list(launch_problems(cfg)) == [
            "overflow.on_overflow='drop_request' is not allowed: accelerate launch says 'raise' (its config file or "
            "flags, or the DeepSpeed file that it names). Leave the override out, or launch with another config file."
        ]
        (problem,) = launch_problems(composed("overflow=stop_after_skips"))
        assert problem.startswith("overflow.max_consecutive_skips=10 and overflow.on_overflow='raise' disagree")


def test_retain_auto_of_the_deepspeed_file_is_a_value(tmp_path: Path) -> None:
    key = "zero.retain_gpu_grad_partition_until_step"
    path = tmp_path / "ds.yaml"
    path.write_text("zero_optimization: {retain_gpu_grad_partition_until_step: auto}\n")
    with patch_environment(**{**LAUNCHED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}):
        assert composed().zero.retain_gpu_grad_partition_until_step == "auto"
        (problem,) = launch_problems(composed(f"{key}=true"))
    assert problem.startswith(f"{key}=True is not allowed: accelerate launch says 'auto'")


def test_overrides_that_agree_with_the_launch() -> None:
    with patch_environment(**LAUNCHED):
        assert list(launch_problems(composed("zero=stage2_offload", "precision=bf16", "trainer.devices=2"))) == []


def test_wrong_overrides_are_told_all_at_once() -> None:
    register_launched()
    problems = command_problems(["zero.stge=2", "trainer.max_steps=no"], "accelerate_sft")
    assert len(problems) == 2
    assert "Nearest: zero.stage" in problems[0]


def test_a_wrong_command_starts_nothing() -> None:
    command = [executable(), "-m", "requestzero.recipes.accelerate_sft", "zero=stage9"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2
    assert "Nothing was started:\n  zero=stage9 is not allowed: use one of" in run.stderr


def test_windows_cannot_be_dropped(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"zero.incomplete_window='drop' is not allowed: the loop of this"):
        accelerate_sft.run(composed("zero.incomplete_window=drop"), tmp_path)


def test_csv_tracker(tmp_path: Path) -> None:
    with fresh():
        tracker = CsvTracker(tmp_path / "logs")
        tracker.store_init_configuration({"a": 1})
        tracker.log({"loss": 0.5, "norm": math.nan}, step=1)
        tracker.log({"loss": 0.25, "norm": 1.0}, step=2)
        assert tracker.tracker.name.endswith("metrics.csv")
        tracker.finish()
    rows = list(csv.DictReader((tmp_path / "logs/metrics.csv").open()))
    assert rows == [{"step": "1", "loss": "0.5", "norm": "nan"}, {"step": "2", "loss": "0.25", "norm": "1.0"}]


def test_the_configuration_is_typed() -> None:
    with pytest.raises(Exception, match="not-a-number"):
        composed("trainer.max_steps=not-a-number")
    assert OmegaConf.is_struct(composed())


def last_losses(two_ranks: RankGroup, folder: Path, data: list[str], normalization: str) -> list[float]:
    """After four updates on the same requests, cut into small and into large micro-batches."""
    found = []
    for budget in (48, 160):
        settings = [f"data.tokens_per_micro_batch={budget}", f"zero.normalization={normalization}", *data]
        (summary, _), _ = two_ranks.run(train_and_stay, str(folder / f"{normalization}-{budget}"), *settings)
        found.append(summary.last_loss)
    return found


def test_only_by_token_the_budget_does_not_matter(two_ranks: RankGroup, tmp_path: Path, data: list[str]) -> None:
    first, second = last_losses(two_ranks, tmp_path, data, "token")
    assert first == pytest.approx(second, rel=1e-5)
    first, second = last_losses(two_ranks, tmp_path, data, "mean")
    assert first != pytest.approx(second, rel=1e-4)
    assert composed().zero.normalization == "token"
