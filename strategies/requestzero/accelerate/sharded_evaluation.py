"""Evaluation of a model that is sharded already (stage 3), before an engine that trains it.

Its weights are gathered by the hooks of an engine without an optimizer, DeepSpeed's own, which makes way for training.
"""

from __future__ import annotations

from typing import Any

import torch

from requestzero.accelerate.process_group import process_group
from requestzero.config.nested import Config
from requestzero.zero.process_group import without_inference_operator

_ENGINE = "_requestzero_evaluation_engine"
_SECTIONS = ("zero_optimization", "fp16", "bf16")


def is_sharded(model: torch.nn.Module) -> bool:
    """Return true for a model that was built under ``zero.Init``: every rank has a part of each weight."""
    return any(hasattr(param, "ds_id") for param in model.parameters())


def evaluate_sharded(trainer: Any) -> None:
    """Let forwards of a ``Trainer``'s model gather its weights (collective)."""
    if hasattr(trainer, _ENGINE):
        return
    import deepspeed

    theirs = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    config: Config = {"train_micro_batch_size_per_gpu": 1}
    config.update({name: theirs[name] for name in _SECTIONS if name in theirs})
    with process_group(), without_inference_operator():
        engine, *_ = deepspeed.initialize(model=trainer.model, config=config, model_parameters=[])
    setattr(trainer, _ENGINE, engine)
    trainer.accelerator._models.append(trainer.model)


def end_evaluation_of_sharded(trainer: Any) -> None:
    """Undo what :func:`evaluate_sharded` has done."""
    if hasattr(trainer, _ENGINE):
        getattr(trainer, _ENGINE).destroy()
        delattr(trainer, _ENGINE)
