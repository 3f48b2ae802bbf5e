"""Faults of Accelerate's DeepSpeed path, each with the smallest script that shows it. requestzero is not used.

export DS_ACCELERATOR=cpu ACCELERATE_USE_DEEPSPEED=true
torchrun --nproc-per-node 2 tests/upstream_faults/accelerate_faults.py ranks_on_the_cpu_train_alone
torchrun --nproc-per-node 1 tests/upstream_faults/accelerate_faults.py
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DummyOptim, DummyScheduler

# An operator for inference, which would be compiled for a minute where ranks are joined on the CPU.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

Result = tuple[Any, Any]
"""What is right, and what was measured."""


def a_yaml_file_is_read_as_json() -> Result:
    """``DeepSpeedPlugin(hf_ds_config="ds.yaml")``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ds.yaml")
        path.write_text("zero_optimization:\n  stage: 2\n")
        try:
            stage: Any = DeepSpeedPlugin(hf_ds_config=str(path)).zero_stage
        except Exception as error:
            stage = f"{type(error).__name__}: {error}"
    return 2, stage


def ranks_on_the_cpu_train_alone() -> Result:
    """On the CPU no backend is found, and every rank is a training of its own."""
    return int(os.environ["WORLD_SIZE"]), Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2)).num_processes


def prepared(**config: Any) -> tuple[Accelerator, Any, Any]:
    """Return an Accelerator with this DeepSpeed config, a weight that begins at 0, and SGD with a rate of 1."""
    accelerator = Accelerator()
    accelerator.state.deepspeed_plugin.deepspeed_config.update(
        {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 2},
            **config,
        }
    )
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))


def unmanaged_accumulation_raises() -> Result:
    """``managed_gradient_accumulation: false``: the first backward sets the boundary, which is not allowed then."""
    accelerator, model, _ = prepared(managed_gradient_accumulation=False)
    try:
        accelerator.backward(model(torch.ones(1, 1)).sum())
    except Exception as error:
        return "a backward", f"{type(error).__name__}: {error}"
    return "a backward", "a backward"


def clip_grad_norm_clips_nothing() -> Result:
    """``accelerator.clip_grad_norm_(parameters, 0.5)`` of a gradient of 4: the update that follows."""
    accelerator, model, optimizer = prepared(gradient_clipping=0.0)
    accelerator.backward(model(torch.full((1, 1), 4.0)).sum())
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return -0.5, round(float(model.module.weight.detach()), 4)


def the_default_warmup_is_refused() -> Result:
    """A ``DummyScheduler`` without ``warmup_num_steps``, for a scheduler of the DeepSpeed config."""
    accelerator = Accelerator()
    params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    accelerator.state.deepspeed_plugin.deepspeed_config.update(
        {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": params},
        }
    )
    model = torch.nn.Linear(1, 1)
    optimizer = DummyOptim(model.parameters(), lr=0.5)
    try:
        accelerator.prepare(model, optimizer, DummyScheduler(optimizer))
    except Exception as error:
        return "a scheduler", f"{type(error).__name__}: {error}"
    return "a scheduler", "a scheduler"


FAULTS: list[Callable[[], Result]] = [
    a_yaml_file_is_read_as_json,
    ranks_on_the_cpu_train_alone,
    unmanaged_accumulation_raises,
    clip_grad_norm_clips_nothing,
    the_default_warmup_is_refused,
]


def main(names: list[str]) -> None:
    for fault in FAULTS:
        if names and fault.__name__ not in names:
            continue
        AcceleratorState._reset_state()  # what an earlier one has put into the config
        wanted, got = fault()
        if os.environ["RANK"] == "0":
            print(f"{fault.__name__}: {wanted} is right, {got} with Accelerate {accelerate.__version__}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
