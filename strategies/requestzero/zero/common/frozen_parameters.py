"""Parameters that are frozen: kept still by the step, and refused where ZeRO has left them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import ref

import torch


class HasBackwards(Protocol):
    """An optimizer of DeepSpeed's."""

    _backward_active_depth: int
    """Above 0 while a backward of its engine runs."""


def refuse_gradients(
    params: Iterable[torch.nn.Parameter], names: Mapping[torch.Tensor, str], optimizer: HasBackwards
) -> None:
    """Let the first gradient of a parameter that the user's optimizer has, and ZeRO not, be an error.

    DeepSpeed leaves out what is frozen when the engine is built. Unfrozen later it would never be trained.

    Args:
        params: of the user's optimizer; those that are not frozen are passed over.
        names: of parameters.
        optimizer: only its backwards are refused, as the parameters may be trained without it later.
    """
    for param in params:
        if param.is_leaf and not param.requires_grad and param.is_floating_point():
            param.requires_grad_(True)  # autograd takes hooks for such parameters only, and keeps them
            param.register_post_accumulate_grad_hook(_refusal(names.get(param, ""), ref(optimizer)))
            param.requires_grad_(False)


def _refusal(name: str, optimizer: Callable[[], HasBackwards | None]) -> Callable[[torch.Tensor], None]:
    def refuse(_: torch.Tensor) -> None:
        running = optimizer()
        if running is None or running._backward_active_depth == 0:
            return
        raise RuntimeError(
            f"Parameter {name!r} was frozen when the engine was built, so ZeRO has left it out of the optimizer: it "
            "has a gradient now and would never be trained. Let it require grad when the engine is built, and freeze "
            "it right afterwards (in Lightning in on_train_start): it then stays as it is."
        )

    return refuse


@contextmanager
def kept_still(
    places: Sequence[tuple[int, int]], master: torch.Tensor, states: Mapping[torch.Tensor, dict[str, Any]]
) -> Iterator[None]:
    """Around an update: what is frozen keeps its master weights and optimizer state, as under plain PyTorch.

    Without it momentum and weight decay would go on, since flat master weights are updated as a whole.

    Args:
        places: offset and size of every frozen parameter in the master weights, in elements.
        master: flat master weights.
        states: the optimizer's; the update may add to them.
    """
    if not places:
        yield
        return

    def tensors() -> dict[str, torch.Tensor]:
        state = states.get(master, {})
        found = {name: value for name, value in state.items() if torch.is_tensor(value) and value.shape == master.shape}
        return {"": master.detach(), **found}

    before = {name: [tensor.narrow(0, *place).clone() for place in places] for name, tensor in tensors().items()}
    yield
    for name, tensor in tensors().items():
        for number, place in enumerate(places):
            # State that this update has made is that of a parameter without an update.
            if name in before:
                tensor.narrow(0, *place).copy_(before[name][number])
            else:
                tensor.narrow(0, *place).zero_()
