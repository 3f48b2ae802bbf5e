"""Methods of a user's optimizer that exchange master weights for an evaluation, as schedule-free optimizers do."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch

_METHODS = ("train", "eval")


class MasterOwner(Protocol):
    """A ZeRO optimizer of any stage."""

    optimizer: torch.optim.Optimizer

    def exchanging_masters(self) -> AbstractContextManager[None]:
        """Let the model's weights follow the masters that the block changes (collective)."""
        ...


def follow_exchanges(zero: MasterOwner) -> None:
    """Let the model follow ``train`` and ``eval`` of the user's optimizer, whoever calls them; the ZeRO one gets them.

    They are collective from now on. The user's optimizer may outlive the engine, and does not keep it.
    """
    for name in _METHODS:
        method = getattr(zero.optimizer, name, None)
        if callable(method):
            following = partial(_exchange, weakref.ref(zero), method)
            setattr(zero.optimizer, name, following)
            setattr(zero, name, following)


def _exchange(owner: Callable[[], MasterOwner | None], method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    zero = owner()
    if zero is None:
        return method(*args, **kwargs)
    with zero.exchanging_masters():
        return method(*args, **kwargs)
