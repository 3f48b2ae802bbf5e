"""Every shipped YAML file: composed by the command that it opens with, checked and built."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from rich.console import Console

from requestzero.config.options import OverflowSettings, RequestZeROSettings
from requestzero.recipes import build
from requestzero.recipes.build import build_data, build_loader, build_model, build_tokenizer
from requestzero.recipes.config_check import config_problems, zero_settings
from requestzero.recipes.config_schema import OverflowConfig, ZeroConfig, register_schema
from requestzero.recipes.errors import UsageError
from requestzero.recipes.lightning_run import make_trainer
from requestzero.recipes.model import load_hugging_face
from requestzero.recipes.override_check import command_problems, without_hydra
from requestzero.recipes.update_metrics import UpdateMetrics
from support.paths import CONFIGS
from support.recipe_configs import compose_recipe

COMMAND = "# python -m requestzero.recipes.lightning_sft"
RECIPE_FILES = sorted(path for path in CONFIGS.rglob("*.yaml") if path.read_text().startswith(COMMAND))
FP16 = {
    "precision/fp16",
    "precision/fp16_mixed",
    "overflow/fp16_dynamic",
    "overflow/fp16_static",
    "overflow/fp16_drop_request",
}


def name_of(path: Path) -> str:
    return path.relative_to(CONFIGS).with_suffix("").as_posix()


def overrides_of(path: Path) -> list[str]:
    """The overrides of the command in the file's first line."""
    return shlex.split(path.read_text().splitlines()[0].removeprefix(COMMAND))


@pytest.fixture
def composed(request: pytest.FixtureRequest, tmp_path: Path, hugging_face_model: Path) -> Any:
    """The configuration of the file's command, with data and a model that exist."""
    (tmp_path / "requests.jsonl").write_text('{"id": 1, "texts": ["some text"]}\n')
    places = {
        "requests.jsonl": str(tmp_path / "requests.jsonl"),
        "/models/my-causal-lm": f"'{hugging_face_model}'",
    }
    overrides = overrides_of(request.param)
    for placeholder, place in places.items():
        overrides = [item.replace(placeholder, place) for item in overrides]
    on_gpu = name_of(request.param) in FP16 and torch.cuda.is_available()
    overrides += ["trainer.devices=1", "trainer.accelerator=" + ("gpu" if on_gpu else "cpu")]
    problems = command_problems(overrides, "lightning_sft")
    cfg = compose_recipe(*overrides)
    return name_of(request.param), problems, cfg


def test_there_are_files_for_every_group() -> None:
    groups = {path.parent.name for path in RECIPE_FILES if path.parent != CONFIGS}
    assert groups == {"zero", "overflow", "precision", "model", "data", "optimizer", "trainer"}
    assert len(RECIPE_FILES) >= 20
    for path in RECIPE_FILES:
        group = path.parent.name
        assert path.parent == CONFIGS or f"{group}={path.stem}" in overrides_of(path), f"{path} is not what it shows"


def test_every_file_opens_with_a_command() -> None:
    for path in CONFIGS.rglob("*.yaml"):
        assert path.read_text().startswith(("# python -m ", "# accelerate ")), path


@pytest.mark.parametrize("composed", RECIPE_FILES, indirect=True, ids=name_of)
def test_a_file_composes_and_builds(composed: Any, tmp_path: Path) -> None:
    name, problems, cfg = composed
    if name in FP16 and not torch.cuda.is_available():
        assert len(problems) == 1
        assert "is not allowed on CPU" in problems[0]
        zero_settings(cfg)
        return
    assert problems == []
    assert config_problems(cfg) == []
    trainer = make_trainer(cfg, tmp_path, Console(), UpdateMetrics())
    assert trainer.accumulate_grad_batches == 1, "the loader marks the windows"
    assert trainer.strategy.settings == zero_settings(cfg)
    tokenizer = build_tokenizer(cfg.model)
    loader = build_loader(cfg, build_data(cfg, tokenizer, world_size=2), tokenizer)
    assert loader.planner.windows.marks
    assert len(loader) > 0
    assert sum(parameter.numel() for parameter in build_model(cfg).parameters()) > 1000


def test_the_demo_is_what_it_says() -> None:
    cfg = compose_recipe()
    assert (cfg.zero.stage, cfg.zero.offload_optimizer, cfg.zero.grad_accum_dtype) == (2, True, "fp32")
    assert cfg.zero.normalization == "token"
    assert cfg.precision.mode == "bf16-true"
    tokenizer = build_tokenizer(cfg.model)
    loader = build_loader(cfg, build_data(cfg, tokenizer, world_size=2), tokenizer)
    assert (loader.planner.windows.requests, loader.planner.budget.tokens) == (4, 512)
    plans = [request for window in loader.planner.epoch(0, 2) for request in window.plan.requests]
    assert {request.bins.micro_batches for request in plans} == {1, 2, 3, 4, 5, 6}
    assert 0.5e6 < sum(parameter.numel() for parameter in build_model(cfg).parameters()) < 1e6


@pytest.mark.parametrize(
    ("config", "settings"), [(ZeroConfig, RequestZeROSettings), (OverflowConfig, OverflowSettings)]
)
def test_the_schema_is_derived_from_the_settings(config: type, settings: type) -> None:
    given = {item.name: item.default for item in dataclasses.fields(config)}
    owned = {item.name: item.default for item in dataclasses.fields(settings) if item.name != "overflow"}
    elsewhere = {"rank_dependent_micro_batches"}  # of Accelerate and the engine: the recipes' loaders plan equal ones
    assert given == {name: default for name, default in owned.items() if name not in elsewhere}


def test_a_model_that_cannot_pack_is_told(hugging_face_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_with_cache(path: str) -> Any:
        model = load_hugging_face(path)
        model.config.use_cache = True
        return model

    register_schema()
    overrides = ["model=hugging_face", f"model.path='{hugging_face_model}'", "data.layout=packed"]
    with initialize_config_module("requestzero.configs", version_base="1.3"):
        cfg = compose("lightning_sft", overrides=overrides)
    assert build_model(cfg).training
    monkeypatch.setattr(build, "load_hugging_face", load_with_cache)
    with pytest.raises(
        UsageError, match=r"data\.layout='packed' is not allowed with this model: Llama.* attends across"
    ):
        build_model(cfg)


def test_hydras_own_part_is_taken_off() -> None:
    cfg = OmegaConf.create({"hydra": {"run": 1}, "seed": 2})
    OmegaConf.set_struct(cfg, True)
    assert without_hydra(cfg) == {"seed": 2}
