"""Configurations in which the request-safe optimizer cannot work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from requestzero.config.nested import section_of
from requestzero.config.stage_3 import STAGE as STAGE_3
from requestzero.config.stage_3 import check_stage_3


def check_supported(config: Mapping[str, Any], model: Any = None) -> None:
    """Raise ValueError where the configuration asks for something that the request-safe optimizer does not do.

    Args:
        config: a DeepSpeed configuration.
        model: the module to train, if there is one yet.
    """
    zero = section_of(config, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in (1, 2, 3):
        raise ValueError(
            f"zero_optimization.stage={stage!r} was asked, and requestzero makes stages 1, 2 and 3 request-safe: "
            "set it to 1, 2 or 3, or use plain DDP."
        )
    if stage == STAGE_3:
        check_stage_3(config, model)
    if zero.get("zenflow") is not None:
        raise ValueError(
            "zero_optimization.zenflow was asked, which keeps a gradient path of its own: remove it "
            "(offload_optimizer alone is supported), or call deepspeed.initialize for ZenFlow."
        )
    ratio = section_of(zero, "offload_optimizer").get("ratio")
    if ratio not in (None, 1, "auto"):
        raise ValueError(
            f"zero_optimization.offload_optimizer.ratio={ratio!r} was asked (Twin-Flow), which DeepSpeed reads at "
            "stage 3 only, where it leaves a part of the optimizer on the accelerator, to an AdamW of its own: that "
            "follows no learning-rate schedule, and no checkpoint has its state. Leave it out, which offloads "
            "everything, or call deepspeed.initialize for it."
        )
    if section_of(config, "compile").get("deepcompile"):
        raise ValueError(
            "compile.deepcompile was asked, which reduces gradients inside compiled graphs: set it to false, or call "
            "deepspeed.initialize for DeepCompile."
        )
    if section_of(config, "hybrid_engine").get("enabled"):
        raise ValueError(
            "hybrid_engine.enabled was asked, which is an engine class of its own: set it to false, or call "
            "deepspeed.initialize for the hybrid engine."
        )
    if any(base.__name__ == "PipelineModule" for base in type(model).__mro__):
        raise ValueError(
            "The model is a PipelineModule, whose engine owns the micro-batch schedule: pass a plain "
            "torch.nn.Module, or call deepspeed.initialize for pipelines."
        )


def wants_offload(config: Mapping[str, Any]) -> bool:
    """Return true if a DeepSpeed config asks for optimizer offload.

    Raises:
        ValueError: to another device than the CPU, or without naming one, where DeepSpeed would not offload.
    """
    section = config.get("zero_optimization", {}).get("offload_optimizer")
    if isinstance(section, Mapping) and "device" not in section:
        raise ValueError(
            f"zero_optimization.offload_optimizer={dict(section)!r} names no device, which DeepSpeed takes for no "
            "offload: set zero_optimization.offload_optimizer.device to 'cpu', or leave the section out."
        )
    device = section["device"] if isinstance(section, Mapping) else section
    if device not in (None, "none", "cpu"):
        raise ValueError(
            f"zero_optimization.offload_optimizer.device={device!r} does not apply: requestzero offloads the optimizer "
            "to 'cpu' only."
        )
    return device == "cpu"
