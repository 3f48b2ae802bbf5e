"""Checkpoints of a Lightning run: between requests only, with the random state of every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from requestzero.lightning import rng
from requestzero.lightning.checkpoint_gate import CheckpointGate
from requestzero.lightning.module_state import CHANGED, has_extra_state, is_changed, saving
from requestzero.lightning.window_driver import WindowDriver

_RANDOM_STATES = "requestzero_random_states"
"""Key of the random states of all ranks, in rank order, in a checkpoint."""
_WINDOW = "requestzero_window"
"""Key of the loop's place in the open window; absent between windows."""


def check_saves_weights_only(stage: int) -> None:
    """Raise ValueError at stage 3, where a ``state_dict`` holds no weights: every rank has a part of each."""
    if stage == 3:
        raise ValueError(
            "A checkpoint with weights only is not possible at stage 3, where every rank holds a part of each weight: "
            "save a full one (weights_only=False, ModelCheckpoint(save_weights_only=False)) and make one file of its "
            "folder with `python -m requestzero.lightning.single_file FOLDER FILE`."
        )


class Checkpointing:
    """Work around the saving and loading of a strategy's checkpoints.

    Args:
        driver: knows of the open window.
    """

    def __init__(self, driver: WindowDriver) -> None:
        self._driver = driver
        self._gate: CheckpointGate | None = None
        self._random_state: rng.RandomState | None = None

    def hold_back(self, callbacks: Iterable[Checkpoint]) -> None:
        """Let the periodic checkpoints of these callbacks wait for the end of a request, until :meth:`release`."""
        driver = self._driver
        self._gate = CheckpointGate(callbacks, lambda: driver.inside_request, lambda: driver.is_open)

    def release(self) -> None:
        """Give the callbacks their own hooks back."""
        if self._gate is not None:
            self._gate.remove()
            self._gate = None

    def before_save(self, checkpoint: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """Return ``checkpoint`` with the ranks' random states and the place in an open window. Collective.

        Raises:
            RuntimeError: a request is open, and no exception is ending the run; or an evaluation came after the
                fit.
            RankDisagreementError: the ranks have disagreed before.
        """
        engine = self._driver.engine
        if engine is None and self._driver.has_trained:
            instead = ", or save the weights with trainer.save_checkpoint(path, weights_only=True)"
            raise RuntimeError(
                "An evaluation has put an engine without an optimizer in the place of the trained one, so that the "
                "checkpoint would have no optimizer state to resume from: save it before trainer.validate, test or "
                f"predict{instead * (self._driver.stage < 3)}."
            )
        if engine is not None:  # before any other collective, in which a rank alone would wait for ever
            engine.agreement.before_checkpoint("saves")
        if self._driver.inside_request:
            self._close_window()
        place = {_WINDOW: self._driver.place_in_window()} if self._driver.is_open else {}
        return {**checkpoint, **place, _RANDOM_STATES: rng.collect(device)}

    def _close_window(self) -> None:
        if self._driver.trainer.state.status != TrainerStatus.INTERRUPTED:
            raise RuntimeError(
                "A checkpoint inside a request would lose gradients that are not complete, "
                f"{self._driver.describe_window()}: save where trainer.strategy.request_open is False, such as in "
                "on_train_batch_end after the request's last batch."
            )
        # An exception ends the run inside a request: the last update is all that can still be saved.
        self._driver.discard_window(
            "the run was interrupted inside it; a run resumed from here does not repeat its batches"
        )

    @contextmanager
    def saving_module(self, checkpoint: dict[str, Any], engine: Any) -> Iterator[None]:
        """Let the engine save the ``state_dict`` of ``checkpoint`` where a hook has changed it."""
        state_dict = checkpoint.get("state_dict", {})
        changed = is_changed(state_dict, engine.module)
        if not changed and not has_extra_state(state_dict):  # extra state may be a hook's: it is not compared
            yield
            return
        if changed:
            checkpoint[CHANGED] = True
        with saving(engine, state_dict):
            yield

    def before_load(self, path: _PATH) -> None:
        """Check that a fit can resume from ``path``, and agree to load it. Collective in a fit.

        Raises:
            ValueError: it is a single file.
            RankDisagreementError: another rank does something else.
        """
        engine = self._driver.engine
        if engine is None:
            return
        engine.agreement.before_checkpoint("loads")
        if Path(path).is_file():
            raise ValueError(
                f"{path} is a single file, and a fit resumes from the folder that RequestZeRO saves, with the "
                "optimizer state of every rank: to begin with the weights of a file, use load_from_checkpoint or "
                "load_state_dict before the fit."
            )

    def after_load(self, checkpoint: dict[str, Any], rank: int, world_size: int) -> None:
        """Keep this rank's random state for the start of the training, if the saved run had as many ranks."""
        states: list[rng.RandomState] | None = checkpoint.get(_RANDOM_STATES)
        if states is not None and len(states) != world_size:
            rank_zero_warn(
                f"The checkpoint holds the random states of {len(states)} ranks and this run has {world_size}: "
                "random numbers start anew, so the run does not repeat the one that was saved."
            )
            states = None
        self._random_state = None if states is None else states[rank]
        if _WINDOW in checkpoint and self._driver.is_open:
            self._driver.resume_window(checkpoint[_WINDOW])

    def restore_random_state(self, device: torch.device) -> None:
        """Go on with the random numbers of the saved run, once; nothing without one."""
        if self._random_state is not None:
            rng.restore(self._random_state, device)
            self._random_state = None
