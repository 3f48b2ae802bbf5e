"""Patches of transformers' ``Trainer``: the start of a training, an evaluation, or a trial of a hyperparameter search.

HACK: under DeepSpeed ``Trainer`` makes a new optimizer at every ``train()``, which ``accelerator.prepare`` then gets
without the model, and refuses ``evaluate()`` before ``train()`` below stage 3; there it takes the optimizer out of the
config. A trial has a ``DeepSpeedPlugin`` of its own, which would be a stock one. ``Trainer`` has no hook for any of
this. With the patches all do what they do without DeepSpeed, for our plugins. Written for Transformers 5.
"""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

import accelerate.utils
import torch
from accelerate.utils import convert_outputs_to_fp32
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper

from requestzero.accelerate.config_scheduler import start_scheduler
from requestzero.accelerate.request_safe_plugin import RequestSafePlugin
from requestzero.accelerate.sharded_evaluation import end_evaluation_of_sharded, evaluate_sharded, is_sharded
from requestzero.config.precision import precision_of
from requestzero.config.translation import AUTO
from requestzero.zero.patch import patched

_INSTALLED = "_requestzero_installed"
_FORWARD = "_requestzero_forward"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def install_if_imported() -> None:
    """Install the patch once ``transformers.trainer`` is imported, which whoever has a ``Trainer`` has done."""
    module = sys.modules.get("transformers.trainer")
    original = getattr(module, "deepspeed_init", None)
    if module is None or original is None or hasattr(original, _INSTALLED):
        return

    @functools.wraps(original)
    def deepspeed_init(trainer: Any, num_training_steps: int, inference: bool = False) -> tuple[Any, Any]:
        if not isinstance(trainer.accelerator.state.deepspeed_plugin, RequestSafePlugin):
            return original(trainer, num_training_steps, inference=inference)
        if inference:
            _prepare_for_evaluation(trainer)
            return None, None
        _end_evaluation(trainer)
        _agree_on_preemption(trainer)
        engine = _prepared_engine(trainer)
        if engine is None:
            return original(trainer, num_training_steps)
        _restart_scheduler(trainer, engine, num_training_steps)
        return trainer.optimizer, trainer.lr_scheduler

    setattr(deepspeed_init, _INSTALLED, True)
    module.deepspeed_init = deepspeed_init  # type: ignore[attr-defined]
    _keep_plugin_in_trials(module.Trainer)


def _agree_on_preemption(trainer: Any) -> None:
    from requestzero.accelerate.preemption import agree_on_preemption  # imports transformers

    agree_on_preemption(trainer)


def _keep_plugin_in_trials(trainer_class: Any) -> None:
    original = trainer_class._hp_search_setup

    @functools.wraps(original)
    def _hp_search_setup(trainer: Any, trial: Any) -> None:
        plugin = trainer.args.deepspeed_plugin
        if trial is None or not isinstance(plugin, RequestSafePlugin):
            original(trainer, trial)
            return
        trainer.accelerator.release_engine()  # a trial has a new model
        with patched(accelerate.utils, "DeepSpeedPlugin", plugin.again):
            original(trainer, trial)

    trainer_class._hp_search_setup = _hp_search_setup


def _prepare_for_evaluation(trainer: Any) -> None:
    """Put the model on the device, computing in the engine's dtype, and let ``Trainer`` use it as it is.

    Its weights keep their dtype, of which the engine makes its master weights later.
    """
    if is_sharded(trainer.model):
        evaluate_sharded(trainer)
        return
    model, device = trainer.model.to(trainer.args.device), trainer.args.device
    dtype = _DTYPES.get(precision_of(trainer.accelerator.state.deepspeed_plugin.deepspeed_config))
    if dtype is not None and _FORWARD not in vars(model):
        vars(model)[_FORWARD] = vars(model).get("forward")
        model.forward = convert_outputs_to_fp32(torch.autocast(device.type, dtype)(model.forward))
    if not any(each is model for each in trainer.accelerator._models):
        trainer.accelerator._models.append(model)


def _end_evaluation(trainer: Any) -> None:
    """Undo what :func:`_prepare_for_evaluation` has done, but for the device."""
    end_evaluation_of_sharded(trainer)
    model = trainer.model
    trainer.accelerator._models[:] = [each for each in trainer.accelerator._models if each is not model]
    if _FORWARD in vars(model):
        del model.forward
        original = vars(model).pop(_FORWARD)
        if original is not None:
            model.forward = original


def _prepared_engine(trainer: Any) -> Any:
    """Return the engine of an earlier ``train()``, or ``None`` if a new one is needed."""
    accelerator = trainer.accelerator
    accelerator.has_trainer = True
    return trainer.model_wrapped if accelerator.take_back_engine(trainer.model_wrapped) else None


def _restart_scheduler(trainer: Any, engine: Any, steps: int) -> None:
    """Make the scheduler of the config anew, as ``Trainer`` does with one of its own, for another number of steps."""
    if not isinstance(trainer.lr_scheduler, DeepSpeedSchedulerWrapper):
        return
    scheduler = _scheduler_of_config(trainer, engine, steps) or _scheduler_of_trainer(trainer, engine, steps)
    engine.lr_scheduler = trainer.lr_scheduler.scheduler = scheduler


def _scheduler_of_config(trainer: Any, engine: Any, steps: int) -> Any:
    config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config
    section = config.config.get("scheduler")
    if section is None:
        return None
    params = section.setdefault("params", {})
    for name in ("total_num_steps", "warmup_num_steps"):  # which have to be those of the arguments
        if name in params:
            params[name] = AUTO
    config.trainer_config_finalize(trainer.args, trainer.model, steps)
    engine._config.scheduler_params = params
    scheduler = engine._scheduler_from_config(engine.optimizer)
    start_scheduler(scheduler)
    return scheduler


def _scheduler_of_trainer(trainer: Any, engine: Any, steps: int) -> Any:
    """Return the scheduler that ``Trainer`` makes beside an optimizer of the config."""
    other = copy.copy(trainer)
    other.lr_scheduler = None
    return other.create_scheduler(num_training_steps=steps, optimizer=engine.basic_optimizer)
