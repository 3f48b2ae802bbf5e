"""Arguments of ``requestzero.initialize``, and the errors that it raises before anything is built."""

from __future__ import annotations

import argparse
import base64
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import requestzero
from requestzero.config.files import load_config
from requestzero.config.merge import Source, merge
from requestzero.config.options import OverflowSettings, RequestZeROSettings
from requestzero.config.overflow import overflow_to_config
from requestzero.config.translation import to_config
from requestzero.zero.patch import patched
from support.engines import build
from support.ranks import RankGroup
from support.setup import Setup
from support.windows import Layers


@pytest.mark.parametrize("config", [{"disable_python_gc": True}, {"data_types": {"keep_in_fp32_modules": ["norm"]}}])
def test_a_key_that_only_a_later_deepspeed_reads_is_refused(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    for name in ("DISABLE_PYTHON_GC", "KEEP_IN_FP32_MODULES"):
        monkeypatch.delattr(f"deepspeed.runtime.constants.{name}", raising=False)
    with pytest.raises(ValueError, match=r"in config is not possible: the installed DeepSpeed does not read it"):
        requestzero.initialize(model=Layers(), config={"zero_optimization": {"stage": 2}, **config})


def built_from(source: str, folder: str) -> tuple[bool, int, dict[str, Any]]:
    import torch

    config = Setup(offload=True, model="bf16", accum="fp32", retain=True).deepspeed_config()
    given: dict[str, Any] = {"config": config}
    if source == "json":
        given["config"] = Path(folder) / "ds.json"
        given["config"].write_text(json.dumps(config))
    elif source == "yaml":
        given["config"] = str(Path(folder) / "ds.yaml")
        OmegaConf.save(OmegaConf.create(config), given["config"])
    elif source == "omegaconf":
        given["config"] = OmegaConf.create(config)
    elif source == "config_params":
        given = {"config_params": config}
    elif source == "args":
        path = Path(folder) / "args.json"
        path.write_text(json.dumps(config))
        given = {"args": argparse.Namespace(deepspeed_config=str(path), local_rank=0)}
    model = Layers()
    engine, _, loader, scheduler = requestzero.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **given
    )
    assert (loader, scheduler) == (None, None)
    result = (
        engine.options.retain_gpu_grad_partition_until_step,
        engine.zero_optimization_stage(),
        config["zero_optimization"],
    )
    engine.destroy()
    return result


@pytest.mark.parametrize("source", ["dict", "json", "yaml", "omegaconf", "config_params", "args"])
def test_every_form_of_configuration(one_rank: RankGroup, source: str, tmp_path: Path) -> None:
    retain, stage, given = one_rank.run(built_from, source, str(tmp_path))[0]
    assert (retain, stage) == (True, 2)
    assert given["retain_gpu_grad_partition_until_step"] is True, "the caller's dictionary is left as it was"


def stock_with_retain() -> str:
    import deepspeed

    config = Setup(retain=True).deepspeed_config()
    try:
        deepspeed.initialize(model=Layers(), config=config)
    except ValueError as error:
        return str(error)
    build(Setup()).destroy()
    return ""


