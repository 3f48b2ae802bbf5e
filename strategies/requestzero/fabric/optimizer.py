"""The optimizer that ``fabric.setup`` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

if TYPE_CHECKING:
    from requestzero.zero.engine import RequestZeROEngine


class FabricWindowOptimizer(torch.optim.Optimizer):
    """The optimizer of one engine, as a loop sees it.

    Fabric derives the class of its wrapper from this one, so that methods run with the wrapper as ``self``. They only
    read from it, and leave every change to the engine.

    Args:
        engine: whose windows are stepped and discarded.
        step: makes the update of an engine's window.
    """

    def __init__(self, engine: RequestZeROEngine, step: Callable[[RequestZeROEngine], None]) -> None:
        # Without super(), whose groups and state would be others than those of the ZeRO optimizer.
        self.engine, self._apply = engine, step

    @property
    def _zero(self) -> Any:
        return self.engine.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the ZeRO optimizer, whose learning rates schedulers set."""
        groups: list[dict[str, Any]] = self._zero.param_groups
        return groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the ZeRO optimizer."""
        return self._zero.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the user's optimizer."""
        return dict(self._zero.optimizer.defaults)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the ZeRO optimizer, or else of the user's."""
        if name.startswith("__") or "engine" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.engine.optimizer, name)

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Apply the open window, after a closure that may run backwards. Collective.

        Returns:
            What the closure returns.
        """
        result = None if closure is None else closure()
        self._apply(self.engine)
        return result

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the open window; after a step there is none."""
        self.engine.zero_grad()

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: partitions are laid out once.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "optimizer.add_param_group() is not possible with ZeRO, which lays out the partitions of all parameters in "
            "fabric.setup: give the optimizer all groups before it, and freeze those that are trained later after it."
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state, as DeepSpeed does."""
        state: dict[str, Any] = self._zero.state_dict()
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse: the parts of all ranks belong together.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "optimizer.load_state_dict() is not possible with ZeRO, whose state is in parts on all ranks: use "
            "fabric.load(path, {'model': model, 'optimizer': optimizer})."
        )
