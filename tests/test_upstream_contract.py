"""Every upstream method that is overridden or relied on: it exists, and its source is the one that was read.

After an upgrade of DeepSpeed, Lightning, Accelerate or Transformers a failure here names what to read again. To accept
a new source, run ``python tests/test_upstream_contract.py`` and commit the new ``upstream_contract.json`` with the
reading done.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

PINS = Path(__file__).parent / "upstream_contract.json"

# What is relied on without being overridden, by module.
RELIED_ON = {
    "deepspeed": ["initialize"],
    "deepspeed.runtime.engine": [
        "DeepSpeedEngine._backward_prologue",
        "DeepSpeedEngine._backward_post_hook",
        "DeepSpeedEngine._take_model_step",
        "DeepSpeedEngine.no_sync",
        "DeepSpeedEngine._flush_coalesced_reduction_zero12",
        "DeepSpeedEngine.get_data_types",
        "DeepSpeedEngine.set_gradient_accumulation_boundary",
    ],
    "deepspeed.runtime.zero.stage_1_and_2": [
        "DeepSpeedZeroOptimizer.__init__",
        "DeepSpeedZeroOptimizer.allreduce_and_scatter",
        "DeepSpeedZeroOptimizer.allreduce_no_retain",
        "DeepSpeedZeroOptimizer._add_full_reduction_to_compact_grad_partition",
        "DeepSpeedZeroOptimizer.process_gradients",
        "DeepSpeedZeroOptimizer._use_compact_grad_partition_buffer",
        "DeepSpeedZeroOptimizer._get_compact_grad_partition_buffer",
        "DeepSpeedZeroOptimizer._wait_for_offload_copies",
        "DeepSpeedZeroOptimizer._record_offload_copy",
        "DeepSpeedZeroOptimizer.initialize_optimizer_states",
        "DeepSpeedZeroOptimizer._muon_update_lacks_loss_scale",
        "DeepSpeedZeroOptimizer._commit_muon_momentum",
        "DeepSpeedZeroOptimizer.get_grad_position",
        "DeepSpeedZeroOptimizer._average_expert_grad_norms",
        "DeepSpeedZeroOptimizer.gradient_reduction_w_predivide",
        "DeepSpeedZeroOptimizer.allreduce_bucket",
        "DeepSpeedZeroOptimizer._release_ipg_buffers",
        "DeepSpeedZeroOptimizer.clear_backward_seen_flag",
        "DeepSpeedZeroOptimizer._set_loss_scale",
        "DeepSpeedZeroOptimizer.get_param_id",
        "DeepSpeedZeroOptimizer.get_gradient_for_reduction",
        "DeepSpeedZeroOptimizer.get_param_gradient_attribute",
        "DeepSpeedZeroOptimizer.clear_grad_attribute",
        "DeepSpeedZeroOptimizer._record_gradient_stream",
        "DeepSpeedZeroOptimizer._is_muon_group",
        "DeepSpeedZeroOptimizer._model_parallel_all_reduce",
        "DeepSpeedZeroOptimizer.offload_states",
        "DeepSpeedZeroOptimizer.reload_states",
        "DeepSpeedZeroOptimizer._gradient_reduction_buffer_dtype",
        "GradPartitionBufferGroup",
        "IPGBucket",
    ],
    "deepspeed.runtime.zero.offload_config": ["DeepSpeedZeroOffloadOptimizerConfig"],
    "deepspeed.accelerator.abstract_accelerator": ["DeepSpeedAccelerator.is_pinned"],
    "deepspeed.accelerator.cuda_accelerator": [
        "CUDA_Accelerator.available_memory",
        "CUDA_Accelerator.memory_reserved",
        "CUDA_Accelerator.total_memory",
    ],
    "deepspeed.runtime.base_optimizer": ["BackwardHookStateManager", "ZeROOptimizer.get_param_comm_dtype"],
    "deepspeed.utils.tensor_fragment": ["get_full_hp_grad", "set_full_hp_grad", "tensor_fragment.get_lp_grad_fragment"],
    "deepspeed.utils.mixed_precision_linkage": ["link_hp_params", "_init_lp_to_hp_mapping"],
    "deepspeed.runtime.zero.utils": ["get_norm_dtype"],
    "deepspeed.runtime.utils": ["is_invalid_grad_norm"],
    "deepspeed.runtime.fp16.loss_scaler": ["LossScalerBase.update_scale", "DynamicLossScaler.update_scale"],
    "lightning.pytorch.loops.training_epoch_loop": [
        "_TrainingEpochLoop.advance",
        "_TrainingEpochLoop.reset",
        "_TrainingEpochLoop._num_ready_batches_reached",
    ],
    "lightning.pytorch.loops.optimization.automatic": [
        "_AutomaticOptimization._optimizer_step",
        "_AutomaticOptimization._training_step",
    ],
    "lightning.pytorch.plugins.precision": ["Precision._after_closure"],
    "lightning.pytorch.strategies": [
        "DDPStrategy.setup_environment",
        "DeepSpeedStrategy._create_default_config",
        "DeepSpeedStrategy._format_batch_size_and_grad_accum_config",
        "DeepSpeedStrategy._initialize_deepspeed_train",
        "DeepSpeedStrategy.init_deepspeed",
    ],
    "lightning.fabric.strategies.deepspeed": ["_format_precision_config"],
    "lightning.pytorch.trainer.connectors.accelerator_connector": [
        "_AcceleratorConnector._lazy_init_strategy",
        "_AcceleratorConnector._check_and_init_precision",
    ],
    "lightning.pytorch.trainer.call": ["_interrupt"],
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector": [
        "_LoggerConnector.log_metrics",
        "_LoggerConnector.on_batch_end",
    ],
    "lightning.pytorch.trainer.connectors.logger_connector.result": ["_ResultCollection.metrics"],
    "lightning.pytorch.callbacks": ["ModelCheckpoint.on_train_batch_end"],
    "lightning.pytorch.core.optimizer": ["LightningOptimizer.step"],
    "accelerate": [
        "Accelerator.__init__",
        "Accelerator.prepare",
        "Accelerator.backward",
        "Accelerator._do_sync",
        "Accelerator.save_state",
        "Accelerator.load_state",
        "Accelerator.free_memory",
    ],
    "accelerate.data_loader": ["DataLoaderShard.__iter__"],
    "accelerate.state": [
        "PartialState.__init__",
        "PartialState._prepare_backend",
        "AcceleratorState.__init__",
        "AcceleratorState.select_deepspeed_plugin",
        "GradientState._set_sync_gradients",
    ],
    "accelerate.optimizer": ["AcceleratedOptimizer"],
    "accelerate.scheduler": ["AcceleratedScheduler.__init__", "AcceleratedScheduler.step"],
    "accelerate.utils.deepspeed": ["HfDeepSpeedConfig", "map_pytorch_optim_to_deepspeed"],
    "accelerate.utils": [
        "DeepSpeedPlugin.__post_init__",
        "DeepSpeedPlugin.deepspeed_config_process",
        "DeepSpeedPlugin.fill_match",
    ],
    "accelerate.utils.launch": ["prepare_deepspeed_cmd_env"],
    "accelerate.commands.launch": ["launch_command"],
    "transformers": [
        "Trainer.training_step",
        "Trainer._run_epoch",
        "Trainer._clip_grad_norm",
        "Trainer._get_grad_norm",
        "TrainingArguments.__post_init__",
    ],
    "transformers.integrations.deepspeed": ["HfTrainerDeepSpeedConfig", "deepspeed_init"],
}


UPSTREAM = ("deepspeed", "lightning", "accelerate", "transformers")


def overridden() -> dict[str, Any]:
    """Upstream functions that our classes define again, found by walking the classes: none can be forgotten."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    found = {}
    for cls in _our_classes():
        upstream = [base for base in cls.__mro__ if base.__module__.split(".")[0] in UPSTREAM]
        for name in vars(cls):
            owner = next((base for base in upstream if name in vars(base)), None)
            if owner is None or (name.startswith("__") and name != "__init__"):
                continue
            value, key = vars(owner)[name], f"{owner.__module__}:{owner.__qualname__}.{name}"
            parts = {"": getattr(value, "__func__", value)}
            if isinstance(value, property):
                parts = {"": value.fget, ".setter": value.fset, ".deleter": value.fdel}
            for suffix, function in parts.items():
                written = (
                    inspect.isfunction(function) and function.__code__.co_filename != "<string>"
                )  # not a dataclass's
                if written and "<lambda>" not in function.__qualname__:
                    found[key + suffix] = function
    return found


