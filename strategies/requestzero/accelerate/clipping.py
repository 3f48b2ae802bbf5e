"""``accelerator.clip_grad_norm_``: the norm of a window that waits for its step, and clipping in that step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from requestzero.zero.engine import RequestZeROEngine


class Clipping:
    """The norm at which the next step clips.

    Args:
        configured: ``gradient_clipping`` of the DeepSpeed config, 0 for none; ``None``: it leaves that to
            ``clip_grad_norm_``, as a loop without DeepSpeed does.
    """

    def __init__(self, configured: float | None) -> None:
        self._configured = configured
        self._asked: float | None = None

    def ask(self, max_norm: float) -> None:
        """Let the next step clip at ``max_norm``; infinity changes nothing.

        Raises:
            ValueError: not a positive number, or another one than the configured.
        """
        if not max_norm > 0:
            raise ValueError(f"clip_grad_norm_(max_norm={max_norm!r}) is not allowed: use a positive number.")
        if math.isinf(max_norm):
            return
        if self._configured not in (None, max_norm):
            raise ValueError(
                f"clip_grad_norm_(max_norm={max_norm!r}) contradicts gradient_clipping={self._configured!r} of the "
                "DeepSpeed config, at which the step clips: use the same value, or set gradient_clipping to 'auto' "
                "there."
            )
        self._asked = max_norm

    @contextmanager
    def applied(self, engine: RequestZeROEngine) -> Iterator[None]:
        """Let the engine's step clip as was asked while the block runs, and forget it then."""
        optimizer = engine.optimizer
        saved = optimizer.clip_grad
        if self._asked is not None:
            optimizer.clip_grad = self._asked
        try:
            yield
        finally:
            optimizer.clip_grad = saved
            self._asked = None


def check_parameters(engine: RequestZeROEngine, parameters: torch.Tensor | Iterable[torch.Tensor]) -> None:
    """Raise ValueError unless these are all trainable parameters of the engine's model: the step clips all of them."""
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    wanted = {id(parameter) for parameter in engine.module.parameters() if parameter.requires_grad}
    found = {id(parameter) for parameter in given if parameter.requires_grad}
    if found != wanted:
        raise ValueError(
            f"clip_grad_norm_ got {len(found & wanted)} of the model's {len(wanted)} trainable parameters and "
            f"{len(found - wanted)} others, but ZeRO clips the gradient as a whole: give model.parameters()."
        )
