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


def unmanaged_accumulation_raises() -> Result:
    """``managed_gradient_accumulation: false``: the first backward sets the boundary, which is not allowed then."""
    accelerator = Accelerator()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2},
    }
    accelerator.state.deepspeed_plugin.deepspeed_config.update(config)
    model = torch.nn.Linear(1, 1)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    try:
        accelerator.backward(model(torch.ones(1, 1)).sum())
    except Exception as error:
        return "a backward", f"{type(error).__name__}: {error}"
    return "a backward", "a backward"


FAULTS: list[Callable[[], Result]] = [
    a_yaml_file_is_read_as_json,
    ranks_on_the_cpu_train_alone,
    unmanaged_accumulation_raises,
]


def main(names: list[str]) -> None:
    for fault in FAULTS:
        if names and fault.__name__ not in names:
            continue
        wanted, got = fault()
        if os.environ["RANK"] == "0":
            print(f"{fault.__name__}: {wanted} is right, {got} with Accelerate {accelerate.__version__}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
