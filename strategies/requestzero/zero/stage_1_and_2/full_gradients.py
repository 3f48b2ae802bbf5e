"""``safe_get_full_grad`` and ``safe_set_full_grad``: what has to happen before a user reads or writes the window's sum.

# HACK: DeepSpeed 0.19.8 gives every parameter the methods that those functions call. They are wrapped, for each
# parameter, since nothing else is called on all ranks there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from requestzero.zero.stage_1_and_2.layout import Parameter


def before_reading(params: Iterable[Parameter], prepare: Callable[[], None]) -> None:
    """Call ``prepare`` before a gradient is read, which is collective anyway.

    Args:
        params: with DeepSpeed's methods.
        prepare: completes the sums.
    """
    for param in params:
        param.get_full_hp_grad = _reading(param.get_full_hp_grad, prepare)  # type: ignore[attr-defined]


def before_writing(params: Iterable[Parameter], prepare: Callable[[Parameter], None]) -> None:
    """Call ``prepare`` before the sum of a parameter is set, also on a rank that owns nothing of it.

    Args:
        params: with DeepSpeed's methods.
        prepare: is given the parameter.
    """
    for param in params:
        param.set_full_hp_grad = _writing(param.set_full_hp_grad, param, prepare)  # type: ignore[attr-defined]


def _reading(get: Callable[[], torch.Tensor], prepare: Callable[[], None]) -> Callable[[], torch.Tensor]:
    def get_full_hp_grad() -> torch.Tensor:
        prepare()
        return get()

    return get_full_hp_grad


def _writing(
    set_: Callable[[Any], None], param: Parameter, prepare: Callable[[Parameter], None]
) -> Callable[[Any], None]:
    def set_full_hp_grad(value: Any) -> None:
        prepare(param)
        set_(value)

    return set_full_hp_grad
