"""Check the divisor that ``engine.step`` is asked for. Torch and DeepSpeed are not imported."""

from __future__ import annotations

from typing import Any

from requestzero.config.option_record import options_of
from requestzero.config.options import RequestZeROSettings


def check_normalization(normalization: Any, divisor: Any, accumulation_steps: int) -> None:
    """Raise ValueError for a normalization that is not allowed, or that is not all that divides.

    Args:
        normalization: see :class:`~requestzero.config.options.RequestZeROSettings`; ``None``: not asked for.
        divisor: the one that was given beside it, or ``None``.
        accumulation_steps: ``gradient_accumulation_steps`` of the engine, by which DeepSpeed divides every loss.
    """
    if normalization is None:
        return
    text = options_of(RequestZeROSettings)["normalization"].problem(normalization)
    if text is not None:
        raise ValueError(text)
    if divisor is not None:
        raise ValueError(
            f"step() got divisor={divisor!r} and normalization={normalization!r}, which chooses the divisor: give one "
            "of them."
        )
    if accumulation_steps != 1:
        raise ValueError(
            f"step(normalization={normalization!r}) divides once, but gradient_accumulation_steps={accumulation_steps} "
            "makes DeepSpeed divide every loss too: set it to 1 and mark the ends of requests with "
            "set_gradient_accumulation_boundary(), or give step(divisor=...) what is left to divide by."
        )
