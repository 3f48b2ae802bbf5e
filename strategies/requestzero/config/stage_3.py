"""Options with which ZeRO 3 cannot be made request-safe, and those of other stages that have no meaning there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from requestzero.config.nested import section_of

STAGE = 3

_NVME = "keeps what its step needs in files, gradient by gradient: use 'cpu'"
_ZERO_PP = "is ZeRO++, which quantizes what the ranks exchange or partitions it twice"
_OFF = "leave it out"

# Key of zero_optimization -> the reason and the advice.
_REFUSED = {
    "zenflow": ("keeps a gradient path of its own", "remove it (offload_optimizer alone is supported)"),
    "zero_hpz_partition_size": (_ZERO_PP, _OFF),
    "zero_quantized_weights": (_ZERO_PP, _OFF),
    "zero_quantized_nontrainable_weights": (_ZERO_PP, _OFF),
    "zero_quantized_gradients": (_ZERO_PP, _OFF),
    "mics_shard_size": ("is MiCS, which sums over groups of ranks one after another", _OFF),
}
# Values of these keys that ask for nothing; None and False do so for all.
_NOTHING = {"zero_hpz_partition_size": (1,), "mics_shard_size": (-1, 0)}


def check_stage_3(config: Mapping[str, Any], model: Any = None) -> None:
    """Raise ValueError for what the stage-3 optimizer does not do, naming the key, the reason and what to do.

    Args:
        config: a DeepSpeed configuration whose stage is 3.
        model: the module to train, if there is one yet.
    """
    for problem in (*_of_zero(section_of(config, "zero_optimization")), *_of_experts(config, model)):
        raise ValueError(f"{problem}, or call deepspeed.initialize for it.")
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "The model is a module of torch.compile, whose parameters DeepSpeed's stage 3 does not gather: give the "
            "module itself, and call engine.compile(backend=...) afterwards, as Accelerator(dynamo_backend=...) does."
        )


def _of_zero(zero: Mapping[str, Any]) -> Iterator[str]:
    for name in ("offload_optimizer", "offload_param"):
        section = section_of(zero, name)
        if section.get("device") not in (None, "none", "cpu", "auto"):
            yield f"zero_optimization.{name}.device={section['device']!r} was asked, which {_NVME}"
        if section.get("super_offload"):
            yield (
                f"zero_optimization.{name}.super_offload was asked, which runs the step during the backward, in an "
                "optimizer class of its own: set it to false"
            )
    for name, (reason, advice) in _REFUSED.items():
        value = zero.get(name)
        if value not in (None, False, "auto", *_NOTHING.get(name, ())):
            yield f"zero_optimization.{name}={value!r} was asked at stage 3, which {reason}: {advice}"


def _of_experts(config: Mapping[str, Any], model: Any) -> Iterator[str]:
    if section_of(config, "expert_parallel").get("enabled"):
        yield (
            "expert_parallel.enabled was asked at stage 3 (AutoEP), whose experts are cut over ranks of their own: set "
            "it to false"
        )
    modules = model.modules() if hasattr(model, "modules") else ()
    if any(base.__module__ == "deepspeed.moe.layer" for module in modules for base in type(module).__mro__):
        yield (
            "The model has a MoE layer of DeepSpeed's, whose experts stage 3 cuts over ranks of their own: use stage 2"
        )


def check_model_parallelism(mpu: Any) -> None:
    """Raise ValueError where ``mpu`` cuts the model over ranks, whose sub-groups at stage 3 may differ in number.

    Args:
        mpu: a model-parallel unit; one of sequence parallelism alone is allowed.
    """
    for name in ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size"):
        size = getattr(mpu, name)() if hasattr(mpu, name) else 1
        if size > 1:
            raise ValueError(
                f"mpu was given with {size} model-parallel ranks at stage 3, where ranks of different parts of the "
                "model would reduce norms of different numbers of sub-groups: use stage 1 or 2, or call "
                "deepspeed.initialize for it."
            )


def check_parameter_offload(config: Mapping[str, Any]) -> None:
    """Raise ValueError where parameters are to be offloaded at a stage that keeps them whole.

    Args:
        config: a DeepSpeed configuration.
    """
    zero = section_of(config, "zero_optimization")
    device = section_of(zero, "offload_param").get("device")
    if zero.get("stage") != STAGE and device not in (None, "none"):
        raise ValueError(
            f"offload_parameters (zero_optimization.offload_param.device={device!r}) does not apply at stage "
            f"{zero.get('stage')!r}, which keeps weights whole on every device: leave it out, or set stage=3."
        )


def check_combinations(stage: Any, retain: bool | str, rank_dependent_parameters: bool) -> None:
    """Raise ValueError for options of ours that have no meaning at stage 3, if that is the stage."""
    if stage == STAGE:
        for problem in combination_problems(retain, rank_dependent_parameters):
            raise ValueError(problem)


def combination_problems(retain: bool | str, rank_dependent_parameters: bool) -> Iterator[str]:
    """Yield what is wrong with options of ours at stage 3."""
    if retain:
        yield (
            f"zero_optimization.retain_gpu_grad_partition_until_step={retain!r} has no meaning at stage 3, where no "
            "partition is released or reloaded: without CPU offload the sum stays on the device anyway, and with it "
            "the sum is in host memory from its first gradient on. Leave it out."
        )
    if rank_dependent_parameters:
        yield (
            "requestzero.rank_dependent_parameters=True is not possible at stage 3, whose forward gathers the weights "
            "of every module that runs, on all ranks together. Make the modules that only some ranks run, or whichever "
            "encloses them, leaf modules (zero_optimization.leaf_module, or deepspeed.utils.set_z3_leaf_modules): "
            "their weights are gathered as one, and absent gradients are zeros."
        )
