"""The check of ``step(divisor=...)``."""

from __future__ import annotations

from numbers import Real

import torch

from requestzero.zero.common.window import UpdateWindow


def check_divisor(divisor: object, window: UpdateWindow, drops_requests: bool) -> None:
    """Raise unless ``divisor`` can divide the open window's sum.

    Args:
        divisor: as the caller gave it.
        window: the open window.
        drops_requests: requests may be dropped at their end (``on_overflow="drop_request"``).

    Raises:
        ValueError: not a positive finite number; allowed where every request of the window was dropped.
        RuntimeError: a request is open that may yet be dropped, and its micro-batches with it.
    """
    number = isinstance(divisor, Real) and not isinstance(divisor, bool)
    fp32 = torch.finfo(torch.float32)
    nothing_left = bool(window.dropped) and not window.has_sum
    if not (number and (nothing_left or fp32.tiny <= divisor <= fp32.max)):  # type: ignore[operator]
        raise ValueError(
            f"divisor={divisor!r} is not allowed: use a positive finite number in fp32's range, the same on all ranks."
        )
    if window.request_open and divisor != 1 and drops_requests:
        raise RuntimeError(
            f"step(divisor={divisor!r}) with an open request, which may yet be dropped, and its micro-batches with "
            "it: call engine.end_request() first, then take the divisor from engine.update_window."
        )
