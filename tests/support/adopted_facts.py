"""A program that builds plugins in every way, started by ``run/`` in one process; it prints what it finds as JSON."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import os
import pickle
from typing import Any

import torch

assert importlib.util.find_spec("accelerate") is not None  # as transformers does, long before it imports it

from accelerate import Accelerator, DeepSpeedPlugin  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402


class Named(DeepSpeedPlugin):
    def greet(self) -> str:
        return "hello"


@dataclasses.dataclass
class More(DeepSpeedPlugin):
    more: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.constructed = self.zero_stage


def is_safe(plugin: Any) -> list[Any]:
    return [type(plugin).__name__, hasattr(plugin, "plan"), isinstance(plugin, DeepSpeedPlugin), plugin.zero_stage]


def arguments_of(deepspeed: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(output_dir="out", report_to=[], use_cpu=True, deepspeed=deepspeed)


def main() -> dict[str, Any]:
    config = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 1}
    named, more = Named(zero_stage=1), More(zero_stage=2, more=4, gradient_accumulation_steps=2)
    again = more.again({"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 3})
    facts: dict[str, Any] = {
        "plain": is_safe(DeepSpeedPlugin()),
        "by position": is_safe(DeepSpeedPlugin(config)),
        "stage 3": is_safe(DeepSpeedPlugin(zero_stage=3)),
        "stage 3 again": is_safe(DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 3}})),
        "NVMe": is_safe(DeepSpeedPlugin(zero_stage=3, offload_param_device="nvme", offload_param_nvme_path="/nvme")),
        "stage 0": is_safe(DeepSpeedPlugin(zero_stage=0)),
        "subclass": [*is_safe(named), isinstance(named, Named), named.greet()],
        "dataclass": [*is_safe(more), isinstance(more, More), more.more, more.constructed],
        "again": [*is_safe(again), again.more, again.gradient_accumulation_steps],
        "fields": [len(dataclasses.fields(DeepSpeedPlugin)), "options" in dataclasses.asdict(DeepSpeedPlugin())],
        "copied": is_safe(copy.deepcopy(more)),
        "pickled": is_safe(pickle.loads(pickle.dumps(DeepSpeedPlugin()))),
    }
    for name, stage in (("arguments", 2), ("arguments of stage 3", 3)):
        given = arguments_of({**config, "zero_optimization": {"stage": stage}})
        facts[name] = is_safe(given.deepspeed_plugin)
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    accelerator = Accelerator(deepspeed_plugins={"a": DeepSpeedPlugin(config), "b": DeepSpeedPlugin(zero_stage=3)})
    model = torch.nn.Linear(1, 1)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    facts["engine"] = [type(model).__name__, isinstance(accelerator, Accelerator)]
    return facts


if __name__ == "__main__":
    print("FACTS", json.dumps(main()))
