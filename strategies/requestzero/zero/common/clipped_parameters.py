"""The parameters that a loop asks to clip, compared with those of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class TrainsParameters(Protocol):
    """An engine: its optimizer has a ``layout`` of the parameters whose gradients it keeps."""

    @property
    def optimizer(self) -> Any: ...

    @property
    def module(self) -> Any: ...


def without_local(engine: TrainsParameters, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters without those that the model trains beside the engine's optimizer.

    Their gradients are those of one rank alone, by which ranks would clip differently.
    """
    kept = {id(parameter) for parameter in engine.optimizer.layout.params}
    local = {id(parameter) for parameter in engine.module.parameters()} - kept
    return [parameter for parameter in given if id(parameter) not in local]


def are_all(engine: TrainsParameters, given: Sequence[torch.Tensor]) -> bool:
    """Return whether the gradients of these parameters are those that the engine's step clips."""
    kept = {id(parameter) for parameter in engine.optimizer.layout.params if parameter.requires_grad}
    others = {id(parameter) for parameter in given if parameter.grad is not None}
    return kept | others == kept and kept <= {id(parameter) for parameter in given}
