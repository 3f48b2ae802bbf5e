"""Periodic checkpoints that fall inside an update window wait for its end.

Written for Lightning 2.6.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch.callbacks import Checkpoint

_HOOK = "on_train_batch_end"


class CheckpointGate:
    """Holds the ``on_train_batch_end`` hook of checkpoint callbacks back while a window is open.

    A checkpoint holds no pending gradients. A callback that decides by steps or by time decides the same at
    the next batch, so the hook of the window's last batch saves what was due. (Lightning's
    ``ModelCheckpoint`` would also save within the first window after a resume, since it forgets its last
    save.)

    HACK: the hook is shadowed by an attribute of the callback object, since Lightning offers no condition for
    it and the Trainer's list of callbacks has to stay complete; :meth:`remove` deletes the attribute.
    """

    def __init__(self, callbacks: Iterable[Checkpoint], window_open: Callable[[], bool]) -> None:
        self._callbacks = list(callbacks)
        for callback in self._callbacks:
            setattr(callback, _HOOK, _held_back(getattr(type(callback), _HOOK).__get__(callback), window_open))

    def remove(self) -> None:
        """Give every callback its own hook back."""
        for callback in self._callbacks:
            vars(callback).pop(_HOOK, None)
        self._callbacks = []


def _held_back(hook: Callable[..., None], window_open: Callable[[], bool]) -> Callable[..., None]:
    def on_train_batch_end(*args: Any, **kwargs: Any) -> None:
        if not window_open():
            hook(*args, **kwargs)

    return on_train_batch_end
