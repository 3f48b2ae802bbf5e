"""What users of DDP expect of each front end, and the test that shows what becomes of it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

LIGHTNING, FABRIC, ACCELERATE = "Lightning", "Fabric", "Accelerate"
TRAINER, TRL, UNCHANGED = "Trainer", "TRL", "`requestzero.run`"


class Outcome(Enum):
    """The outcome of a feature; the value stands in the table."""

    SAME = "as under DDP"
    REFUSED = "refused, says why"
    WORKS = "works"
    """Where DDP has nothing to compare with."""
    MEANT = "differs on purpose"


class Feature(NamedTuple):
    """One row of the table."""

    name: str
    front_end: str
    outcome: Outcome
    test: str
    """Below ``tests/``: file, function and, in brackets, the parameter."""


_HOOKS = "lightning/test_gradients_in_hooks.py"
_WEIGHTS = "lightning/test_written_weights_lightning.py::test_written_weights"
_OPTIMIZER = "lightning/test_callbacks_and_tuner.py"
_SAVING = "lightning/test_checkpoint_hooks.py"
_MOMENTS = "lightning/test_saves_at_any_moment.py"
_PLUGINS = "lightning/test_checkpoint_plugins.py"
_FABRIC = "fabric/test_fabric.py"
_COMPILED = "front_ends/test_compiled_modules.py::test_weights_are_those_without_compiling"


def _lightning(name: str, test: str, outcome: Outcome = Outcome.SAME) -> Feature:
    return Feature(name, LIGHTNING, outcome, test)


FEATURES = (
    _lightning(
        "`accumulate_grad_batches`, counters, hooks, logged values",
        "lightning/test_parity_with_ddp.py::test_bit_for_bit",
    ),
    _lightning("`Trainer(gradient_clip_val=...)`", "lightning/test_parity_with_ddp.py::test_clipping_acts_on_the_mean"),
    _lightning("`self.clip_gradients` in manual optimization", f"{_HOOKS}::test_gradients_in_hooks[manual_clipping]"),
    _lightning("an own `configure_gradient_clipping`", f"{_HOOKS}::test_gradients_in_hooks[clipping_hook]"),
    _lightning("`clip_grad_norm_` in `on_before_optimizer_step`", f"{_HOOKS}::test_gradients_in_hooks[torch_clipping]"),
    _lightning(
        "`clip_grad_norm_` in a manual `training_step`",
        f"{_HOOKS}::test_gradients_in_hooks[torch_clipping_in_manual_steps]",
    ),
    _lightning("gradients changed in `on_before_optimizer_step`", f"{_HOOKS}::test_gradients_in_hooks[edits]"),
    _lightning("gradients and `grad_norm` read there", f"{_HOOKS}::test_gradients_in_hooks[norms]"),
    _lightning("`self.clip_gradients` by value", f"{_HOOKS}::test_what_cannot_be_clipped[ByValue]", Outcome.REFUSED),
    _lightning(
        "gradients in `on_after_backward`",
        f"{_HOOKS}::test_a_hook_that_comes_too_early_is_told_where_gradients_are",
        Outcome.REFUSED,
    ),
    _lightning("weights loaded in `on_fit_start`", f"{_WEIGHTS}[pretrained]"),
    _lightning("weights clamped after updates (`param.data`)", f"{_WEIGHTS}[clamped]"),
    _lightning("weights normalized after updates", f"{_WEIGHTS}[unit_rows]"),
    _lightning("a layer reset during a fit", f"{_WEIGHTS}[layer_reset]"),
    _lightning("`ModelPruning`", f"{_WEIGHTS}[pruned]"),
    _lightning("`loss.backward()` for `manual_backward`", f"{_OPTIMIZER}::test_as_under_ddp[direct_backward]"),
    _lightning(
        "manual optimization over several batches: the step divides, where DDP's loop divides the losses",
        "lightning/test_windows.py::test_manual_windows_and_requests",
        Outcome.MEANT,
    ),
    _lightning("an auxiliary loss with a backward of its own", f"{_OPTIMIZER}::test_as_under_ddp[auxiliary_backward]"),
    _lightning("`Tuner.lr_find`", f"{_OPTIMIZER}::test_as_under_ddp[lr_find]"),
    _lightning("`LearningRateFinder`", f"{_OPTIMIZER}::test_as_under_ddp[lr_finder_callback]"),
    _lightning("schedulers made in hooks", f"{_OPTIMIZER}::test_as_under_ddp[scheduler_in_a_hook]"),
    _lightning("methods of the own optimizer", f"{_OPTIMIZER}::test_methods_of_the_own_optimizer"),
    _lightning("`GradientAccumulationScheduler`", f"{_OPTIMIZER}::test_as_under_ddp[accumulation_scheduler]"),
    _lightning(
        "`StochasticWeightAveraging`, without batch norm",
        f"{_OPTIMIZER}::test_as_under_ddp[stochastic_weight_averaging]",
    ),
    _lightning("`EarlyStopping`", f"{_OPTIMIZER}::test_as_under_ddp[early_stopping]"),
    _lightning("`LearningRateMonitor`", f"{_OPTIMIZER}::test_as_under_ddp[learning_rate_monitor]"),
    _lightning(
        "several optimizers or schedulers",
        "lightning/test_fit_errors.py::test_refused[WithTwoOptimizers]",
        Outcome.REFUSED,
    ),
    _lightning("parameters frozen for a while (SGD)", f"{_OPTIMIZER}::test_as_under_ddp[frozen_for_an_epoch]"),
    _lightning(
        "parameters frozen at the start, unfrozen later", f"{_OPTIMIZER}::test_refused[UnfrozenLate]", Outcome.REFUSED
    ),
    _lightning("`BackboneFinetuning`", f"{_OPTIMIZER}::test_refused[BackboneFinetuning]", Outcome.REFUSED),
    _lightning("`add_param_group`", f"{_OPTIMIZER}::test_refused[AddsParameters]", Outcome.REFUSED),
    _lightning("a resumed run", "lightning/test_checkpoints.py::test_resumed_run_is_identical"),
    _lightning("`EMAWeightAveraging`, resumed", f"{_SAVING}::test_checkpoints[average_resumed]"),
    _lightning("its average in `trainer.test(ckpt_path=...)`", f"{_SAVING}::test_checkpoints[average_tested]"),
    _lightning("its average in one file", f"{_SAVING}::test_checkpoints[average_in_one_file]"),
    _lightning("`state_dict` changed in `on_load_checkpoint`", f"{_SAVING}::test_checkpoints[edited_when_loading]"),
    _lightning("`state_dict` changed in `on_save_checkpoint`", f"{_SAVING}::test_checkpoints[a_part_is_saved]"),
    _lightning("`save_weights_only`", f"{_SAVING}::test_checkpoints[weights_only]"),
    _lightning(
        "a checkpoint saved after `trainer.test`", f"{_SAVING}::test_a_save_after_an_evaluation", Outcome.REFUSED
    ),
    _lightning("a fit from a file of weights", f"{_SAVING}::test_a_fit_does_not_resume_from_one_file", Outcome.REFUSED),
    _lightning(
        "`trainer.save_checkpoint` inside a window, and a resumed run",
        "lightning/test_checkpoints.py::test_resume_inside_a_window",
    ),
    _lightning(
        "`trainer.save_checkpoint` inside a request of several batches",
        "lightning/test_checkpoints.py::test_explicit_save_inside_a_request",
        Outcome.REFUSED,
    ),
    _lightning(
        "`AsyncCheckpointIO`, which writes single files in the background, and folders at once",
        f"{_PLUGINS}::test_saving_in_the_background_is_told",
        Outcome.REFUSED,
    ),
    _lightning(
        "other `CheckpointIO` plugins, for single files with weights",
        f"{_PLUGINS}::test_a_file_with_weights_goes_through_it",
    ),
    _lightning(
        "other `CheckpointIO` plugins, for folders",
        f"{_PLUGINS}::test_one_of_the_users_own_is_refused",
        Outcome.REFUSED,
    ),
    _lightning("`torch.compile` of the module", f"{_COMPILED}[lightning]"),
    _lightning(
        "`Trainer(max_time=...)`, `Timer`, inside a window too",
        f"{_MOMENTS}::test_a_time_limit_ends_a_fit_as_under_ddp",
    ),
    _lightning(
        "saves on exceptions (`save_last`, `OnExceptionCheckpoint`), on SIGTERM and by preemption callbacks, inside a "
        "window too: resumed in it, ends as the uninterrupted run",
        f"{_MOMENTS}::test_the_next_run_goes_on_in_the_window",
        Outcome.WORKS,
    ),
    _lightning("SLURM's auto-requeue, inside a window too", "lightning/test_requeue.py::test_one_rank"),
    _lightning(
        "a rank alone in a save, a load, a barrier or a broadcast",
        "rank_check/test_lightning_ranks.py::test_one_rank_acts_alone",
        Outcome.REFUSED,
    ),
    _lightning(
        "the Trainer of `pytorch_lightning`", f"{_OPTIMIZER}::test_other_trainers_say_what_to_import", Outcome.REFUSED
    ),
    Feature(
        "loop with `no_backward_sync`, schedulers, requests that end in between",
        FABRIC,
        Outcome.SAME,
        f"{_FABRIC}::test_updates_are_those_of_ddp",
    ),
    Feature(
        "`optimizer.zero_grad()` before a step",
        FABRIC,
        Outcome.SAME,
        f"{_FABRIC}::test_zero_grad_discards_what_came_before",
    ),
    Feature("`clip_gradients(max_norm=...)`", FABRIC, Outcome.SAME, f"{_FABRIC}::test_clipping_by_norm[clip_by_norm]"),
    Feature(
        "`clip_gradients(clip_val=...)` at stages 1 and 2",
        FABRIC,
        Outcome.SAME,
        f"{_FABRIC}::test_changed_gradients[clip_by_value]",
    ),
    Feature(
        "`clip_gradients(norm_type=...)` at stages 1 and 2",
        FABRIC,
        Outcome.SAME,
        f"{_FABRIC}::test_clipping_by_norm[clip_by_another_norm]",
    ),
    Feature(
        "`torch.nn.utils.clip_grad_norm_`", FABRIC, Outcome.SAME, f"{_FABRIC}::test_clipping_by_norm[clip_by_torch]"
    ),
    Feature(
        "gradients read and changed before a step, at stages 1 and 2 in `with RequestZeROFabric.gradients(model):`",
        FABRIC,
        Outcome.SAME,
        f"{_FABRIC}::test_changed_gradients[edit]",
    ),
    Feature("`optimizer.step(closure)`", FABRIC, Outcome.SAME, f"{_FABRIC}::test_a_closure_runs_before_the_step"),
    Feature(
        "several models, each with its optimizer",
        FABRIC,
        Outcome.SAME,
        f"{_FABRIC}::test_each_optimizer_steps_its_own_model",
    ),
    Feature(
        "`fabric.init_module()` at stage 3",
        FABRIC,
        Outcome.WORKS,
        f"{_FABRIC}::test_a_module_of_stage_3_is_built_in_parts",
    ),
    Feature(
        "`fabric.save`, `fabric.load`: ends as the uninterrupted run", FABRIC, Outcome.WORKS, f"{_FABRIC}::test_resume"
    ),
    Feature(
        "a rank alone in a save", FABRIC, Outcome.REFUSED, f"{_FABRIC}::test_a_rank_alone_in_a_save_is_an_error_on_all"
    ),
    Feature(
        "`clip_val` and other norms at stage 3, `optimizer.load_state_dict`",
        FABRIC,
        Outcome.REFUSED,
        f"{_FABRIC}::test_what_is_refused",
    ),
    Feature("`torch.compile` of the module given to `fabric.setup`", FABRIC, Outcome.SAME, f"{_COMPILED}[fabric]"),
    Feature("`CheckpointIO` plugins", FABRIC, Outcome.REFUSED, f"{_PLUGINS}::test_under_fabric"),
    Feature(
        "the Trainer's strategy given to Fabric",
        FABRIC,
        Outcome.REFUSED,
        f"{_FABRIC}::test_the_strategy_of_the_trainer_says_what_to_write",
    ),
    Feature(
        "loop with `accumulate`, schedulers, clipping",
        ACCELERATE,
        Outcome.SAME,
        "accelerate/test_loop.py::test_updates_are_those_of_ddp_bit_for_bit",
    ),
    Feature(
        "`torch.nn.utils.clip_grad_norm_`",
        ACCELERATE,
        Outcome.SAME,
        "accelerate/test_loop.py::test_clipping_is_that_of_ddp",
    ),
    Feature(
        "`clip_grad_norm_` of some parameters or by another norm, and `clip_grad_value_`, the accelerator's and "
        "PyTorch's, at stages 1 and 2",
        ACCELERATE,
        Outcome.SAME,
        "accelerate/test_changed_gradients_and_weights.py::test_clips_are_those_of_ddp",
    ),
    Feature(
        "the same at stage 3",
        ACCELERATE,
        Outcome.REFUSED,
        "accelerate/test_changed_gradients_and_weights.py::test_stage_3_refuses_them",
    ),
    Feature(
        "gradients read and changed before a step, at stages 1 and 2 in `with plugin.gradients(accelerator):`",
        ACCELERATE,
        Outcome.SAME,
        "accelerate/test_gradients_in_loops.py::test_what_is_read_and_changed_is_that_of_ddp_bit_for_bit",
    ),
    Feature(
        "weights written between updates, at stage 3 in a gathered block",
        ACCELERATE,
        Outcome.SAME,
        "accelerate/test_changed_gradients_and_weights.py::test_written_weights_count_as_under_ddp",
    ),
    Feature(
        "last, shorter window of a loader, divided by its own count where DDP divides by N",
        ACCELERATE,
        Outcome.MEANT,
        "accelerate/test_loop.py::test_a_short_last_window_is_divided_by_its_own_count",
    ),
    Feature(
        "`continue` or `break` inside `accumulate`",
        ACCELERATE,
        Outcome.SAME,
        "accelerate/test_left_windows.py::test_updates_are_those_of_ddp",
    ),
    Feature(
        "values set in the plugin's config or attributes before `prepare`",
        ACCELERATE,
        Outcome.SAME,
        "accelerate/test_changed_after.py::test_what_is_set_before_prepare_is_taken_over",
    ),
    Feature(
        "values set where another place says something else",
        ACCELERATE,
        Outcome.REFUSED,
        "accelerate/test_changed_after.py::test_what_cannot_be_taken_over_is_told",
    ),
    Feature(
        "the plugin's config given to `deepspeed.initialize`: a stock one",
        ACCELERATE,
        Outcome.WORKS,
        "accelerate/test_changed_after.py::test_others_see_a_stock_config",
    ),
    Feature(
        "optimizer and scheduler of the DeepSpeed config, as a scheduler of PyTorch",
        ACCELERATE,
        Outcome.WORKS,
        "accelerate/test_loop.py::test_optimizer_and_scheduler_of_the_deepspeed_config",
    ),
    Feature(
        "`save_state`, `load_state`: ends as the uninterrupted run",
        ACCELERATE,
        Outcome.WORKS,
        "accelerate/test_accelerate_checkpoints.py::test_resumed_equals_uninterrupted",
    ),
    Feature(
        "a program that saves on SIGTERM, inside a window too: resumed, ends as the uninterrupted run",
        ACCELERATE,
        Outcome.WORKS,
        "accelerate/test_accelerate_checkpoints.py::test_a_program_that_saves_on_sigterm",
    ),
    Feature(
        "another number of ranks, as it is or converted: ends as the uninterrupted run",
        ACCELERATE,
        Outcome.WORKS,
        "accelerate/test_other_rank_count.py::test_two_ranks_and_then_one",
    ),
    Feature("`Accelerator(dynamo_backend=...)`", ACCELERATE, Outcome.SAME, f"{_COMPILED}[accelerate]"),
    Feature(
        "a module of `torch.compile` given to `prepare`",
        ACCELERATE,
        Outcome.SAME,
        f"{_COMPILED}[compiled_before]",
    ),
    Feature(
        "stage 3: a module of `torch.compile` given to `prepare`",
        ACCELERATE,
        Outcome.REFUSED,
        "config/test_refused_at_stage_3.py::test_compiled_modules",
    ),
    Feature(
        "several models in one `prepare` or `Accelerator`",
        ACCELERATE,
        Outcome.REFUSED,
        "accelerate/test_settings_sources.py::test_objects_that_cannot_be_prepared",
    ),
    Feature(
        "stage 3: a loop, clipping",
        ACCELERATE,
        Outcome.SAME,
        "accelerate/test_loop.py::test_updates_are_those_of_ddp_bit_for_bit",
    ),
    Feature(
        "stage 3: `from_pretrained`, `zero3_init_flag`, `get_state_dict`, `save_model`",
        ACCELERATE,
        Outcome.WORKS,
        "accelerate/test_stage_3_accelerate.py::test_a_pretrained_model",
    ),
    Feature(
        "stage 3: a rank that runs one more forward",
        ACCELERATE,
        Outcome.REFUSED,
        "accelerate/test_stage_3_accelerate.py::test_evaluation_between_micro_batches",
    ),
    Feature(
        "`train()`", TRAINER, Outcome.SAME, "accelerate/test_trainer.py::test_other_models_are_trained_as_under_ddp"
    ),
    Feature("`train()` twice", TRAINER, Outcome.SAME, "transformers/test_trainer_calls.py::test_train_twice"),
    Feature(
        "`train()` twice with `model_init`",
        TRAINER,
        Outcome.SAME,
        "transformers/test_trainer_calls.py::test_train_twice_with_a_new_model",
    ),
    Feature(
        "trials of a hyperparameter search",
        TRAINER,
        Outcome.SAME,
        "transformers/test_trainer_calls.py::test_trials_of_a_hyperparameter_search",
    ),
    Feature(
        "`evaluate()` before `train()`, which it does not change",
        TRAINER,
        Outcome.SAME,
        "transformers/test_trainer_calls.py::test_evaluate_before_train",
    ),
    Feature(
        "stage 3: `evaluate()` of a sharded model before `train()`",
        TRAINER,
        Outcome.WORKS,
        "transformers/test_trainer_calls.py::test_evaluate_a_sharded_model_before_train",
    ),
    Feature(
        "scheduler of the DeepSpeed config and what is logged of it, as Trainer's own",
        TRAINER,
        Outcome.WORKS,
        "transformers/test_trainer_calls.py::test_the_scheduler_of_the_config_has_no_lag",
    ),
    Feature(
        "`resume_from_checkpoint`: ends as the uninterrupted run",
        TRAINER,
        Outcome.WORKS,
        "accelerate/test_trainer.py::test_a_resumed_run_ends_as_the_uninterrupted_one",
    ),
    Feature(
        "gradients read and changed in `on_pre_optimizer_step`, at stages 1 and 2 in `with "
        "plugin.gradients(accelerator):`",
        TRAINER,
        Outcome.SAME,
        "transformers/test_trainer_calls.py::test_gradients_in_a_callback",
    ),
    Feature(
        "`enable_jit_checkpoint`, which saves on SIGTERM, on one rank alone and inside a window too",
        TRAINER,
        Outcome.WORKS,
        "transformers/test_trainer_calls.py::test_a_checkpoint_on_sigterm",
    ),
    Feature(
        "arguments class mixed into another, in both orders, with the other's defaults",
        TRAINER,
        Outcome.WORKS,
        "transformers/test_mixed_arguments.py::test_defaults_are_those_of_the_other_class",
    ),
    Feature(
        '`drop_request`, `normalization="token"`',
        TRAINER,
        Outcome.REFUSED,
        "accelerate/test_trainer.py::test_trainer_divides_by_tokens_itself",
    ),
    Feature(
        "SFT, DPO with a reference model, GRPO, LoRA with gradient checkpointing",
        TRL,
        Outcome.SAME,
        "trl/test_trl_trainers.py::test_the_weights_are_those_of_ddp",
    ),
    Feature(
        "stage 3: SFT, DPO with a reference model, LoRA",
        TRL,
        Outcome.SAME,
        "trl/test_trl_trainers.py::test_stage_3",
    ),
    Feature(
        "offload with `retain_gpu_grad_partition_until_step`",
        TRL,
        Outcome.SAME,
        "trl/test_trl_trainers.py::test_with_offload_that_retains_the_partition",
    ),
    Feature(
        "evaluation with `load_best_model_at_end`",
        TRL,
        Outcome.SAME,
        "trl/test_trl_trainers.py::test_the_best_model_at_the_end",
    ),
    Feature(
        "the same trainers, and SFT at stage 3, unchanged",
        UNCHANGED,
        Outcome.SAME,
        "trl/test_trl_trainers.py::test_unchanged",
    ),
    Feature(
        "a bare `Accelerator()`, spawned workers, a shipped launch file of stage 2 or 3: request-safe",
        UNCHANGED,
        Outcome.WORKS,
        "run/test_adoption.py::test_a_bare_accelerator_under_accelerate_launch",
    ),
    Feature(
        "`deepspeed.initialize` called by the program, at stages 2 and 3: request-safe, can be turned off",
        UNCHANGED,
        Outcome.WORKS,
        "run/test_adoption.py::test_deepspeed_initialize_under_torchrun",
    ),
    Feature(
        "subclasses of the plugin, `isinstance`, fields, pickling",
        UNCHANGED,
        Outcome.WORKS,
        "run/test_adoption.py::test_every_plugin_of_a_supported_stage_is_adopted",
    ),
    Feature(
        "stage 0 and NVMe offload: DeepSpeed's own, reported once",
        UNCHANGED,
        Outcome.WORKS,
        "run/test_adoption.py::test_other_stages_are_told_once",
    ),
    Feature(
        "arguments, `__main__`, `-m`, tracebacks, exit codes, as under `python`",
        UNCHANGED,
        Outcome.WORKS,
        "run/test_program.py::test_it_behaves_as_without",
    ),
)


def table() -> str:
    """Return the table in Markdown."""
    lines = ["| feature | front end | outcome | shown by `tests/...` |", "| --- | --- | --- | --- |"]
    lines += [f"| {each.name} | {each.front_end} | {each.outcome.value} | `{each.test}` |" for each in FEATURES]
    return "\n".join(lines)
