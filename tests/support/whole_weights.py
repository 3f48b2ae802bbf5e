"""Whole weights of a model, at every stage."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch


def whole(params: Iterable[torch.nn.Parameter]) -> Any:
    """A block in which these are whole on every rank, which they always are but at stage 3 (collective there)."""
    import deepspeed

    params = list(params)
    sharded = any(hasattr(param, "ds_id") for param in params)
    return deepspeed.zero.GatheredParameters(params) if sharded else nullcontext()


def copies(model: torch.nn.Module) -> list[torch.Tensor]:
    """Whole weights, as they are now."""
    with whole(model.parameters()):
        return [param.detach().clone() for param in model.parameters()]
