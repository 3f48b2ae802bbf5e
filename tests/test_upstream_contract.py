"""Every upstream method that is overridden or relied on: it exists, and its source is the one that was read.

After an upgrade of DeepSpeed, Lightning, Accelerate, Transformers or PyTorch a failure here names what to read again.
To accept a new source, run ``python tests/test_upstream_contract.py`` and commit the new ``upstream_contract.json``
with the reading done. It prints how many entries each of the five has. Then run ``python tests/matrix/record.py``,
which writes down the entries of DeepSpeed for the check at the first use.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from pkgutil import walk_packages

import pytest

from requestzero.environment.proved_sources import proved_sources
from support.deepspeed_stubs import entries
from support.upstream_source import find, read

PINS = Path(__file__).parent / "upstream_contract.json"

# What is relied on without being overridden, by the module that defines it. For DeepSpeed the stubs say that.
RELIED_ON = {
    "lightning.pytorch.loops.training_epoch_loop": [
        "_TrainingEpochLoop.advance",
        "_TrainingEpochLoop.reset",
        "_TrainingEpochLoop._num_ready_batches_reached",
    ],
    "lightning.pytorch.loops.optimization.automatic": [
        "_AutomaticOptimization._optimizer_step",
        "_AutomaticOptimization._training_step",
    ],
    "lightning.pytorch.plugins.precision.precision": [
        "Precision._after_closure",
    ],
    "lightning.pytorch.strategies.ddp": [
        "DDPStrategy.setup_environment",
    ],
    "lightning.pytorch.strategies.deepspeed": [
        "DeepSpeedStrategy._create_default_config",
        "DeepSpeedStrategy._format_batch_size_and_grad_accum_config",
        "DeepSpeedStrategy._initialize_deepspeed_train",
        "DeepSpeedStrategy.init_deepspeed",
    ],
    "lightning.fabric.strategies.ddp": [
        "DDPStrategy.setup_environment",
    ],
    "lightning.fabric.wrappers": [
        "_FabricOptimizer.__init__",
        "_FabricOptimizer.step",
        "_FabricOptimizer.__getattr__",
    ],
    "lightning.fabric.fabric": [
        "Fabric.backward",
        "Fabric.no_backward_sync",
        "Fabric.clip_gradients",
    ],
    "lightning.fabric.strategies.deepspeed": [
        "_format_precision_config",
    ],
    "lightning.pytorch.trainer.connectors.accelerator_connector": [
        "_AcceleratorConnector._lazy_init_strategy",
        "_AcceleratorConnector._check_and_init_precision",
    ],
    "lightning.pytorch.trainer.connectors.signal_connector": [
        "_SignalConnector.register_signal_handlers",
        "_SignalConnector._sigterm_notifier_fn",
    ],
    "lightning.pytorch.utilities.compile": [
        "_verify_strategy_supports_compile",
    ],
    "lightning.pytorch.trainer.call": [
        "_interrupt",
    ],
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector": [
        "_LoggerConnector.log_metrics",
        "_LoggerConnector.on_batch_end",
    ],
    "lightning.pytorch.trainer.connectors.logger_connector.result": [
        "_ResultCollection.metrics",
    ],
    "lightning.pytorch.callbacks.model_checkpoint": [
        "ModelCheckpoint.on_train_batch_end",
    ],
    "lightning.pytorch.core.optimizer": [
        "LightningOptimizer.step",
    ],
    "accelerate.accelerator": [
        "Accelerator.__init__",
        "Accelerator.prepare",
        "Accelerator.backward",
        "Accelerator._do_sync",
        "Accelerator.save_state",
        "Accelerator.load_state",
        "Accelerator.free_memory",
    ],
    "accelerate.data_loader": [
        "DataLoaderShard.__iter__",
    ],
    "accelerate.state": [
        "PartialState.__init__",
        "PartialState._prepare_backend",
        "AcceleratorState.__init__",
        "AcceleratorState.select_deepspeed_plugin",
        "GradientState._set_sync_gradients",
    ],
    "accelerate.optimizer": [
        "AcceleratedOptimizer",
    ],
    "accelerate.scheduler": [
        "AcceleratedScheduler.__init__",
        "AcceleratedScheduler.step",
    ],
    "accelerate.utils.deepspeed": [
        "HfDeepSpeedConfig",
        "map_pytorch_optim_to_deepspeed",
    ],
    "accelerate.utils.dataclasses": [
        "DeepSpeedPlugin.__post_init__",
        "DeepSpeedPlugin.deepspeed_config_process",
        "DeepSpeedPlugin.fill_match",
    ],
    "accelerate.utils.launch": [
        "prepare_deepspeed_cmd_env",
    ],
    "accelerate.commands.launch": [
        "launch_command",
    ],
    "transformers.trainer": [
        "Trainer.training_step",
        "Trainer._run_epoch",
        "Trainer._clip_grad_norm",
        "Trainer._hp_search_setup",
        "Trainer._get_grad_norm",
        "Trainer._inner_training_loop",
        "Trainer._prepare_for_training",
        "Trainer._save_checkpoint",
        "Trainer.evaluation_loop",
    ],
    "transformers.trainer_jit_checkpoint": [
        "CheckpointManager._enable_checkpoint",
        "CheckpointManager._sigterm_handler",
        "CheckpointManager.execute_jit_checkpoint",
        "JITCheckpointCallback",
    ],
    "transformers.training_args": [
        "TrainingArguments.__post_init__",
    ],
    "transformers.integrations.deepspeed": [
        "HfTrainerDeepSpeedConfig",
        "deepspeed_init",
        "propagate_args_to_deepspeed",
    ],
    # A hook of a gradient is found in the dictionary that its handle refers to (zero/stage_1_and_2/gradient_hooks.py).
    "torch._tensor": [
        "Tensor.register_post_accumulate_grad_hook",
    ],
    "torch.utils.hooks": [
        "RemovableHandle.__init__",
    ],
}

UPSTREAM = ("deepspeed", "lightning", "accelerate", "transformers")
OURS = (
    "requestzero.zero",
    "requestzero.lightning",
    "requestzero.fabric",
    "requestzero.accelerate",
    "requestzero.transformers",
)


def relied_on() -> set[str]:
    listed = {f"{module}:{name}" for module, names in RELIED_ON.items() for name in names}
    return listed | {entry.key for entry in entries() if entry.behaviour}


def overridden() -> set[str]:
    """Return the upstream methods that our classes define again, found by walking these: none can be forgotten."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    found = set()
    for cls in our_classes():
        upstream = [base for base in cls.__mro__ if base.__module__.split(".")[0] in UPSTREAM]
        for name in vars(cls):
            owner = next((base for base in upstream if name in vars(base)), None)
            if owner is not None and is_method(owner, name):
                found.add(f"{owner.__module__}:{owner.__qualname__}.{name}")
    return found