def test_stock_rejects_the_retain_option(one_rank: RankGroup) -> None:
    assert "retain_gpu_grad_partition_until_step" in one_rank.run(stock_with_retain)[0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"zero_optimization\.stage=0 was asked.*set it to 1, 2 or 3"),
        ({"zero_optimization": {"stage": 0}}, r"stage=0 was asked.*or use plain DDP"),
        ({"zero_optimization": {"stage": 4}}, r"stage=4 was asked.*set it to 1, 2 or 3"),
        ({"zero_optimization": 2}, r"zero_optimization=2 is not allowed: DeepSpeed wants a mapping"),
        ({"zero_optimization": {"stage": 2, "zenflow": {}}}, r"zero_optimization\.zenflow was asked.*remove it"),
        (
            {"zero_optimization": {"stage": 1}, "compile": {"deepcompile": True}},
            r"compile\.deepcompile was asked.*false",
        ),
        ({"zero_optimization": {"stage": 1}, "hybrid_engine": {"enabled": True}}, r"hybrid_engine\.enabled was asked"),
        (
            {"zero_optimization": {"stage": 2, "retain_gpu_grad_partition_until_step": "yes"}},
            r"retain_gpu_grad_partition_until_step='yes' is not allowed: use true, false or 'auto'",
        ),
    ],
)
def test_unsupported_configurations(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        requestzero.initialize(model=Layers(), config=config)


def test_pipeline_modules() -> None:
    PipelineModule = type("PipelineModule", (Layers,), {})
    with pytest.raises(ValueError, match=r"The model is a PipelineModule.*pass a plain torch\.nn\.Module"):
        requestzero.initialize(model=PipelineModule(), config={"zero_optimization": {"stage": 1}})


def real_pipeline() -> str:
    from deepspeed.pipe import PipelineModule

    module = PipelineModule([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], num_stages=1)
    with pytest.raises(ValueError, match=r"The model is a PipelineModule") as error:
        requestzero.initialize(model=module, config={"zero_optimization": {"stage": 1}})
    return str(error.value)


def test_a_real_pipeline_module(one_rank: RankGroup) -> None:
    assert "call deepspeed.initialize for pipelines" in one_rank.run(real_pipeline)[0]


def test_the_arguments_are_those_of_deepspeed() -> None:
    import deepspeed

    ours, stock = (inspect.signature(each).parameters for each in (requestzero.initialize, deepspeed.initialize))
    assert {name: each.default for name, each in ours.items()} == {name: each.default for name, each in stock.items()}


def test_the_configuration_is_given_once() -> None:
    with pytest.raises(ValueError, match="was given in no argument: give it once, as config="):
        requestzero.initialize(model=Layers())
    with pytest.raises(ValueError, match="was given in config, config_params: give it once"):
        requestzero.initialize(model=Layers(), config={}, config_params={})
    with pytest.raises(ValueError, match=r"was given in config, args\.deepspeed_config: give it once"):
        requestzero.initialize(argparse.Namespace(deepspeed_config="x.json"), Layers(), config={})
    with pytest.raises(TypeError, match="unexpected keyword argument 'confg'"):
        requestzero.initialize(model=Layers(), confg={})


# --- reading and merging --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "cannot be read"),
        ("a.yaml", "a: ${b}", "cannot be read: ds cannot be resolved"),
        ("a.json", '{"x": 1, "x": 2}', "the key 'x' stands twice"),
        ("a.json", "[1]", "holds list instead of a mapping"),
        ("a.yaml", "a: [", "cannot be read"),
        ("a.yaml", "- 1", "holds list instead of a mapping"),
        ("a.yaml", "a: 1\na: 2", "cannot be read"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"ds names the file .*{message}"):
        load_config(tmp_path / name, "ds")


def test_missing_file_and_wrong_type(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"ds names the file '.*none\.json', which does not exist"):
        load_config(tmp_path / "none.json", "ds")
    with pytest.raises(ValueError, match="ds is of type list: give a dict, an OmegaConf object, or the path"):
        load_config([1], "ds")


def test_json_with_comments_and_encoded_json(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{\n\t"a": 1  # a comment\n}')
    assert load_config(tmp_path / "a.json") == {"a": 1}
    encoded = base64.urlsafe_b64encode(json.dumps({"zero_optimization": {"stage": 1}}).encode()).decode()
    assert load_config(encoded) == {"zero_optimization": {"stage": 1}}


def test_missing_values() -> None:
    with pytest.raises(ValueError, match=r"ds cannot be resolved: Missing mandatory value: a"):
        load_config(OmegaConf.create({"a": "???"}), "ds")


def test_yaml_reads_exponents_as_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text("optimizer: {params: {lr: 1e-5}}")
    assert load_config(tmp_path / "a.yml") == {"optimizer": {"params": {"lr": 1e-5}}}
    assert load_config(None) == {}


def test_merging() -> None:
    first, second = {"a": {"b": 1}, "c": True}, {"a": {"b": 1, "d": 2}, "c": True}
    merged = merge(Source("the arguments", first), Source("config", second))
    assert merged == {"a": {"b": 1, "d": 2}, "c": True}
    merged["a"]["b"] = 9
    assert first["a"]["b"] == 1
    with pytest.raises(ValueError, match=r"a\.b is 1 in the arguments and 2 in config: set it in one place"):
        merge(Source("the arguments", first), Source("config", {"a": {"b": 2}}))
    with pytest.raises(ValueError, match="c is True in the arguments and 1 in config"):
        merge(Source("the arguments", first), Source("config", {"c": 1}))


@pytest.mark.parametrize("retain", [True, "auto"])
def test_settings_become_deepspeed_keys(retain: bool | str) -> None:
    assert to_config(RequestZeROSettings, {"stage": 1}) == {"zero_optimization": {"stage": 1}}
    settings = RequestZeROSettings(
        offload_optimizer=True, retain_gpu_grad_partition_until_step=retain, grad_accum_dtype="fp32"
    )
    written = ("stage", "offload_optimizer", "retain_gpu_grad_partition_until_step", "grad_accum_dtype")
    assert to_config(RequestZeROSettings, {name: getattr(settings, name) for name in written}) == {
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "retain_gpu_grad_partition_until_step": retain,
        },
        "data_types": {"grad_accum_dtype": "fp32"},
    }


def test_overflow_becomes_deepspeed_keys() -> None:
    assert overflow_to_config(OverflowSettings(), "fp32") == {}
    assert overflow_to_config(OverflowSettings(check_grad_overflow=False), "bf16") == {
        "bf16": {"check_grad_overflow": False}
    }
    assert overflow_to_config(OverflowSettings(check_grad_overflow=True, hysteresis=3), "fp16") == {
        "fp16": {"hysteresis": 3}
    }
    assert overflow_to_config(OverflowSettings(check_grad_overflow=True), "fp32") == {
        "overflow": {"check_grad_overflow": True}
    }
    assert overflow_to_config(OverflowSettings(max_consecutive_skips=3), "bf16") == {
        "overflow": {"max_consecutive_skips": 3}
    }


@pytest.mark.parametrize(
    ("overflow", "precision", "message"),
    [
        (
            {"loss_scale": 8.0},
            "bf16",
            r"overflow\.loss_scale=[48]\.0 \(fp16\.loss_scale\) scales fp16 losses, but the precision is bf16",
        ),
        (
            {"hysteresis": 2},
            "fp32",
            r"overflow\.hysteresis=[24] \(fp16\.hysteresis\) scales fp16 losses, but the precision is fp32",
        ),
        (
            {"check_grad_overflow": False},
            "fp16",
            r"overflow\.check_grad_overflow=False \(bf16.*\) is not possible in fp16",
        ),
    ],
)
def test_overflow_options_that_do_not_apply(overflow: dict[str, Any], precision: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        overflow_to_config(OverflowSettings(**overflow), precision)


def test_a_patch_does_not_nest() -> None:
    import types

    module = types.ModuleType("upstream")
    module.Class = dict  # type: ignore[attr-defined]
    with (
        patched(module, "Class", lambda: {}),
        pytest.raises(RuntimeError, match=r"upstream\.Class is replaced already"),
        patched(module, "Class", lambda: {}),
    ):
        raise AssertionError("unreachable")
    assert module.Class is dict
