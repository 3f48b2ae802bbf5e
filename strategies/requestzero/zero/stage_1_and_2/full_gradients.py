"""``safe_get_full_grad`` and ``safe_set_full_grad`` of parameters whose gradients are not reduced yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from requestzero.zero.stage_1_and_2.layout import Parameter


def complete_before_access(
    params: Iterable[Parameter], reduce: Callable[[], None], drop: Callable[[Parameter], None]
) -> None:
    """Let users read and write the window's sum at any time.

    # HACK: DeepSpeed 0.19.8 gives every parameter the methods that those functions call. They are wrapped, for each
    # parameter, since nothing else is called on all ranks there.

    Args:
        params: with DeepSpeed's methods.
        reduce: reduces what waits. Called before a gradient is read, which is collective anyway.
        drop: drops what waits on a parameter. Called before its sum is set.
    """
    for param in params:
        param.get_full_hp_grad = _reading(param.get_full_hp_grad, reduce)  # type: ignore[attr-defined]
        param.set_full_hp_grad = _writing(param.set_full_hp_grad, param, drop)  # type: ignore[attr-defined]


def _reading(get: Callable[[], torch.Tensor], reduce: Callable[[], None]) -> Callable[[], torch.Tensor]:
    def get_full_hp_grad() -> torch.Tensor:
        reduce()
        return get()

    return get_full_hp_grad


def _writing(set_: Callable[[Any], None], param: Parameter, drop: Callable[[Parameter], None]) -> Callable[[Any], None]:
    def set_full_hp_grad(value: Any) -> None:
        drop(param)
        set_(value)

    return set_full_hp_grad
