"""Sources of the settings, values that two of them give, and every configuration that is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import patch_environment
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from omegaconf import OmegaConf

import requestzero.accelerate
from requestzero import OverflowSettings, RequestZeROPlugin
from requestzero.accelerate.engine_config import choose_sizes
from requestzero.accelerate.launch import launched_sources, precision_config
from requestzero.config.files import load_config
from support.accelerate_loops import Loop, make_accelerator, prepare, train
from support.accelerate_state import fresh, reset
from support.failures import assert_fails
from support.ranks import RankGroup
from support.setup import KEEP_OPTIMIZER

GATHER = "stage3_gather_16bit_weights_on_model_save"
RETAIN = "retain_gpu_grad_partition_until_step"
OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


@pytest.fixture(autouse=True)
def _no_state() -> Any:
    reset()
    yield
    reset()


def launched(**variables: Any) -> Any:
    """The environment as ``accelerate launch`` would have set it."""
    names = {
        "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
        "offload": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        "offload_param": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
        "init": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
        "gather": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
        "steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        "clipping": "ACCELERATE_GRADIENT_CLIPPING",
        "precision": "ACCELERATE_MIXED_PRECISION",
        "file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
        "fields": "ACCELERATE_CONFIG_DS_FIELDS",
    }
    return patch_environment(**{names[name]: str(value) for name, value in variables.items()})


def test_defaults_are_those_of_deepspeed_plugin() -> None:
    plugin = RequestZeROPlugin()
    assert (plugin.zero_stage, plugin.offload_optimizer_device) == (2, "none")
    assert plugin.deepspeed_config["zero_optimization"] == {"stage": 2}
    assert plugin.settings.normalization == "mean"
    assert plugin.hf_ds_config.is_zero2()


@pytest.mark.parametrize("form", ["dict", "json", "yaml", "omegaconf", "text", "object"])
def test_every_form_of_a_deepspeed_config(tmp_path: Path, form: str) -> None:
    config = {
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}, RETAIN: True},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    OmegaConf.save(OmegaConf.create(config), tmp_path / "ds.yaml")
    forms = {
        "dict": config,
        "json": str(tmp_path / "ds.json"),
        "yaml": tmp_path / "ds.yaml",
        "omegaconf": OmegaConf.create(config),
        "text": json.dumps(config),
        "object": HfDeepSpeedConfig(config),
    }
    settings = RequestZeROPlugin(forms[form]).settings
    assert (settings.stage, settings.offload_optimizer, settings.grad_accum_dtype) == (1, True, "fp32")
    assert settings.retain_gpu_grad_partition_until_step is True


def test_the_users_config_is_not_changed() -> None:
    config = json.loads(json.dumps(OFFLOAD))
    RequestZeROPlugin(config)
    assert config == OFFLOAD


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_what_accelerate_launch_passes_on(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"ds{suffix}"
    path.write_text(json.dumps({"zero_optimization": {RETAIN: True}, "gradient_clipping": "auto"}))
    with launched(zero_stage=1, offload="cpu", steps=4, clipping=0.5, precision="bf16", file=path):
        plugin = RequestZeROPlugin(options={"normalization": "sum", "overflow": {"check_grad_overflow": False}})
        plugin.set_mixed_precision("bf16")
    assert plugin.settings.stage == 1
    assert plugin.settings.retain_gpu_grad_partition_until_step is True
    assert plugin.settings.normalization == "sum"
    assert (plugin.plan.steps, plugin.plan.clipping) == (4, 0.5)
    assert plugin.deepspeed_config["bf16"] == {"enabled": True, "check_grad_overflow": False}


def test_retain_auto_is_a_value_and_leaves_nothing_to_others(tmp_path: Path) -> None:
    """Unlike ``"auto"`` anywhere else in a config for Accelerate."""
    config = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, RETAIN: "auto"}}
    places: list[dict[str, Any]] = [
        {"hf_ds_config": config},
        {"retain_gpu_grad_partition_until_step": "auto", "offload_optimizer_device": "cpu"},
        {"options": {RETAIN: "auto", "offload_optimizer": True}},
        {"hf_ds_config": config, "options": {RETAIN: "auto"}},
    ]
    for arguments in places:
        assert RequestZeROPlugin(**arguments).engine_options.retain_gpu_grad_partition_until_step == "auto"
    with pytest.raises(ValueError, match=rf"{RETAIN} is True in the arguments .* and 'auto' in hf_ds_config"):
        RequestZeROPlugin(config, retain_gpu_grad_partition_until_step=True)
    with pytest.raises(ValueError, match=rf"{RETAIN}='auto' does not apply without optimizer offload"):
        RequestZeROPlugin(retain_gpu_grad_partition_until_step="auto")


STAGE_3_PLACES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "arguments": ({}, {"zero_stage": 3, "offload_param_device": "cpu", "zero3_save_16bit_model": True}),
    "options": ({}, {"options": {"stage": 3, "offload_parameters": True}, "zero3_save_16bit_model": True}),
    "launch": ({"zero_stage": 3, "offload_param": "cpu", "gather": "true"}, {}),
    "dict": (
        {},
        {"hf_ds_config": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, GATHER: True}}},
    ),
    "auto": (
        {"zero_stage": 3, "offload_param": "cpu", "gather": "true"},
        {"hf_ds_config": {"zero_optimization": {"stage": "auto", "offload_param": {"device": "auto"}, GATHER: "auto"}}},
    ),
}


@pytest.mark.parametrize("place", STAGE_3_PLACES)
def test_stage_3(place: str) -> None:
    launch, arguments = STAGE_3_PLACES[place]
    with launched(**launch):
        plugin = RequestZeROPlugin(**arguments)
    assert (plugin.settings.stage, plugin.settings.offload_parameters) == (3, True)
    assert (plugin.zero_stage, plugin.offload_param_device, plugin.zero3_save_16bit_model) == (3, "cpu", True)
    zero = plugin.deepspeed_config["zero_optimization"]
    assert zero == {"stage": 3, "offload_param": {"device": "cpu"}, GATHER: True}
    assert plugin.zero3_init_flag is True


@pytest.mark.parametrize(
    ("launch", "argument", "stage", "expected"),
    [
        (None, None, 3, True),
        (None, False, 3, False),
        ("false", None, 3, False),
        ("true", None, 2, False),  # as Accelerate does, with a warning
        (None, None, 2, False),
    ],
)
@pytest.mark.filterwarnings("ignore:DeepSpeed Zero3 Init flag is only applicable")
def test_zero3_init_flag(launch: str | None, argument: bool | None, stage: int, expected: bool) -> None:
    with launched(**({} if launch is None else {"init": launch})):
        plugin = RequestZeROPlugin(zero_stage=stage, zero3_init_flag=argument)
    assert plugin.zero3_init_flag is expected


@pytest.mark.parametrize("place", ["file", "dict"])
def test_options_by_their_own_names(tmp_path: Path, place: str) -> None:
    options: Any = {
        "stage": 1,
        "offload_optimizer": True,
        RETAIN: True,
        "grad_accum_dtype": "fp32",
        "overflow": {"loss_scale": 8},
    }
    if place == "file":
        OmegaConf.save(OmegaConf.create(options), tmp_path / "options.yaml")
        options = tmp_path / "options.yaml"
    settings = RequestZeROPlugin(options=options).settings
    assert (settings.stage, settings.offload_optimizer, settings.overflow.loss_scale) == (1, True, 8)
    assert (settings.retain_gpu_grad_partition_until_step, settings.grad_accum_dtype) == (True, "fp32")


def test_places_that_agree_are_accepted(tmp_path: Path) -> None:
    """Stock refuses precision, stage or offload in both of accelerate's YAML and the file that it names."""
    path = tmp_path / "ds.yaml"
    OmegaConf.save(OmegaConf.create({**OFFLOAD, "bf16": {"enabled": True}}), path)
    fields = "deepspeed_config_file,zero_stage,offload_optimizer_device,mixed_precision"
    with launched(zero_stage=2, offload="cpu", precision="bf16", file=path, fields=fields):
        plugin = RequestZeROPlugin(OFFLOAD, zero_stage=2, options={"stage": 2, "offload_optimizer": True})
        plugin.set_mixed_precision("bf16")
    assert plugin.settings.offload_optimizer


