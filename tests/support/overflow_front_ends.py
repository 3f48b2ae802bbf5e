"""Every way in which overflow options can be given, each building an engine with them (on this rank).

A front end gets options by their own names and the precision, and returns the engine that they reach.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator

from requestzero import OverflowSettings, RequestZeROPlugin
from requestzero.config import option_record
from support.accelerate_state import fresh
from support.engines import build
from support.fp16 import fp16_on_cpu
from support.lightning_data import Stream
from support.lightning_model import Model
from support.lightning_records import ListLogger
from support.lightning_runs import build_trainer
from support.lightning_spec import Run
from support.models import WIDTH, LossOfRowWeight, RowWeight
from support.recipe_configs import compose_recipe
from support.setup import Setup
from support.trainer import quiet

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-true", "fp16": "16-true"}
FP16_OPTIONS = {
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
}
MIXED = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}

FrontEnd = Callable[[dict[str, Any], str], Any]


def in_deepspeed(options: dict[str, Any], precision: str) -> dict[str, Any]:
    """The options in their places in a DeepSpeed config: upstream's where it has one."""
    config: dict[str, Any] = {}
    for name, value in options.items():
        section = "fp16" if name in FP16_OPTIONS else "overflow"
        if name == "check_grad_overflow" and precision == "bf16":
            section = "bf16"
        config.setdefault(section, {})[name] = value
    return config


def enabled(options: dict[str, Any], precision: str) -> dict[str, Any]:
    config = in_deepspeed(options, precision)
    if precision != "fp32":
        config.setdefault(precision, {})["enabled"] = True
    return config


def initialize(options: dict[str, Any], precision: str) -> Any:
    return build(Setup(config=enabled(options, precision)))


def lightning(precision: str, **arguments: Any) -> Any:
    run = Run(batches=1, schedule=False)
    trainer = build_trainer(
        Run(options=arguments, trainer={"precision": PRECISIONS[precision]}),
        ListLogger(),
        [],
    )
    trainer.fit(Model(run), Stream(run))
    return trainer.strategy.engine


def hydra(options: dict[str, Any], precision: str) -> Any:
    """The strategy that the Lightning recipe builds from its command, with the data and model of the tests."""
    from requestzero.recipes.config_check import config_problems, zero_settings

    # The test's model gives no weights.
    own = [f"precision={precision}", "zero=stage2", "zero.normalization=mean"]
    cfg = compose_recipe(*own, *(f"overflow.{name}={value}" for name, value in options.items()))
    problems = [problem for problem in config_problems(cfg) if problem.startswith("overflow.")]
    if problems:
        raise ValueError("\n".join(problems))
    return lightning(precision, **option_record.values_in(zero_settings(cfg), option_record.FrontEnd.LIGHTNING))


def accelerate(precision: str, environment: dict[str, str] | None = None, **arguments: Any) -> Any:
    with fresh(**environment or {}):
        accelerator = Accelerator(
            deepspeed_plugin=RequestZeROPlugin(**arguments), mixed_precision=None if environment else MIXED[precision]
        )
        model = RowWeight()
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        return accelerator.deepspeed_engine_wrapped.engine


def accelerate_file(options: dict[str, Any], precision: str) -> Any:
    path = Path(tempfile.mkdtemp()) / "ds.yaml"
    path.write_text(json.dumps(in_deepspeed(options, precision)))
    environment = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path), "ACCELERATE_MIXED_PRECISION": MIXED[precision]}
    return accelerate(precision, environment)


def transformers_trainer(options: dict[str, Any], precision: str) -> Any:
    from transformers import Trainer

    from requestzero.transformers import RequestZeROTrainingArguments

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, **enabled(options, precision)}
    with fresh():
        args = RequestZeROTrainingArguments(
            deepspeed=config,
            max_steps=1,
            per_device_train_batch_size=1,
            remove_unused_columns=False,
            bf16=precision == "bf16",
            fp16=precision == "fp16",
            **quiet(),
        )
        trainer = Trainer(LossOfRowWeight(), args, train_dataset=[{"batch": torch.ones(WIDTH)}] * 2)
        trainer.train()
        return trainer.deepspeed


FRONT_ENDS: dict[str, FrontEnd] = {
    "initialize": initialize,
    "Lightning argument": lambda options, precision: lightning(precision, overflow=options),
    "Lightning object": lambda options, precision: lightning(precision, overflow=OverflowSettings(**options)),
    "Lightning config": lambda options, precision: lightning(precision, config=in_deepspeed(options, precision)),
    "Hydra": hydra,
    "Accelerate argument": lambda options, precision: accelerate(precision, overflow=options),
    "Accelerate options": lambda options, precision: accelerate(precision, options={"overflow": options}),
    "Accelerate config": lambda options, precision: accelerate(
        precision, hf_ds_config=in_deepspeed(options, precision)
    ),
    "Accelerate file": accelerate_file,
    "Trainer": transformers_trainer,
}

Effective = dict[str, Any]


def effective(engine: Any) -> Effective:
    """The options and the loss scaler that the engine uses."""
    scaler = engine.optimizer.loss_scaler
    names = ("dynamic", "cur_scale", "scale_window", "delayed_shift", "consecutive_hysteresis", "min_scale")
    return {
        "options": engine.options.overflow,
        "check": engine.optimizer.check_grad_overflow,
        "scaler": {name: getattr(scaler, name, None) for name in names},
    }


@contextmanager
def own_environment() -> Iterator[None]:
    """The environment that a launcher gives a rank; Lightning removes ``WORLD_SIZE`` when a run is over."""
    rank, ranks = str(torch.distributed.get_rank()), str(torch.distributed.get_world_size())
    with patch.dict(os.environ, {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}):
        yield


def through(front_end: str, cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Effective]:
    """By case: ``(precision, options)`` given to the front end."""
    found = {}
    for name, (precision, options) in cases.items():
        with fp16_on_cpu(), own_environment():
            engine = FRONT_ENDS[front_end](options, precision)
            found[name] = effective(engine)
            engine.destroy()
    return found


def refusal(front_end: str, options: dict[str, Any], precision: str) -> str:
    """The error of the front end for options that contradict each other."""
    with fp16_on_cpu(), own_environment():
        try:
            FRONT_ENDS[front_end](options, precision)
        except ValueError as error:
            return str(error)
    return "nothing was raised"
