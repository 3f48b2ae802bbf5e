"""Callbacks of Lightning's that refuse ``DeepSpeedStrategy``: those that work at stages 1 and 2 are let in.

Written for Lightning 2.6.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from lightning.pytorch import Callback, strategies
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    WeightAveraging,
    stochastic_weight_avg,
)
from lightning.pytorch.callbacks.stochastic_weight_avg import StochasticWeightAveraging

from requestzero.lightning.checkpointing import check_saves_weights_only
from requestzero.zero.patch import patched

_CHECKS: dict[type[Callback], tuple[str, ModuleType]] = {
    GradientAccumulationScheduler: ("on_train_start", strategies),
    StochasticWeightAveraging: ("setup", stochastic_weight_avg),
}
"""The hook that asks for the strategy's type, and the module in which it looks that type up."""


class _NoStrategy:
    """No strategy is of this type."""


def check_callbacks(callbacks: Iterable[Callback], stage: int) -> None:
    """Raise ValueError for a callback that ZeRO cannot serve."""
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.save_weights_only:
            check_saves_weights_only(stage)
        if stage == 3 and isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ValueError(
                f"{type(callback).__name__} is not possible at stage 3: it averages whole weights, and every rank "
                "holds a part of each: leave it out, or use stage 1 or 2."
            )
        if isinstance(callback, BaseFinetuning):
            raise ValueError(
                f"{type(callback).__name__} adds parameters to the optimizer in the middle of a fit, and ZeRO lays out "
                "the partitions of all parameters when the fit begins: leave it out, give the optimizer all "
                "parameters, freeze them in on_train_start (parameter.requires_grad_(False)) and unfreeze them when "
                "you like. A frozen parameter stays as it is."
            )


def let_in(callbacks: Iterable[Callback]) -> None:
    """Keep a callback's check of the strategy's type from refusing what works.

    HACK: the hook is shadowed by an attribute of the callback object, in which the name of the type that it asks for is
    replaced: Lightning has no other way around the check. :func:`let_go` deletes the attribute.
    """
    for callback in callbacks:
        for kind, (hook, module) in _CHECKS.items():
            if isinstance(callback, kind):
                setattr(callback, hook, _unchecked(getattr(type(callback), hook).__get__(callback), module))


def let_go(callbacks: Iterable[Callback]) -> None:
    """Give every callback its own hooks back."""
    for callback in callbacks:
        for kind, (hook, _) in _CHECKS.items():
            if isinstance(callback, kind):
                vars(callback).pop(hook, None)


def _unchecked(hook: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def unchecked(*args: Any, **kwargs: Any) -> Any:
        with patched(module, "DeepSpeedStrategy", _NoStrategy):
            return hook(*args, **kwargs)

    return unchecked
