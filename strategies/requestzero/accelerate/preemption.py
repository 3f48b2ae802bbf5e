"""Preemption of transformers' ``Trainer`` (``enable_jit_checkpoint``): all ranks save at the same place.

Written for Transformers 5.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback
from typing_extensions import override

from requestzero.accelerate.engine_access import engine_wrapper_of


class AgreedPreemption(TrainerCallback):
    """Lets all ranks save once SIGTERM has come to one, before Trainer's own callback looks for the signal.

    There every rank waits a few seconds after its own signal and then saves wherever its training is. A signal that
    comes to one rank alone, or reaches the ranks in different updates, leaves them in different collectives.

    HACK: the manager's timer finds :meth:`_note` in the place of the manager's method, and its callbacks find our
    :meth:`_save`, since Trainer has no way to replace either.

    Args:
        trainer: a ``Trainer`` with an engine of ours.
        manager: its callback's ``CheckpointManager``.
    """

    def __init__(self, trainer: Any, manager: Any) -> None:
        self._trainer, self._manager = trainer, manager
        self.pending = False
        """True once the time that Trainer waits after the signal is over on this rank."""
        self._served = False
        self._stock_save = manager.execute_jit_checkpoint
        manager._enable_checkpoint, manager.execute_jit_checkpoint = self._note, self._save

    def _note(self) -> None:
        """Note the signal; called in a thread."""
        self.pending = True

    def _agree(self, *args: Any, **kwargs: Any) -> None:
        """Request the checkpoint on all ranks where one has its signal (collective)."""
        if self._served:
            return
        agreement = engine_wrapper_of(self._trainer.accelerator).engine.agreement
        device = self._trainer.args.device
        pending = torch.tensor([int(self.pending)], device=device)
        work = torch.distributed.all_reduce(pending, op=torch.distributed.ReduceOp.MAX, async_op=True)
        agreement.wait_for_batch(work, device)
        self._manager.is_checkpoint_requested = self._served = bool(pending.item())

    on_step_begin = on_pre_optimizer_step = on_step_end = on_epoch_end = _agree

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._served = False

    def _save(self) -> None:
        """Save as Trainer does; only ranks that write the model mark the folder, as all would remove the same mark."""
        if self._trainer.args.should_save:
            self._stock_save()
            return
        self._manager.is_checkpoint_requested = False
        self._trainer._save_checkpoint(self._trainer.model, trial=None)


def agree_on_preemption(trainer: Any) -> None:
    """Let the ranks of a ``Trainer`` with ``enable_jit_checkpoint`` agree on its checkpoint. Done once."""
    callbacks = trainer.callback_handler.callbacks
    if trainer.args.world_size == 1 or any(isinstance(each, AgreedPreemption) for each in callbacks):
        return
    for place, callback in enumerate(callbacks):
        manager = getattr(callback, "jit_manager", None)
        if manager is not None:
            callbacks.insert(place, AgreedPreemption(trainer, manager))
            return
