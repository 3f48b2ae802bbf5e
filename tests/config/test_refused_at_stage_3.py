"""What stage 3 cannot make request-safe is refused before anything is built, by its key, with reason and advice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import requestzero
from support.failures import assert_fails
from support.ranks import RankGroup

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"offload_optimizer": {"device": "nvme"}}, r"offload_optimizer\.device='nvme' was asked.*in files.*use 'cpu'"),
    ({"offload_param": {"device": "nvme"}}, r"offload_param\.device='nvme' was asked.*in files.*use 'cpu'"),
    ({"offload_optimizer": {"device": "cpu", "super_offload": True}}, r"super_offload was asked.*set it to false"),
    ({"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, r"offload_optimizer\.ratio=0\.5 was asked \(Twin-Flow\)"),
    ({"zenflow": {}}, r"zero_optimization\.zenflow=\{\} was asked at stage 3.*gradient path of its own: remove it"),
    ({"mics_shard_size": 2}, r"mics_shard_size=2 was asked at stage 3, which is MiCS.*leave it out"),
    ({"zero_hpz_partition_size": 2}, r"zero_hpz_partition_size=2 was asked at stage 3, which is ZeRO\+\+"),
    ({"zero_quantized_weights": True}, r"zero_quantized_weights=True was asked at stage 3, which is ZeRO\+\+"),
    ({"zero_quantized_nontrainable_weights": True}, r"zero_quantized_nontrainable_weights=True.*ZeRO\+\+"),
    ({"zero_quantized_gradients": True}, r"zero_quantized_gradients=True was asked at stage 3, which is ZeRO\+\+"),
    ({"retain_gpu_grad_partition_until_step": True}, r"=True has no meaning at stage 3.*in host memory.*Leave it out"),
    ({"retain_gpu_grad_partition_until_step": "auto"}, r"='auto' has no meaning at stage 3"),
]


@pytest.mark.parametrize(("zero", "message"), REFUSED)
def test_keys(zero: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        requestzero.initialize(model=torch.nn.Linear(1, 1), config={"zero_optimization": {"stage": 3, **zero}})


SECTIONS: list[tuple[dict[str, Any], str]] = [
    ({"expert_parallel": {"enabled": True}}, r"expert_parallel\.enabled was asked at stage 3 \(AutoEP\).*false"),
    (
        {"requestzero": {"rank_dependent_parameters": True}},
        r"rank_dependent_parameters=True is not possible at stage 3.*leaf modules \(zero_optimization\.leaf_module",
    ),
    ({"compile": {"deepcompile": True}}, r"compile\.deepcompile was asked"),
]


@pytest.mark.parametrize(("sections", "message"), SECTIONS)
def test_sections(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        requestzero.initialize(model=torch.nn.Linear(1, 1), config={"zero_optimization": {"stage": 3}, **sections})


def test_layers_of_experts() -> None:
    layer = type("MoE", (torch.nn.Module,), {"__module__": "deepspeed.moe.layer"})
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), layer())
    with pytest.raises(ValueError, match=r"has a MoE layer of DeepSpeed's, whose experts.*use stage 2"):
        requestzero.initialize(model=model, config={"zero_optimization": {"stage": 3}})


def test_compiled_modules() -> None:
    model = torch.nn.Linear(1, 1)
    compiled = type("OptimizedModule", (torch.nn.Module,), {"_orig_mod": model})()
    with pytest.raises(ValueError, match=r"is a module of torch\.compile, .*give the module itself.*engine\.compile"):
        requestzero.initialize(model=compiled, config={"zero_optimization": {"stage": 3}})


def test_pipelines() -> None:
    model = type("PipelineModule", (torch.nn.Module,), {})()
    with pytest.raises(ValueError, match="The model is a PipelineModule"):
        requestzero.initialize(model=model, config={"zero_optimization": {"stage": 3}})


class ModelParallel:
    def get_model_parallel_world_size(self) -> int:
        return 2


def test_model_parallelism() -> None:
    with pytest.raises(ValueError, match=r"mpu was given with 2 model-parallel ranks at stage 3.*use stage 1 or 2"):
        requestzero.initialize(
            model=torch.nn.Linear(1, 1), config={"zero_optimization": {"stage": 3}}, mpu=ModelParallel()
        )


def cut_over_one_rank() -> None:
    from requestzero.zero.stage_3.layout import check_one_group

    world = torch.distributed.group.WORLD
    alone = [torch.distributed.new_group([rank]) for rank in range(2)][torch.distributed.get_rank()]
    check_one_group([world], torch.distributed.new_group([0, 1]))
    check_one_group([world, alone], world)


def test_parameters_that_are_cut_over_other_ranks(two_ranks: RankGroup) -> None:
    message = r"^ValueError: A parameter is cut over the ranks \[[01]\], and the data-parallel ranks are \[0, 1\]:"
    assert_fails(two_ranks, message, cut_over_one_rank)
