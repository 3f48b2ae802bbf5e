"""Values that a program sets in the plugin after it was built, and what others see of its config."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from requestzero import OverflowSettings, RequestZeROPlugin
from support.accelerate_loops import Loop, data, make_optimizer, train, weights
from support.accelerate_state import fresh, reset
from support.failures import assert_fails
from support.models import RowWeight
from support.ranks import RankGroup
from support.setup import KEEP_OPTIMIZER

RETAIN = "retain_gpu_grad_partition_until_step"
OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, RETAIN: True}}


@pytest.fixture(autouse=True)
def _no_state() -> Any:
    reset()
    yield
    reset()


def set_in(place: str, plugin: Any) -> None:
    """4 requests per update, clipped at 1/2: what public programs set once they have read their arguments."""
    if place == "config":
        plugin.deepspeed_config["gradient_accumulation_steps"] = 4
        plugin.deepspeed_config["gradient_clipping"] = 0.5
    elif place == "another config":
        plugin.deepspeed_config = copy.deepcopy(plugin.deepspeed_config)
        set_in("config", plugin)
    else:
        plugin.gradient_accumulation_steps = 4
        plugin.gradient_clipping = 0.5


def changed(place: str, first: dict[str, Any], when: str) -> tuple[list[float], int, Any]:
    with fresh():
        plugin = RequestZeROPlugin(**first)
        if when == "before":
            set_in(place, plugin)
        accelerator = Accelerator(deepspeed_plugin=plugin)
        if when == "after":
            set_in(place, accelerator.state.deepspeed_plugin)
        model = RowWeight()
        model, optimizer = accelerator.prepare(model, make_optimizer(Loop(), model))
        for row in data(8, 2).view(8, 2, 1, 8)[:, accelerator.process_index]:
            with accelerator.accumulate(model):
                accelerator.backward(model(row))
                optimizer.step()
                optimizer.zero_grad()
        return weights(accelerator, model), accelerator.gradient_accumulation_steps, accelerator.deepspeed_config


@pytest.mark.parametrize(
    ("place", "first", "when"),
    [
        ("config", {}, "after"),
        ("config", {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0}, "after"),
        ("another config", {}, "after"),
        ("attributes", {"gradient_accumulation_steps": 2}, "before"),
    ],
)
def test_what_is_set_before_prepare_is_taken_over(
    two_ranks: RankGroup, place: str, first: dict[str, Any], when: str
) -> None:
    expected = two_ranks.run(train, Loop(plugin=None, n=4, clip=0.5, schedule=False))[0]["updates"][-1]["weights"]
    for found, steps, config in two_ranks.run(changed, place, first, when):
        assert found == pytest.approx(expected, rel=1e-5)
        assert steps == config["gradient_accumulation_steps"] == 4


def set_differently(how: str) -> None:
    with fresh():
        plugin = RequestZeROPlugin()
        accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2 if how == "steps" else 1)
        if how == "steps":
            plugin.deepspeed_config["gradient_accumulation_steps"] = 4
        elif how == "both places":
            plugin.deepspeed_config["gradient_clipping"] = 0.5
            plugin.gradient_clipping = 1.0
        elif how == "stage":
            plugin.deepspeed_config["zero_optimization"]["stage"] = 0
        elif how == "name":
            plugin.deepspeed_config["gradient_cliping"] = 0.5
        else:
            plugin.options = {"normalization": "sum"}
        model = RowWeight()
        accelerator.prepare(model, make_optimizer(Loop(), model))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("steps", "is 4 in the plugin's deepspeed_config, as set after .* and 2 in the Accelerator"),
        ("both places", "gradient_clipping is 0.5 in the plugin's deepspeed_config, .* and 1.0 in the plugin's attrib"),
        ("stage", r"zero_optimization.stage=0 was asked"),
        ("name", "'gradient_cliping' in the plugin's deepspeed_config, .* Did you mean 'gradient_clipping'"),
        ("options", "options of a RequestZeROPlugin was set after the plugin was built"),
    ],
)
def test_what_cannot_be_taken_over_is_told(one_rank: RankGroup, how: str, message: str) -> None:
    assert_fails(one_rank, f"^ValueError: .*{message}", set_differently, how)


def test_every_option_of_ours_is_taken_over() -> None:
    plugin = RequestZeROPlugin()
    plugin.deepspeed_config["zero_optimization"] |= {"offload_optimizer": {"device": "cpu"}, RETAIN: True}
    plugin.deepspeed_config["overflow"] = {"check_grad_overflow": True, "max_consecutive_skips": 3}
    plugin.normalization, plugin.rank_agreement = "sum", False
    plugin.take_over_changes()
    plugin.set_mixed_precision("no")
    assert plugin.engine_options.retain_gpu_grad_partition_until_step is True
    assert plugin.engine_options.rank_agreement is False
    assert plugin.engine_options.overflow.max_consecutive_skips == 3
    assert (plugin.settings.normalization, plugin.offload_optimizer_device) == ("sum", "cpu")
    assert "overflow" not in plugin.deepspeed_config
    assert plugin.hf_ds_config.is_offload()


def test_the_stage_may_become_another() -> None:
    plugin = RequestZeROPlugin()
    plugin.zero_stage, plugin.offload_param_device = 3, "cpu"
    plugin.take_over_changes()
    assert (plugin.settings.stage, plugin.settings.offload_parameters, plugin.zero3_init_flag) == (3, True, True)
    assert plugin.hf_ds_config.is_zero3()
    plugin.zero3_init_flag = False  # nothing to take over
    plan = plugin.plan
    plugin.take_over_changes()
    assert plugin.plan is plan
    assert plugin.zero3_init_flag is False
    plugin.deepspeed_config["zero_optimization"] = {"stage": 1}
    plugin.take_over_changes()
    assert (plugin.zero_stage, plugin.offload_param_device, plugin.zero3_init_flag) == (1, "none", False)


def test_the_overflow_options_follow_a_changed_precision() -> None:
    plugin = RequestZeROPlugin(overflow=OverflowSettings(check_grad_overflow=False))
    plugin.set_mixed_precision("no")
    plugin.deepspeed_config["bf16"] = {"enabled": True}
    plugin.take_over_changes()
    assert plugin.deepspeed_config["bf16"] == {"enabled": True, "check_grad_overflow": False}
    assert plugin.engine_options.overflow.check_grad_overflow is False


def test_building_an_engine_changes_no_plan(one_rank: RankGroup) -> None:
    """The values that ``prepare`` itself puts into the config are none that the program has set."""
    one_rank.run(prepare_twice)


def prepare_twice() -> None:
    with fresh():
        accelerator = Accelerator(deepspeed_plugin=RequestZeROPlugin(), gradient_accumulation_steps=2)
        model = RowWeight()
        accelerator.prepare(model, make_optimizer(Loop(), model))
        plan = accelerator.deepspeed_plugin.plan
        loader = accelerator.prepare(torch.utils.data.DataLoader(data(4, 1), batch_size=2))
        assert len(loader) == 2
        assert accelerator.deepspeed_plugin.plan is plan
        assert (plan.steps, plan.clipping) == (None, None)


def given_on(precision: str) -> dict[str, Any]:
    """A reference model beside the trained one, as TRL makes it: the plugin's config with stage 0."""
    import deepspeed

    with fresh():
        config = {**OFFLOAD, **KEEP_OPTIMIZER, "requestzero": {"rank_agreement": True}}
        plugin = RequestZeROPlugin(
            {**config, "data_types": {"grad_accum_dtype": "fp32"}}, overflow={"on_overflow": "skip"}
        )
        accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision=precision)
        model = RowWeight()
        accelerator.prepare(model, make_optimizer(Loop(), model))
        seen = copy.deepcopy(accelerator.state.deepspeed_plugin.deepspeed_config)
        reference = copy.deepcopy(seen)
        reference["zero_optimization"].pop("offload_optimizer")
        reference["zero_optimization"]["stage"] = 0
        deepspeed.initialize(model=RowWeight(), config=reference)
        assert accelerator.deepspeed_engine_wrapped.engine.options.retain_gpu_grad_partition_until_step is True
        return seen


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_others_see_a_stock_config(two_ranks: RankGroup, precision: str) -> None:
    for seen in two_ranks.run(given_on, precision):
        assert seen["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
        assert not {"overflow", "requestzero"} & seen.keys()


def test_a_config_object_that_is_used_again_keeps_our_keys() -> None:
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    shared = HfTrainerDeepSpeedConfig(OFFLOAD)
    for _ in range(2):
        plugin = RequestZeROPlugin(shared)
        assert RETAIN not in shared.config["zero_optimization"]
        assert plugin.engine_options.retain_gpu_grad_partition_until_step is True
