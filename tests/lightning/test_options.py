"""Every option of ``RequestZeRO``: where it goes, and what is refused."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry
from omegaconf import OmegaConf

from requestzero import OverflowSettings
from requestzero.config.options import RequestZeROSettings
from requestzero.config.removed_keys import removed_sections
from requestzero.lightning import RequestZeRO
from requestzero.lightning.options import DEFAULTS, LOSS_SCALE_OPTIONS, NOT_APPLICABLE, OWN_OPTIONS

NEBULA = re.escape(removed_sections().get("nebula", "DeepSpeed has removed it; leave it out."))


def trainer(strategy: RequestZeRO, **options: Any) -> Trainer:
    return Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, **options)


@pytest.mark.parametrize(
    ("name", "stage", "offload"),
    [
        ("request_zero_1", 1, False),
        ("request_zero_2", 2, False),
        ("request_zero_1_offload", 1, True),
        ("request_zero_2_offload", 2, True),
    ],
)
def test_registered_names(name: str, stage: int, offload: bool) -> None:
    strategy = StrategyRegistry.get(name)
    assert isinstance(strategy, RequestZeRO)
    assert (strategy.settings.stage, strategy.settings.offload_optimizer) == (stage, offload)
    assert isinstance(Trainer(accelerator="cpu", devices=1, strategy=name, logger=False).strategy, RequestZeRO)


def test_registering_twice_changes_nothing() -> None:
    before = StrategyRegistry.available_strategies()
    RequestZeRO.register_strategies(StrategyRegistry)
    assert StrategyRegistry.available_strategies() == before


def test_defaults_are_lightnings() -> None:
    """Without arguments, the DeepSpeed config is what Lightning's strategy writes for the same stage.

    But for ``pin_memory=False``: DeepSpeed pins the host gradient where nobody says otherwise.
    """
    assert RequestZeRO().config == DeepSpeedStrategy(stage=2).config
    ours, lightnings = RequestZeRO(1, True).config, DeepSpeedStrategy(stage=1, offload_optimizer=True).config
    assert ours is not None
    assert lightnings is not None
    assert lightnings["zero_optimization"]["offload_optimizer"].pop("pin_memory") is False
    assert ours == lightnings
    asked = RequestZeRO(1, True, pin_memory=False).config
    assert asked is not None
    assert asked["zero_optimization"]["offload_optimizer"]["pin_memory"] is False


@pytest.mark.parametrize("form", ["dict", "omegaconf", "json", "yaml"])
def test_config_is_merged_with_arguments(form: str, tmp_path: Path) -> None:
    content = {
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 1,
            "offload_optimizer": {"pin_memory": True},
            "round_robin_gradients": True,
            "retain_gpu_grad_partition_until_step": True,
        },
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    config: Any = content
    if form == "omegaconf":
        config = OmegaConf.create(content)
    elif form in ("json", "yaml"):
        config = tmp_path / f"ds.{form}"
        config.write_text(json.dumps(content) if form == "json" else OmegaConf.to_yaml(OmegaConf.create(content)))
    strategy = RequestZeRO(offload_optimizer=True, overlap_comm=False, reduce_bucket_size=1000, config=config)
    assert strategy.config is not None
    zero = strategy.config["zero_optimization"]
    assert zero["stage"] == 1
    assert zero["offload_optimizer"]["device"] == "cpu"
    assert zero["offload_optimizer"]["pin_memory"] is True
    assert zero["round_robin_gradients"] is True
    assert zero["retain_gpu_grad_partition_until_step"] is True
    assert (zero["overlap_comm"], zero["reduce_bucket_size"], zero["reduce_scatter"]) == (False, 1000, True)
    assert strategy.config["zero_force_ds_cpu_optimizer"] is False
    settings = strategy.settings
    assert (settings.stage, settings.offload_optimizer, settings.grad_accum_dtype) == (1, True, "fp32")
    assert settings.retain_gpu_grad_partition_until_step is True


def test_config_from_the_environment_is_merged_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 1}}')
    monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(path))
    assert RequestZeRO(overlap_comm=False).settings.stage == 1
    path.write_text('{"zero_optimization": {"overlap_comm": true}}')
    message = r"overlap_comm is False in the arguments.*the file in \$PL_DEEPSPEED_CONFIG_PATH"
    with pytest.raises(ValueError, match=message):
        RequestZeRO(overlap_comm=False)


def test_retain_auto_as_an_argument_and_in_config() -> None:
    offload = {"offload_optimizer": True, "grad_accum_dtype": "fp32"}
    config = {"zero_optimization": {"retain_gpu_grad_partition_until_step": "auto"}}
    for strategy in (
        RequestZeRO(retain_gpu_grad_partition_until_step="auto", **offload),
        RequestZeRO(config=config, **offload),
    ):
        assert strategy.settings.retain_gpu_grad_partition_until_step == "auto"
        assert strategy.config is not None
        assert strategy.config["zero_optimization"]["retain_gpu_grad_partition_until_step"] == "auto"


def test_offload_in_config_alone() -> None:
    config = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    strategy = RequestZeRO(pin_memory=True, retain_gpu_grad_partition_until_step=True, config=config)
    assert strategy.settings.offload_optimizer is True
    assert strategy.config is not None
    assert strategy.config["zero_optimization"]["offload_optimizer"]["pin_memory"] is True


def test_equal_values_in_two_places() -> None:
    strategy = RequestZeRO(
        stage=1,
        grad_accum_dtype="fp32",
        loss_scale=128.0,
        overflow={"loss_scale": 128},
        config={
            "zero_optimization": {"stage": 1},
            "data_types": {"grad_accum_dtype": "fp32"},
            "gradient_accumulation_steps": 1,
            "fp16": {"loss_scale": 128},
        },
    )
    assert strategy.settings.overflow == OverflowSettings(loss_scale=128.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, r"stage=4 is not allowed: use one of 1, 2, 3"),
        ({"stage": 0}, r"stage=0 is not allowed"),
        ({"normalization": "tokens"}, r"normalization='tokens' is not allowed: use one of 'mean', 'sum', 'token'"),
        (
            {"incomplete_window": "keep"},
            r"incomplete_window='keep' is not allowed: use one of 'step', 'drop'",
        ),
        ({"grad_accum_dtype": "float"}, r"grad_accum_dtype='float' is not allowed"),
        ({"offload_optimizer": "cpu"}, r"offload_optimizer='cpu' is not allowed: use true or false"),
        (
            {"retain_gpu_grad_partition_until_step": "always"},
            r"retain_gpu_grad_partition_until_step='always' is not allowed: use true, false or 'auto'",
        ),
        (
            {"retain_gpu_grad_partition_until_step": "auto"},
            r"retain_gpu_grad_partition_until_step='auto' does not apply without optimizer offload",
        ),
        ({"overflow": {"check": True}}, r"overflow\.check is not an option"),
        ({"pin_memory": True}, r"pin_memory=True does not apply without optimizer offload"),
        (
            {"retain_gpu_grad_partition_until_step": True},
            r"retain_gpu_grad_partition_until_step=True does not apply without optimizer offload",
        ),
        ({"config": {"zero_optimization": {"stage": 0}}}, r"zero_optimization\.stage=0 was asked"),
        (
            {"config": {"zero_optimization": True}},
            r"zero_optimization=True in config is not allowed: give a mapping",
        ),
        ({"config": {"bf16": True}}, r"bf16=True in config is not allowed: give a mapping"),
        (
            {"config": {"bfloat16": {"enabled": True}}},
            r"'bfloat16' in config is no key of a DeepSpeed config",
        ),
        (
            {"stage": 1, "config": {"zero_optimization": {"stage": 2}}},
            r"zero_optimization\.stage is 1 in the arguments of RequestZeRO and 2 in config",
        ),
        (
            {
                "offload_optimizer": True,
                "config": {"zero_optimization": {"offload_optimizer": {"device": "none"}}},
            },
            r"offload_optimizer\.device is 'cpu' in the arguments of RequestZeRO and 'none' in config",
        ),
        (
            {"overlap_comm": False, "config": {"zero_optimization": {"overlap_comm": True}}},
            r"zero_optimization\.overlap_comm is False in the arguments of RequestZeRO and True in config",
        ),
        (
            {
                "offload_optimizer": True,
                "retain_gpu_grad_partition_until_step": True,
                "config": {"zero_optimization": {"retain_gpu_grad_partition_until_step": False}},
            },
            r"retain_gpu_grad_partition_until_step is True in the arguments .* and False in config",
        ),
        (
            {"loss_scale": 2.0, "overflow": {"loss_scale": 4.0}},
            r"loss_scale is 2\.0 as an argument of RequestZeRO and 4\.0 in overflow",
        ),
        (
            {"overflow": {"hysteresis": 3}, "config": {"fp16": {"hysteresis": 4}}},
            r"fp16\.hysteresis is 3 in overflow and 4 in config",
        ),
        (
            {"config": {"gradient_accumulation_steps": 2}},
            r"gradient_accumulation_steps in config must be 1.*accumulate_grad_batches",
        ),
        (
            {"config": {"managed_gradient_accumulation": False}},
            r"managed_gradient_accumulation=False in config is not possible",
        ),
        ({"config": {"train_batch_size": 8}}, r"train_batch_size=8 in config is decided by the data loader"),
        (
            {"config": {"gradient_cliping": 1.0}},
            r"'gradient_cliping' in config is no key .* Did you mean 'gradient_clipping'\?",
        ),
        (
            {"config": {"zero_optimization": {"overlap_com": True}}},
            r"zero_optimization\.overlap_com in config is no ZeRO option .*\. Did you mean 'overlap_comm'\?",
        ),
        (
            {"config": {"zero_optimization": {"reduce_bucket_size": "auto"}}},
            r"zero_optimization\.reduce_bucket_size='auto'",
        ),
        (
            {"config": {"zero_optimization": {"stage3_max_live_parameters": 1}}},
            r"stage3_max_live_parameters in config does not apply",
        ),
        (
            {"config": {"zero_optimization": {"offload_param": {"device": "cpu"}}}},
            r"offload_param in config does not apply",
        ),
        (
            {"config": {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}},
            r"offload_optimizer\.device='nvme' does not apply",
        ),
        (
            {"config": {"zero_optimization": {"reduce_bucket_size": -1}}},
            r"zero_optimization\.reduce_bucket_size=-1 in config is not allowed",
        ),
        (
            {"config": {"zero_optimization": {"retain_gpu_grad_partition_until_step": True}}},
            r"retain_gpu_grad_partition_until_step=True does not apply without optimizer offload",
        ),
        (
            {"config": {"zero_optimization": {"offload_optimizer": {"pin_memory": True}}}},
            r"zero_optimization\.offload_optimizer=\{'pin_memory': True\} names no device",
        ),
        (
            {"stage": 2, "config": {"zero_optimization": {"stage": 1}}},
            r"zero_optimization\.stage is 2 in the arguments of RequestZeRO and 1 in config",
        ),
        (
            {"offload_optimizer": False, "config": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}},
            r"offload_optimizer\.device is 'none' in the arguments of RequestZeRO and 'cpu' in config",
        ),
        (
            {"overlap_comm": True, "config": {"zero_optimization": {"overlap_comm": False}}},
            r"zero_optimization\.overlap_comm is True in the arguments of RequestZeRO and False in config",
        ),
        (
            {
                "retain_gpu_grad_partition_until_step": False,
                "offload_optimizer": True,
                "config": {"zero_optimization": {"retain_gpu_grad_partition_until_step": True}},
            },
            r"retain_gpu_grad_partition_until_step is False in the arguments .* and True in config",
        ),
        (
            {"loss_scale": 0, "overflow": {"loss_scale": 4.0}},
            r"loss_scale is 0 as an argument of RequestZeRO and 4\.0 in overflow",
        ),
        (
            {"config": {"data_types": {"grad_acum_dtype": "fp32"}}},
            r"data_types\.grad_acum_dtype in config is no option .* Did you mean 'grad_accum_dtype'\?",
        ),
        (
            {"config": {"activation_checkpointing": {"partitioned_activations": True}}},
            r"activation_checkpointing\.partitioned_activations in config .* Did you mean 'partition_activations'\?",
        ),
        (
            {"config": {"fp16": {"loss_scale_windw": 10}}},
            r"fp16\.loss_scale_windw in config is no option .* Did you mean 'loss_scale_window'\?",
        ),
        (
            {"config": {"bf16": {"check_overflow": False}}},
            r"bf16\.check_overflow in config is no option .* Did you mean 'check_grad_overflow'\?",
        ),
        ({"config": {"nebula": {}}}, f"'nebula' in config is not possible: {NEBULA}"),
        (
            {"config": {"zero_optimization": {"mics_shard_size": 2}}},
            r"zero_optimization\.mics_shard_size in config is not possible: MiCS ZeRO-3 sharding has been removed",
        ),
        ({"config": 3}, r"config is of type int"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RequestZeRO(**options)


def test_missing_config_file() -> None:
    with pytest.raises(FileNotFoundError, match=r"config names the file '/no/such.json', which does not exist"):
        RequestZeRO(config="/no/such.json")


def test_unknown_option() -> None:
    with pytest.raises(TypeError, match=r"has no option 'overlap_com': .* Did you mean 'overlap_comm'\?"):
        RequestZeRO(overlap_com=True)
    with pytest.raises(TypeError, match=r"its own \(.*rank_agreement.*\).* Did you mean 'rank_agreement'\?"):
        RequestZeRO(rank_agrement=False)


def another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 2 if isinstance(value, (int, float)) else "nvme"


def test_no_option_of_deepspeed_strategy_is_ignored() -> None:
    """Each of its options either changes the strategy or its DeepSpeed config, or is refused with a reason."""
    plain = RequestZeRO(offload_optimizer=True)
    checked = 0
    for name, default in DEFAULTS.items():
        if name in NOT_APPLICABLE:
            with pytest.raises(ValueError, match=rf"{name}=.* does not apply: "):
                RequestZeRO(**{name: another(default)})
        elif name in LOSS_SCALE_OPTIONS:
            changed = RequestZeRO(**{name: another(default)})
            assert getattr(changed.settings.overflow, name) == another(default)
        elif default is None or not isinstance(default, (bool, int, float, str)):
            continue  # objects that Lightning's base class stores
        elif name == "logging_level":
            continue  # goes to DeepSpeed's logger, see below
        elif name == "logging_batch_size_per_gpu":
            changed = RequestZeRO(logging_batch_size_per_gpu=3)
            assert changed.config is not None
            assert changed.config["train_micro_batch_size_per_gpu"] == 3
        elif name == "exclude_frozen_parameters":
            assert RequestZeRO(exclude_frozen_parameters=True).exclude_frozen_parameters is True
        else:
            changed = RequestZeRO(offload_optimizer=True, **{name: another(default)})
            assert changed.config != plain.config, name
        checked += 1
    assert checked > 25


def test_logging_level_reaches_deepspeed() -> None:
    from deepspeed.utils import logger

    RequestZeRO(logging_level=logging.ERROR)
    assert logger.level == logging.ERROR
    RequestZeRO()
    assert logger.level == logging.WARNING


def all_arguments() -> dict[str, Any]:
    """Arguments that LightningCLI passes where the user gives none."""
    own = inspect.signature(RequestZeRO.__init__).parameters
    simple = {name: value for name, value in DEFAULTS.items() if name not in ("precision_plugin", "accelerator")}
    return {**{name: own[name].default for name in OWN_OPTIONS}, **simple}


def test_an_argument_that_is_not_given_gives_way_to_config() -> None:
    config = {"zero_optimization": {"stage": 1, "overlap_comm": False, "offload_optimizer": {"device": "cpu"}}}
    for arguments in ({}, all_arguments()):
        strategy = RequestZeRO(**{**arguments, "config": config})
        assert (strategy.settings.stage, strategy.settings.offload_optimizer) == (1, True)
        assert strategy.config is not None
        assert strategy.config["zero_optimization"]["overlap_comm"] is False
    with pytest.raises(ValueError, match=r"overlap_comm is True in config|overlap_comm is .* and True in config"):
        RequestZeRO(
            **{**all_arguments(), "overlap_comm": False, "config": {"zero_optimization": {"overlap_comm": True}}}
        )


class Derived(RequestZeRO):
    """A constructor of its own, which passes the default of ``stage`` on."""

    def __init__(self, level: int = 2, **options: Any) -> None:
        super().__init__(stage=level, **options)


def test_constructor_of_a_derived_class() -> None:
    assert Derived(config={"zero_optimization": {"stage": 1}}).settings.stage == 1
    assert Derived(1, reduce_bucket_size=8).settings.stage == 1
    with pytest.raises(ValueError, match=r"stage is 1 in the arguments of RequestZeRO and 2 in config"):
        Derived(1, config={"zero_optimization": {"stage": 2}})


def test_strategy_can_be_copied() -> None:
    strategy = copy.deepcopy(RequestZeRO(1, overlap_comm=False))
    assert (strategy.settings.stage, strategy.config) == (1, RequestZeRO(1, overlap_comm=False).config)


def test_positional_order() -> None:
    strategy = RequestZeRO(1, True, True, "fp32", "sum", {"check_grad_overflow": False}, {"gradient_clipping": 2})
    assert strategy.settings == RequestZeROSettings(
        stage=1,
        offload_optimizer=True,
        retain_gpu_grad_partition_until_step=True,
        grad_accum_dtype="fp32",
        normalization="sum",
        overflow=OverflowSettings(check_grad_overflow=False),
    )
    assert strategy.config is not None
    assert strategy.config["gradient_clipping"] == 2


CLIPPING = r"gradient_clipping={} in config is not allowed: use the largest norm"
BUCKET = r"use a whole number above 0, in elements"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"gradient_clipping": -1.0}}, CLIPPING.format(r"-1\.0")),
        ({"config": {"gradient_clipping": "1"}}, CLIPPING.format("'1'")),
        ({"config": {"gradient_clipping": True}}, CLIPPING.format("True")),
        (
            {"config": {"communication_data_type": "float32"}},
            r"communication_data_type='float32' in config is not allowed: use 'fp16', 'bf16' or 'fp32'",
        ),
        (
            {"config": {"seq_parallel_communication_data_type": 32}},
            r"seq_parallel_communication_data_type=32 in config is not allowed",
        ),
        ({"config": {"data_types": {"param_dtype": "fp8"}}}, r"data_types\.param_dtype='fp8' in config is not allowed"),
        ({"config": {"fp16": {"hysteresis": "two"}}}, r"fp16\.hysteresis='two' in config is not allowed"),
        ({"config": {"bf16": {"enabled": "perhaps"}}}, r"bf16\.enabled='perhaps' in config is not allowed"),
        (
            {"config": {"zero_optimization": {"overlap_comm": "perhaps"}}},
            r"zero_optimization\.overlap_comm='perhaps' in config is not allowed",
        ),
        (
            {"config": {"zero_optimization": {"allgather_bucket_size": 7}}},
            r"zero_optimization\.allgather_bucket_size=7 in config is not allowed: use an even whole number",
        ),
        (
            {"config": {"zero_optimization": {"allgather_bucket_size": 0}}},
            r"zero_optimization\.allgather_bucket_size=0 in config is not allowed",
        ),
        ({"overlap_comm": 1}, r"overlap_comm=1 is not allowed: use true or false"),
        ({"partition_activations": "yes"}, r"partition_activations='yes' is not allowed: use true or false"),
        ({"reduce_bucket_size": 0}, r"reduce_bucket_size=0 is not allowed: " + BUCKET),
        ({"reduce_bucket_size": 2e8}, r"reduce_bucket_size=200000000\.0 is not allowed: " + BUCKET),
        ({"allgather_bucket_size": 7}, r"allgather_bucket_size=7 is not allowed: use an even whole number"),
        ({"logging_batch_size_per_gpu": 0}, r"logging_batch_size_per_gpu=0 is not allowed"),
    ],
)
def test_values_are_checked_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RequestZeRO(**options)


def test_values_as_deepspeed_reads_them() -> None:
    """Not refused: its own spellings."""
    config = {
        "communication_data_type": "FP32",
        "gradient_clipping": 0,
        "data_types": {"param_dtype": "bfloat16"},
        "zero_optimization": {"reduce_bucket_size": 5e8},
    }
    assert RequestZeRO(config=config).config is not None


@pytest.mark.parametrize(
    ("precision", "options", "message"),
    [
        (
            "32-true",
            {"initial_scale_power": 8},
            r"overflow\.initial_scale_power=8 \(fp16\.initial_scale_power\) scales fp16 losses, but the precision is "
            r"fp32",
        ),
        (
            "bf16-true",
            {"overflow": {"loss_scale": 4.0}},
            r"overflow\.loss_scale=[48]\.0 \(fp16\.loss_scale\) scales fp16 losses, but the precision is bf16",
        ),
        (
            "bf16-mixed",
            {"config": {"fp16": {"hysteresis": 4}}},
            r"overflow\.hysteresis=[24] \(fp16\.hysteresis\) scales fp16 losses",
        ),
        (
            "32-true",
            {"config": {"bf16": {"enabled": True}}},
            r"bf16\.enabled is True in config, but the Trainer has",
        ),
        ("bf16-true", {"config": {"bf16": {"enabled": False}}}, r"bf16\.enabled is False in config"),
        ("bf16-true", {"config": {"fp16": {"enabled": True}}}, r"fp16\.enabled is True in config"),
        (
            "32-true",
            {"retain_gpu_grad_partition_until_step": True, "offload_optimizer": True, "grad_accum_dtype": "fp32"},
            r"does nothing with Trainer\(precision='32-true'\) .* needs fp32 accumulation on a 16-bit model",
        ),
        (
            "bf16-true",
            {"retain_gpu_grad_partition_until_step": True, "offload_optimizer": True},
            r"does nothing with Trainer\(precision='bf16-true'\) and grad_accum_dtype=None: it needs",
        ),
        ("16-true", {}, r"precision='16-true'\) is not possible on cpu, where DeepSpeed refuses fp16"),
        ("16-mixed", {}, r"precision='16-mixed'\) is not possible on cpu"),
        ("64-true", {}, r"precision='64-true'.*is not supported"),
    ],
)
def test_refused_with_this_precision(
    precision: Any, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepspeed.accelerator.cpu_accelerator.CPU_Accelerator.is_fp16_supported", lambda self: False)
    with pytest.raises(ValueError, match=message):
        trainer(RequestZeRO(**options), precision=precision)


def test_precision_sections() -> None:
    strategy = RequestZeRO(overflow={"check_grad_overflow": False})
    trainer(strategy, precision="bf16-true")
    assert strategy.config is not None
    assert strategy.config["bf16"] == {"enabled": True, "check_grad_overflow": False}


def test_fp16_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.accelerator.cpu_accelerator.CPU_Accelerator.is_fp16_supported", lambda self: True)
    strategy = RequestZeRO(initial_scale_power=8, overflow={"hysteresis": 3}, config={"fp16": {"min_loss_scale": 2}})
    trainer(strategy, precision="16-mixed")
    assert strategy.config is not None
    assert strategy.config["fp16"] == {
        "enabled": True, "initial_scale_power": 8, "hysteresis": 3, "min_loss_scale": 2
    }  # fmt: skip


def test_device_without_deepspeed() -> None:
    strategy = RequestZeRO(parallel_devices=[torch.device("meta")], cluster_environment=LightningEnvironment())
    with pytest.raises(ValueError, match=r"runs on CUDA and CPU, but the Trainer's device is 'meta'"):
        strategy._configure_launcher()


def test_foreign_precision_plugin() -> None:
    with pytest.raises(ValueError, match=r"MixedPrecision cannot be the precision plugin of RequestZeRO"):
        trainer(RequestZeRO(), plugins=[MixedPrecision("bf16-mixed", "cpu")])
