"""The metrics of an update that the loggers of every front end get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from requestzero.zero.engine import RequestZeROEngine


def logged_metrics(engine: RequestZeROEngine) -> dict[str, Any]:
    """Return counts until now and the gradient norm of the last update, without waiting for the device.

    ``overflow/skipped_updates``, ``overflow/dropped_requests`` and ``requests/aborted`` count from the start of the
    training, ``overflow/consecutive`` the skips since the last applied update; ``overflow/loss_scale`` is that of the
    next window (1 outside fp16). ``grad_norm`` is infinite for a skipped update, left out where it is not known, and a
    scalar on the device where the step had no need to read it.
    """
    norm = engine.get_global_grad_norm()
    return {
        "overflow/skipped_updates": float(engine.skipped_updates),
        "overflow/consecutive": float(engine.consecutive_skips),
        "overflow/dropped_requests": float(engine.dropped_requests),
        "requests/aborted": float(engine.aborted_requests),
        "overflow/loss_scale": float(engine.current_loss_scale),
        **({} if norm is None else {"grad_norm": norm}),
    }
