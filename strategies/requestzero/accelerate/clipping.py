"""The check of what ``accelerator.clip_grad_norm_`` is given."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from requestzero.zero.engine import RequestZeROEngine


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