def is_method(owner: type, name: str) -> bool:
    """Return whether the class body has a method or property of this name, and no plain value or generated method."""
    definitions = find(read(owner.__module__), f"{owner.__qualname__}.{name}")
    return any(definition.is_function for definition in definitions.values())


def our_classes() -> Iterator[type]:
    for package in map(importlib.import_module, OURS):
        for found in walk_packages(package.__path__, f"{package.__name__}."):
            for value in vars(importlib.import_module(found.name)).values():
                if inspect.isclass(value) and value.__module__ == found.name:
                    yield value


def current() -> dict[str, dict[str, str]]:
    """Return the pin of every entry as it is now; a property has one for each of its functions."""
    pins = {}
    for name in sorted(overridden() | relied_on()):
        module, qualname = name.split(":")
        definitions = find(read(module), qualname)
        assert definitions, f"{module} has no {qualname} any more"
        for accessor, definition in definitions.items():
            pins[f"{name}.{accessor}" if accessor else name] = definition.pin()
    return pins


def test_pinned_sources_are_unchanged() -> None:
    pinned, now = json.loads(PINS.read_text()), current()
    assert len(now) > 40
    assert sorted(now) == sorted(pinned), "overridden or relied-on methods and their pins differ"
    changed = [f"{name}: {now[name]}" for name in now if now[name] != pinned[name]]
    assert not changed, "upstream has changed; read it again:\n" + "\n".join(changed)


def test_the_package_knows_these_definitions_of_deepspeed() -> None:
    pinned = [name for name in json.loads(PINS.read_text()) if name.split(":")[0].split(".")[0] == "deepspeed"]
    assert sorted(proved_sources().definitions) == sorted(pinned), "run: python tests/matrix/record.py"


@pytest.mark.parametrize("name", ["independent_gradient_partition_epilogue", "process_gradients", "step"])
def test_the_walk_finds_overrides(name: str) -> None:
    assert f"deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.{name}" in overridden()


def test_properties_have_an_entry_for_each_function() -> None:
    name = "lightning.pytorch.strategies.strategy:Strategy.precision_plugin"
    assert name in overridden()
    assert {name, f"{name}.setter"} <= current().keys()


DECORATED = [
    "deepspeed.runtime.engine:DeepSpeedEngine.backward",
    "deepspeed.runtime.engine:DeepSpeedEngine.forward",
    "deepspeed.runtime.engine:DeepSpeedEngine.allreduce_gradients",
    "accelerate.accelerator:Accelerator.log",
]


def test_a_decorated_method_is_pinned_itself_and_not_its_wrapper() -> None:
    pins = current()
    assert len({pins[name]["sha256"] for name in DECORATED}) == len(DECORATED)


@pytest.mark.parametrize("name", DECORATED)
def test_a_changed_line_of_a_body_is_seen(name: str) -> None:
    module, qualname = name.split(":")
    text = read(module)
    before = find(text, qualname)[""]
    line = before.lines.splitlines()[-1]  # of the body, since none of these ends in its signature
    changed = text.replace(before.lines, before.lines.removesuffix(line) + f"{line}  # changed")
    assert find(changed, qualname)[""].sha256 != before.sha256


def test_a_change_elsewhere_in_the_module_is_none_of_the_method() -> None:
    module, qualname = DECORATED[0].split(":")
    text = read(module)
    changed = text.replace(find(text, "DeepSpeedEngine.forward")[""].lines, "    def forward(self): ...")
    assert changed != text
    assert find(changed, qualname)[""].sha256 == find(text, qualname)[""].sha256


if __name__ == "__main__":
    pins = current()
    PINS.write_text(json.dumps(pins, indent=1) + "\n")
    print(dict(Counter(name.split(":")[0].split(".")[0] for name in pins)))
