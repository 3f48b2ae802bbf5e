"""The module's ``state_dict`` in a DeepSpeed checkpoint, as the hooks of a Lightning run have left it.

Written for Lightning 2.6.6, which has DeepSpeed save and load the module by itself: hooks see no ``state_dict``.
At stages 1 and 2 every rank has all weights; at stage 3 DeepSpeed loads them into the module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

CHANGED = "requestzero_state_dict_changed"
"""Key of a checkpoint whose ``state_dict`` is not the module's: its weights are not those of the master weights."""

_RESTORE = "_restore_from_bit16_weights"


def is_changed(state_dict: Mapping[str, Any], module: torch.nn.Module) -> bool:
    """Return whether a hook has replaced, left out or added something; no values are compared.

    Extra state counts by its key only: a module may make it anew at each call.
    """
    own = module.state_dict()
    if state_dict.keys() != own.keys():
        return True
    return any(_memory(state_dict[name]) != _memory(own[name]) for name in own if not _is_extra(name))


def has_extra_state(state_dict: Mapping[str, Any]) -> bool:
    """Return true if a module has put extra state into it."""
    return any(map(_is_extra, state_dict))


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def _memory(value: Any) -> Any:
    return (value.data_ptr(), value.shape, value.dtype) if isinstance(value, torch.Tensor) else id(value)


@contextmanager
def saving(engine: Any, state_dict: Mapping[str, Any]) -> Iterator[None]:
    """Let the engine save this in the place of its module's own ``state_dict`` within the block."""
    engine.module_state_dict = lambda *args, **kwargs: state_dict
    try:
        yield
    finally:
        del engine.module_state_dict


@contextmanager
def capturing(engine: Any) -> Iterator[dict[str, Any]]:
    """Let a load within the block put the module's state into the dictionary, and not into the module."""
    captured: dict[str, Any] = {}

    def capture(checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        captured["state_dict"] = checkpoint["module"]

    engine.load_module_state_dict = capture
    try:
        yield captured
    finally:
        del engine.load_module_state_dict


@contextmanager
def loading_parts(engine: Any) -> Iterator[dict[str, Any]]:
    """Let an engine of stage 3 load within the block into the module itself, whose parts hooks do not see.

    HACK: DeepSpeed 0.19.8 ends with a method that restores the master weights, which the optimizer of an engine for
    evaluation lacks, as it has none.
    """
    stub = {} if hasattr(engine.optimizer, _RESTORE) else {_RESTORE: lambda: None}
    vars(engine.optimizer).update(stub)
    try:
        yield {}
    finally:
        for name in stub:
            delattr(engine.optimizer, name)