def test_auto_gives_way() -> None:
    config = {"zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto"}}}
    assert RequestZeROPlugin(config).settings.offload_optimizer is False
    with launched(offload="cpu", zero_stage=1):
        settings = RequestZeROPlugin(config).settings
    assert (settings.offload_optimizer, settings.stage) == (True, 1)


def test_what_accelerates_own_plugin_writes_is_accepted() -> None:
    from accelerate.utils import DeepSpeedPlugin

    stock = DeepSpeedPlugin(zero_stage=1)
    assert RequestZeROPlugin(stock.hf_ds_config).settings.stage == 1


def test_a_file_of_a_package() -> None:
    config = load_config("pkg://requestzero.configs/accelerate/deepspeed/zero2.yaml", "here")
    assert config["zero_optimization"] == {"stage": 2}


def build(launch: dict[str, Any], precision: str | None = None, **arguments: Any) -> None:
    with launched(**launch):
        plugin = RequestZeROPlugin(**arguments)
        if precision is not None:
            plugin.set_mixed_precision(precision)


CONTRADICTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "stage: launch and argument": (
        {"zero_stage": 1},
        {"zero_stage": 2},
        "zero_optimization.stage is 2 in the arguments of RequestZeROPlugin and 1 in accelerate's zero_stage",
    ),
    "stage: launch and dict": (
        {"zero_stage": 1},
        {"hf_ds_config": OFFLOAD},
        "zero_optimization.stage is 2 in hf_ds_config and 1 in accelerate's zero_stage: set it in one place",
    ),
    "offload: launch and options": (
        {"offload": "none"},
        {"options": {"offload_optimizer": True}},
        "offload_optimizer.device is 'cpu' in the options of RequestZeROPlugin and 'none' in accelerate's offload_opt",
    ),
    "retain: argument and dict": (
        {},
        {RETAIN: False, "hf_ds_config": {"zero_optimization": {RETAIN: True}}},
        f"zero_optimization.{RETAIN} is False in the arguments of RequestZeROPlugin and True in hf_ds_config",
    ),
    "weights offloaded: launch and argument": (
        {"zero_stage": 3, "offload_param": "none"},
        {"offload_param_device": "cpu"},
        "offload_param.device is 'cpu' in the arguments of RequestZeROPlugin and 'none' in accelerate's offload_param_",
    ),
    "16 bits: launch and dict": (
        {"gather": "false"},
        {"hf_ds_config": {"zero_optimization": {"stage": 3, GATHER: True}}},
        f"{GATHER} is True in hf_ds_config and False in accelerate's zero3_save_16bit_model",
    ),
    "init flag": (
        {"zero_stage": 3, "init": "true"},
        {"zero3_init_flag": False},
        "zero3_init_flag is False in the arguments of RequestZeROPlugin and True in accelerate's zero3_init_flag",
    ),
    "clipping": (
        {"clipping": 1.0},
        {"gradient_clipping": 0.5},
        "gradient_clipping is 0.5 in the arguments of RequestZeROPlugin and 1.0 in accelerate's gradient_clipping",
    ),
    "steps": (
        {"steps": 4},
        {"gradient_accumulation_steps": 2},
        "gradient_accumulation_steps is 2 in the arguments .* and 4 in accelerate's gradient_accumulation_steps",
    ),
    "precision: launch and dict": (
        {"precision": "bf16"},
        {"hf_ds_config": {"fp16": {"enabled": True}}},
        "fp16.enabled is True in hf_ds_config and False in accelerate's mixed_precision='bf16'",
    ),
    "precision: no in accelerate's file": (
        {"precision": "no", "fields": "mixed_precision"},
        {"hf_ds_config": {"bf16": {"enabled": True}}},
        "bf16.enabled is True in hf_ds_config and False in accelerate's mixed_precision='no'",
    ),
    "normalization": (
        {},
        {"normalization": "mean", "options": {"normalization": "sum"}},
        "normalization is 'mean' in the arguments of RequestZeROPlugin and 'sum' in the options of RequestZeROPlugin",
    ),
    "overflow: argument and options": (
        {},
        {"overflow": OverflowSettings(loss_scale=2), "options": {"overflow": {"loss_scale": 4}}},
        "overflow.loss_scale is 2 in the arguments of RequestZeROPlugin and 4 in the options of RequestZeROPlugin",
    ),
    "overflow: argument and dict": (
        {},
        {"overflow": {"check_grad_overflow": True}, "hf_ds_config": {"bf16": {"check_grad_overflow": False}}},
        "bf16.check_grad_overflow is True in the arguments of RequestZeROPlugin and False in hf_ds_config",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_two_values_are_an_error_that_names_both_places(name: str) -> None:
    launch, arguments, message = CONTRADICTIONS[name]
    with pytest.raises(ValueError, match=message):
        build(launch, **arguments)


def test_the_named_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ds.yaml"
    OmegaConf.save(OmegaConf.create(OFFLOAD), path)
    with pytest.raises(ValueError, match=f"is 1 in accelerate's zero_stage and 2 in the DeepSpeed file '{path}'"):
        build({"zero_stage": 1, "file": path})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stage 0": ({"zero_stage": 0}, "zero_optimization.stage=0 was asked"),
    "nvme": ({"offload_optimizer_device": "nvme"}, "offload_optimizer.device='nvme' does not apply"),
    "nvme at stage 3": ({"zero_stage": 3, "offload_optimizer_device": "nvme"}, "device='nvme' was asked, .* use 'cpu'"),
    "nvme path": ({"zero_stage": 3, "offload_param_nvme_path": "/x"}, "offload_param_nvme_path='/x' does not apply"),
    "weights on nvme": ({"zero_stage": 3, "offload_param_device": "nvme"}, "offload_param.device='nvme' was asked"),
    "parameters": ({"offload_param_device": "cpu"}, "offload_param in the arguments .* belongs to ZeRO stage 3; leave"),
    "parameters in options": ({"options": {"offload_parameters": True}}, "offload_param in the options .* stage 3"),
    "zero3_init_flag": ({"zero3_init_flag": True}, "zero3_init_flag=True does not apply at stage 2, .* set zero_stage"),
    "16 bits": (
        {"zero3_save_16bit_model": True},
        "stage3_gather_16bit_weights_on_model_save in the arg.* to ZeRO stage",
    ),
    "retain at stage 3": ({"zero_stage": 3, RETAIN: True}, f"{RETAIN}=True has no meaning at stage 3"),
    "rank-dependent parameters at stage 3": (
        {"zero_stage": 3, "rank_dependent_parameters": True},
        "rank_dependent_parameters=True is not possible at stage 3, .*leaf modules",
    ),
    "zero++": ({"hf_ds_config": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}}, "=2 was asked"),
    "msamp": ({"enable_msamp": True}, "enable_msamp=True does not apply"),
    "a stage 3 key": ({"hf_ds_config": {"zero_optimization": {"stage3_max_live_parameters": 1}}}, "stage 3"),
    "a misspelt section": ({"hf_ds_config": {"zero_optimisation": {}}}, "Did you mean 'zero_optimization'"),
    "a misspelt key": ({"hf_ds_config": {"zero_optimization": {"stge": 2}}}, "is no ZeRO option .* mean 'stage'"),
    "zenflow": ({"hf_ds_config": {"zero_optimization": {"zenflow": {}}}}, "zero_optimization.zenflow was asked"),
    "unmanaged": (
        {"hf_ds_config": {"managed_gradient_accumulation": False}},
        "managed_gradient_accumulation=False in hf_ds_config is not possible",
    ),
    "retain without offload": ({RETAIN: True}, f"{RETAIN}=True does not apply without optimizer offload"),
    "an unknown option": ({"options": {"normalisation": "sum"}}, "is no option: .* Did you mean 'normalization'"),
    "drop": (
        {"options": {"incomplete_window": "drop"}},
        r"'incomplete_window' in the options .* The training loop decides .* step\(\) or zero_grad\(\)",
    ),
    "a wrong option": ({"options": {"stage": "two"}}, "stage='two' is not allowed: use one of 1, 2"),
    "a wrong dtype": ({"grad_accum_dtype": "fp8"}, "grad_accum_dtype='fp8' is not allowed"),
    "a wrong normalization": ({"normalization": "median"}, "normalization='median' is not allowed"),
    "wrong steps": (
        {"gradient_accumulation_steps": 0},
        "gradient_accumulation_steps=0 is not allowed: give the number",
    ),
    "wrong clipping": ({"gradient_clipping": -1.0}, "gradient_clipping=-1.0 is not allowed: give the largest norm"),
    "text that is no JSON": ({"hf_ds_config": "{stage: 2"}, "hf_ds_config is text that is no JSON"),
    "another type": ({"hf_ds_config": 2}, "hf_ds_config is of type int"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused(name: str) -> None:
    arguments, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        RequestZeROPlugin(**arguments)


def test_a_file_that_does_not_exist() -> None:
    with pytest.raises(FileNotFoundError, match=r"accelerate's deepspeed_config_file names the file 'nowhere.yaml'"):
        build({"file": "nowhere.yaml"})
    with pytest.raises(FileNotFoundError, match="and there is no package 'no_such_package'"):
        load_config("pkg://no_such_package/x.yaml", "here")


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"zero_stage": "two"}, "ZERO_STAGE='two' is not allowed: accelerate's zero_stage has to be a number"),
        (
            {"init": "maybe", "zero_stage": 3},
            "ZERO3_INIT='maybe' is not allowed: .* zero3_init_flag has to be",
        ),
        ({"gather": "2", "zero_stage": 3}, "accelerate's zero3_save_16bit_model has to be true or false"),
        ({"offload_param": "cpu"}, "zero_optimization.offload_param in accelerate's offload_param_device does not"),
        (
            {"fields": "deepspeed_config_file,overflow"},
            "'overflow' stands under deepspeed_config in accelerate's config file, which accelerate does not pass on",
        ),
        ({"precision": "fp8"}, "mixed_precision='fp8' is not possible here: use no, bf16 or fp16"),
    ],
)
def test_launched_values_that_are_refused(launch: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(launch)


def test_precision_of_the_accelerator_against_the_config() -> None:
    message = (
        "fp16.enabled is True in hf_ds_config, but the Accelerator has mixed_precision='bf16': set the precision in one"
    )
    with pytest.raises(ValueError, match=message):
        build({}, precision="bf16", hf_ds_config={"fp16": {"enabled": True}})
    with pytest.raises(ValueError, match=r"bf16.enabled is True in accelerate's mixed_precision='bf16', but the Acc"):
        build({"precision": "bf16"}, precision="no")
    with pytest.raises(
        ValueError, match=r"overflow.loss_scale=2 \(fp16.loss_scale\) scales fp16 losses, but the precision is bf16"
    ):
        build({}, precision="bf16", overflow={"loss_scale": 2})
    build({}, precision="no", hf_ds_config={"bf16": {"enabled": True}})  # nobody has said "no"


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs compute in fp16")
def test_fp16_where_deepspeed_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor without fp16 arithmetic."""
    monkeypatch.setattr("deepspeed.accelerator.cpu_accelerator.CPU_Accelerator.is_fp16_supported", lambda self: False)
    with pytest.raises(ValueError, match="fp16 is not possible on cpu, where DeepSpeed refuses it"):
        build({}, precision="fp16")


def test_precision_config() -> None:
    assert precision_config("fp16") == {"bf16": {"enabled": False}, "fp16": {"enabled": True}}
    assert launched_sources({"ACCELERATE_MIXED_PRECISION": "no"}) == []


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("requestzero.accelerate.plugin.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'needs transformers.* pip install "requestzero\[accelerate\]"'):
        RequestZeROPlugin()


def test_what_would_leave_deepspeed_out() -> None:
    with pytest.raises(ValueError, match=r"Accelerator\(cpu=True\) makes Accelerate leave DeepSpeed out"):
        Accelerator(cpu=True, deepspeed_plugin=RequestZeROPlugin())
    with patch_environment(ACCELERATE_USE_CPU="true"), pytest.raises(ValueError, match="unset it"):
        RequestZeROPlugin()


def test_a_state_that_was_made_too_early() -> None:
    PartialState()
    message = "PartialState was made before the RequestZeROPlugin and knows 1 process, but there are 2"
    with patch_environment(WORLD_SIZE="2"), pytest.raises(RuntimeError, match=message):
        RequestZeROPlugin()


def test_an_unknown_name_of_the_package() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Plugin'"):
        _ = requestzero.accelerate.Plugin


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"train_batch_size": 12}, "train_batch_size=12 is not what 2 sequences .* 4 micro-batches .* 2 ranks make"),
        ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu=0 is not allowed"),
    ],
)
def test_sizes_that_do_not_fit(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_sizes(config, [torch.utils.data.DataLoader([1], batch_size=2)], True, 4, 2)


def test_sizes() -> None:
    loaders = [torch.utils.data.DataLoader([1], batch_size=size) for size in (2, 8)]
    assert choose_sizes({}, loaders, True, 4, 2).total == 16
    assert choose_sizes({}, loaders, False, 4, 2).total == 64
    assert choose_sizes({"train_batch_size": 24}, [], True, 4, 2).micro == 3
    assert choose_sizes({"train_micro_batch_size_per_gpu": "auto"}, [], True, 4, 2).micro == 1


def steps(plugin: dict[str, Any], n: int, launched_steps: int | None) -> int:
    environment = {} if launched_steps is None else {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(launched_steps)}
    with fresh(**environment):
        return make_accelerator(Loop(plugin=plugin, n=n)).gradient_accumulation_steps


def test_steps_come_from_any_place(two_ranks: RankGroup) -> None:
    assert two_ranks.run(steps, {"hf_ds_config": {"gradient_accumulation_steps": 4}}, 1, None) == [4, 4]
    assert two_ranks.run(steps, {"hf_ds_config": {"gradient_accumulation_steps": "auto"}}, 3, None) == [3, 3]
    assert two_ranks.run(steps, {}, 1, 4) == [4, 4]
    assert two_ranks.run(steps, {}, 4, 4) == [4, 4]
    assert_fails(two_ranks, r"^ValueError: .* is 2 in Accelerator\(...\) and 4 in accelerate's", steps, {}, 2, 4)
    given = {"gradient_accumulation_steps": 4}
    assert_fails(two_ranks, "^ValueError: .* is 4 in the arguments .* and 2 in the Accel", steps, given, 2, None)


def test_steps_of_the_file_make_the_window(two_ranks: RankGroup) -> None:
    for ours in two_ranks.run(train, Loop(plugin={"hf_ds_config": {"gradient_accumulation_steps": 4}})):
        assert len(ours["updates"]) == 2


def wrong_objects(how: str) -> None:
    with fresh():
        if how == "counterpart":
            prepare(Loop(plugin={"offload_optimizer_device": "cpu"}))
        if how == "batch size":
            prepare(Loop(plugin={"hf_ds_config": {"train_batch_size": 7}}))
        accelerator = make_accelerator(Loop())
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        if how == "model alone":
            accelerator.prepare(model)
        accelerator.prepare(model, optimizer)
        accelerator.prepare(torch.nn.Linear(1, 1), optimizer)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("counterpart", "With optimizer offload Accelerate replaces SGD by DeepSpeedCPUAdam, another optimizer"),
        ("batch size", "train_batch_size=7 is not what 1 sequences"),
        ("model alone", r"accelerator.prepare\(\) got 1 model\(s\) and 0 optimizer\(s\)"),
        ("second model", r"This Accelerator has prepared a model already, and its backward\(\) would go on"),
    ],
)
def test_objects_that_cannot_be_prepared(two_ranks: RankGroup, how: str, message: str) -> None:
    assert_fails(two_ranks, f"^ValueError: {message}", wrong_objects, how)


def test_the_config_is_restored_after_a_failure() -> None:
    from requestzero.accelerate.engine_config import engine_config

    config: dict[str, Any] = {"train_batch_size": "auto", "zero_optimization": {"stage": 2}}
    sizes = choose_sizes({}, [], True, 1, 1)

    def fail() -> None:
        with engine_config(config, sizes, None):
            assert "train_batch_size" not in config
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert config == {"train_batch_size": "auto", "zero_optimization": {"stage": 2}}


def test_nothing_is_left_in_the_environment() -> None:
    before = dict(os.environ)
    RequestZeROPlugin(KEEP_OPTIMIZER)
    assert dict(os.environ) == before
