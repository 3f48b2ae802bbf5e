"""Hooks of the module and of callbacks that have to do with gradients.

Written for Lightning 2.6.6.
"""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

STAGE_3_GRADIENTS = (
    "every rank holds a part of each gradient, so that p.grad is empty. Read the window's sum, which is not divided "
    "yet, with deepspeed.utils.safe_get_full_grad on all ranks; to clip by norm, use Trainer(gradient_clip_val=...) or "
    "self.clip_gradients."
)


def overrides(trainer: pl.Trainer, hook: str) -> bool:
    """Return whether the module or a callback has a hook of its own by this name."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    in_callbacks = any(is_overridden(hook, callback, pl.Callback) for callback in callbacks)
    return in_callbacks or is_overridden(hook, trainer.lightning_module, pl.LightningModule)


def clips_by_itself(trainer: pl.Trainer) -> bool:
    """Return whether the module decides on clipping, in the place of the Trainer's ``gradient_clip_val``."""
    return is_overridden("configure_gradient_clipping", trainer.lightning_module, pl.LightningModule)


def reads_gradients(trainer: pl.Trainer) -> bool:
    """Return whether a hook before a step may read or change gradients."""
    return overrides(trainer, "on_before_optimizer_step") or clips_by_itself(trainer)


def tell_where_gradients_are(trainer: pl.Trainer, stage: int) -> None:
    """Say once per fit where gradients can be read and changed, if they may be looked for elsewhere."""
    if stage == 3:
        if reads_gradients(trainer) or overrides(trainer, "on_after_backward"):
            rank_zero_warn(f"Gradients are not available in hooks at stage 3: {STAGE_3_GRADIENTS}")
        return
    if overrides(trainer, "on_after_backward"):
        rank_zero_warn(
            "In on_after_backward p.grad does not hold the gradient, which ZeRO has reduced and divided among the "
            "ranks, and a change of it does nothing: read and change it in on_before_optimizer_step."
        )
    if not trainer.lightning_module.automatic_optimization:
        rank_zero_info(
            "RequestZeRO keeps gradients divided among the ranks, so p.grad is empty in training_step. To clip by norm "
            "call self.clip_gradients(opt, gradient_clip_val=...) before opt.step(); to read or change gradients do so "
            "in `with self.trainer.strategy.gradients():`, or in on_before_optimizer_step."
        )
