"""SLURM's signal to save and requeue, which may come at any moment: it waits for the end of an open request.

Written for Lightning 2.6.6.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.rank_zero import rank_zero_info

_HANDLER = "_slurm_sigusr_handler_fn"


class DeferredRequeue:
    """Saves and requeues between requests, where Lightning's handler does so at once.

    The middle of a request, a backward or a step is no state to resume from.

    HACK: the handler is shadowed by an attribute of the connector before Lightning registers it, as there is no way to
    replace it; :meth:`remove` deletes the attribute.

    Args:
        connector: the Trainer's.
        busy: tells whether the signal has to wait: a batch is at work, a request is open, or there are several ranks,
            which it reaches at different moments.
    """

    def __init__(self, connector: _SignalConnector, busy: Callable[[], bool]) -> None:
        self._connector, self._busy = connector, busy
        self._handler: Callable[..., None] = getattr(type(connector), _HANDLER).__get__(connector)
        self.pending = False
        """True once the signal has come, until it is served."""
        setattr(connector, _HANDLER, self._receive)

    def _receive(self, signum: Any, frame: Any) -> None:
        if not self._busy():
            self._handler(signum, frame)
            return
        self.pending = True
        rank_zero_info("RequestZeRO saves for the auto-requeue at the end of the request.")

    def serve(self) -> None:
        """Save and requeue now, whether the signal has come to this rank or another one. Collective."""
        self.pending = False
        self._handler(signal.SIGUSR1, None)

    def remove(self) -> None:
        """Give the connector its own handler back."""
        vars(self._connector).pop(_HANDLER, None)