def _our_classes() -> list[type]:
    modules = []
    for package in ("requestzero.zero", "requestzero.lightning", "requestzero.accelerate", "requestzero.transformers"):
        folder = Path(str(importlib.import_module(package).__file__)).parent
        modules += [f"{package}.{path.stem}" for path in folder.glob("*.py") if path.stem != "__init__"]
    return [
        value
        for name in sorted(modules)
        for value in vars(importlib.import_module(name)).values()
        if inspect.isclass(value) and value.__module__ == name
    ]


def relied_on() -> dict[str, Any]:
    found = {}
    for module, names in RELIED_ON.items():
        for name in names:
            value: Any = importlib.import_module(module)
            for part in name.split("."):
                value = getattr(value, part)
            found[f"{module}:{name}"] = inspect.unwrap(value) if inspect.isfunction(value) else value
    return found


def fingerprint(value: Any) -> dict[str, str]:
    source = inspect.getsource(value)
    # A default that is a bare object shows where it lies in memory.
    signature = re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))
    return {"signature": signature, "sha256": hashlib.sha256(source.encode()).hexdigest()}


def current() -> dict[str, dict[str, str]]:
    return {name: fingerprint(value) for name, value in sorted((overridden() | relied_on()).items())}


def test_pinned_sources_are_unchanged() -> None:
    pinned, now = json.loads(PINS.read_text()), current()
    assert len(now) > 40
    assert sorted(now) == sorted(pinned), "overridden or relied-on methods and their pins differ"
    changed = [f"{name}: {now[name]}" for name in now if now[name] != pinned[name]]
    assert not changed, "upstream has changed; read it again:\n" + "\n".join(changed)


@pytest.mark.parametrize("name", ["independent_gradient_partition_epilogue", "get_flat_partition", "step"])
def test_the_walk_finds_overrides(name: str) -> None:
    assert f"deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.{name}" in overridden()


def test_the_walk_finds_property_setters() -> None:
    name = "deepspeed.runtime.engine:DeepSpeedEngine.communication_data_type"
    assert {name, f"{name}.setter"} <= overridden().keys()


if __name__ == "__main__":
    PINS.write_text(json.dumps(current(), indent=1) + "\n")
