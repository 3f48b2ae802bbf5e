"""What users of DDP expect of each front end, and the test that shows what becomes of it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

LIGHTNING = "Lightning"


class Outcome(Enum):
    """The outcome of a feature; the value stands in the table."""

    SAME = "as under DDP"
    REFUSED = "refused, says why"


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
        "`trainer.save_checkpoint` inside a window",
        "lightning/test_checkpoints.py::test_explicit_save_inside_a_window",
        Outcome.REFUSED,
    ),
    _lightning("SLURM's auto-requeue, inside a window too", "lightning/test_requeue.py::test_one_rank"),
    _lightning(
        "a rank alone in a save, a load, a barrier or a broadcast",
        "rank_check/test_lightning_ranks.py::test_one_rank_acts_alone",
        Outcome.REFUSED,
    ),
    _lightning(
        "Fabric, and the Trainer of `pytorch_lightning`",
        f"{_OPTIMIZER}::test_other_trainers_say_what_to_import",
        Outcome.REFUSED,
    ),
)


def table() -> str:
    """Return the table in Markdown."""
    lines = ["| feature | front end | outcome | shown by `tests/...` |", "| --- | --- | --- | --- |"]
    lines += [f"| {each.name} | {each.front_end} | {each.outcome.value} | `{each.test}` |" for each in FEATURES]
    return "\n".join(lines)
