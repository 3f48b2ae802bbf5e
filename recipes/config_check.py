"""Check a composed configuration before anything is started, and tell all of its problems at once.

Every problem names the full key, what was given and what is allowed. The limits of single values stand in the
schema and in :mod:`requestzero.config.options`.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from requestzero.config.option_record import options_of
from requestzero.config.options import OverflowSettings, RequestZeROSettings
from requestzero.config.precision import PRECISIONS
from requestzero.config.stage_3 import STAGE as STAGE_3
from requestzero.config.stage_3 import combination_problems
from requestzero.recipes.config_schema import RecipeConfig
from requestzero.recipes.devices import choose_devices, count_gpus


def config_problems(cfg: Any) -> list[str]:
    """Return all problems of a composed configuration (an OmegaConf object of ``RecipeConfig``)."""
    checks = (_limits, _zero, _overflow, _model, _data, _optimizer, _trainer)
    return [problem for check in checks for problem in check(cfg)]


def zero_settings(cfg: Any) -> RequestZeROSettings:
    """Return the sections ``zero`` and ``overflow`` as the package's own settings."""
    return RequestZeROSettings(**cfg.zero, overflow=OverflowSettings(**cfg.overflow))


def _limits(cfg: Any) -> Iterator[str]:
    """Yield what is wrong with single values."""
    yield from _wrong_values(cfg)
    for item in dataclasses.fields(RecipeConfig):
        if OmegaConf.is_config(cfg[item.name]):
            yield from _wrong_values(cfg[item.name], f"{item.name}.")


def _wrong_values(section: Any, prefix: str = "") -> Iterator[str]:
    schema: Any = OmegaConf.get_type(section)
    for name, option in options_of(schema).items():
        problem = option.problem(section[name], f"{prefix}{name}")
        if problem:
            yield problem


def _zero(cfg: Any) -> Iterator[str]:
    retain = cfg.zero.retain_gpu_grad_partition_until_step
    if cfg.zero.stage == STAGE_3:
        yield from combination_problems(retain, cfg.zero.rank_dependent_parameters)
        return
    if cfg.zero.offload_parameters:
        yield "zero.offload_parameters=true is not allowed below stage 3: use zero=stage3_offload."
    if retain not in (True, "auto"):
        return
    given = f"zero.retain_gpu_grad_partition_until_step={'true' if retain is True else retain}"
    if not cfg.zero.offload_optimizer:
        yield (
            f"{given} is not allowed without zero.offload_optimizer=true: use zero=stage1_offload or "
            "zero=stage2_offload."
        )
    elif not _sums_16_bits_in_fp32(cfg):
        yield (
            f"{given} with precision.mode={cfg.precision.mode!r} and "
            f"zero.grad_accum_dtype={cfg.zero.grad_accum_dtype!r} has nothing to keep: use a 16-bit precision and "
            "zero.grad_accum_dtype=fp32."
        )


def _sums_16_bits_in_fp32(cfg: Any) -> bool:
    return PRECISIONS.get(cfg.precision.mode) != "fp32" and cfg.zero.grad_accum_dtype == "fp32"


def _overflow(cfg: Any) -> Iterator[str]:
    if not any(_wrong_values(cfg.overflow)):
        yield from OverflowSettings.contradictions(cfg.overflow, PRECISIONS.get(cfg.precision.mode))


def _model(cfg: Any) -> Iterator[str]:
    sizes = {f"model.{name}": cfg.model[name] for name in ("width", "layers", "heads")}
    given = ", ".join(f"{key}={value}" for key, value in sizes.items() if value is not None)
    path = cfg.model.path
    if path is None and None in sizes.values():
        yield (
            f"model.path=null with {given or 'no sizes'} is not allowed: give model.path=..., a directory "
            "with a Hugging Face model, or use model=byte_decoder."
        )
    if path is not None and given:
        yield (
            f"{given} is not allowed with model.path={path!r}, since it sizes the byte-level decoder: use "
            "model=hugging_face with model.path."
        )
    if path is not None and not (Path(path) / "config.json").is_file():
        yield f"model.path={path!r} is not allowed: use a directory that holds a model's config.json."
    if cfg.model.width and cfg.model.heads and cfg.model.width % cfg.model.heads:
        heads = cfg.model.heads
        yield f"model.width={cfg.model.width} is not allowed: use a multiple of model.heads={heads}."


def _data(cfg: Any) -> Iterator[str]:
    path, longest = cfg.data.path, cfg.data.longest_request
    if path is None and longest is None:
        yield "data.path=null is not allowed: give data.path=..., a JSONL file, or use data=pydoc."
    if path is not None and longest is not None:
        yield (
            f"data.longest_request={longest} is not allowed with data.path={path!r}, since it cuts the "
            "embedded text: use data=jsonl with data.path."
        )
    if path is not None and not Path(path).is_file():
        yield f"data.path={path!r} is not allowed: use a JSONL file that exists."
    if path is None and cfg.data.on_long_text != "cut":
        given = f"data.on_long_text={cfg.data.on_long_text!r}"
        yield f"{given} is not allowed with the embedded text, which is cut: use cut."
    yield from _plan(cfg.data)


def _plan(data: Any) -> Iterator[str]:
    if data.requests_per_update is not None and data.tokens_per_update is not None:
        yield (
            f"data.requests_per_update={data.requests_per_update} is not allowed with "
            f"data.tokens_per_update={data.tokens_per_update}: give one of them."
        )
    if data.tokens_per_micro_batch < data.sequence_length:
        yield (
            f"data.tokens_per_micro_batch={data.tokens_per_micro_batch} is not allowed with "
            f"data.sequence_length={data.sequence_length}: a sequence has to fit into a micro-batch."
        )


def _optimizer(cfg: Any) -> Iterator[str]:
    if cfg.optimizer.name != "cpu_adam":
        return
    if not cfg.zero.offload_optimizer:
        yield "optimizer.name='cpu_adam' needs zero.offload_optimizer=true; without it, use optimizer=adamw."
    for tool in ("c++", "ninja"):
        if shutil.which(tool) is None:
            yield f"optimizer.name='cpu_adam' needs {tool}, which is not on the PATH; use optimizer=adamw."


def _trainer(cfg: Any) -> Iterator[str]:
    devices = choose_devices(cfg.trainer)
    if devices.accelerator == "gpu" and devices.devices > count_gpus():
        yield (
            f"trainer.devices={devices.devices} with trainer.accelerator='gpu' is not allowed: there are "
            f"{count_gpus()} GPUs here; use as many at most, or trainer.accelerator=cpu."
        )
    if devices.accelerator == "cpu" and PRECISIONS.get(cfg.precision.mode) == "fp16":
        yield f"precision.mode={cfg.precision.mode!r} is not allowed on CPU: use bf16-true or 32-true."
    if cfg.trainer.resume_from is not None and not Path(cfg.trainer.resume_from).exists():
        yield f"trainer.resume_from={cfg.trainer.resume_from!r} is not allowed: use a checkpoint that exists."
