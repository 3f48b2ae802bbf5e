"""SIGTERM, which may come to one rank alone and at any moment: all ranks end before the next batch.

Written for Lightning 2.6.6.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

_HANDLER = "_sigterm_notifier_fn"


class NotedSigterm:
    """Notes the signal, for the training loop to tell the other ranks.

    Lightning's handler broadcasts from rank 0 wherever the signal finds the rank. One that gets it alone waits there
    while the others wait for it in a reduction; and another one than rank 0 would tell nobody.

    HACK: the handler is shadowed by an attribute of the connector before Lightning registers it, as there is no way to
    replace it; :meth:`remove` deletes the attribute.

    Args:
        connector: the Trainer's.
    """

    def __init__(self, connector: _SignalConnector) -> None:
        self._connector = connector
        self.pending = False
        """True once the signal has come to this rank."""
        setattr(connector, _HANDLER, self._receive)

    def _receive(self, signum: Any, frame: Any) -> None:
        """Pass the signal on to ranks that this one has started, as Lightning does, and note it."""
        launcher = self._connector.trainer.strategy.launcher
        if launcher is not None and not self.pending:
            launcher.kill(signum)
        self.pending = True

    def serve(self) -> None:
        """Let Lightning end this rank, as after a signal of its own. To be called on all ranks."""
        self._connector.received_sigterm = True

    def remove(self) -> None:
        """Give the connector its own handler back."""
        vars(self._connector).pop(_HANDLER, None)
