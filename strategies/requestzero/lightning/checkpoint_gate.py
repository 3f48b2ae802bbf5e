"""Periodic checkpoints that fall inside a request wait for its end, and those by steps for the update window's.

Written for Lightning 2.6.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

_HOOK = "on_train_batch_end"
_LAST_SAVE = "_last_global_step_saved"


class CheckpointGate:
    """Holds the ``on_train_batch_end`` hook of checkpoint callbacks back while nothing can be saved.

    A callback that decides by time decides the same at the next batch, so the hook of the request's last batch saves
    what was due. One that decides by steps has nothing to save inside a window, where there is no step; Lightning's
    ``ModelCheckpoint`` would save in the first window after a resume, since it forgets its last save.

    HACK: the hook is shadowed by an attribute of the callback object, since Lightning offers no condition for
    it and the Trainer's list of callbacks has to stay complete; :meth:`remove` deletes the attribute.

    Args:
        callbacks: of the Trainer.
        request_open: tells whether a request is open.
        window_open: tells whether an update window is open.
    """

    def __init__(
        self, callbacks: Iterable[Checkpoint], request_open: Callable[[], bool], window_open: Callable[[], bool]
    ) -> None:
        self._callbacks = list(callbacks)
        for callback in self._callbacks:
            hook = getattr(type(callback), _HOOK).__get__(callback)
            setattr(callback, _HOOK, _held_back(callback, hook, request_open, window_open))

    def remove(self) -> None:
        """Give every callback its own hook back."""
        for callback in self._callbacks:
            vars(callback).pop(_HOOK, None)
        self._callbacks = []


def _held_back(
    callback: Checkpoint, hook: Callable[..., None], request_open: Callable[[], bool], window_open: Callable[[], bool]
) -> Callable[..., None]:
    def on_train_batch_end(*args: Any, **kwargs: Any) -> None:
        if not window_open():
            hook(*args, **kwargs)
        elif not request_open() and not _by_steps(callback):
            _also_after_a_save_at_this_step(callback, lambda: hook(*args, **kwargs))

    return on_train_batch_end


def _by_steps(callback: Checkpoint) -> bool:
    return isinstance(callback, ModelCheckpoint) and callback._train_time_interval is None


def _also_after_a_save_at_this_step(callback: Checkpoint, hook: Callable[[], None]) -> None:
    """Call the hook of a ``ModelCheckpoint`` by time, which saves once for each step: a window may be longer."""
    saved = getattr(callback, _LAST_SAVE, None)
    if saved is None:
        hook()
        return
    setattr(callback, _LAST_SAVE, -1)
    hook()
    if getattr(callback, _LAST_SAVE) == -1:
        setattr(callback, _LAST_SAVE, saved)
