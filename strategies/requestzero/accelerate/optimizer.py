"""The optimizer that ``accelerator.prepare`` gives back.

Written for Accelerate 1.15.
"""

from __future__ import annotations

from typing import Any

from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper
from typing_extensions import override

from requestzero.accelerate.engine import RequestZeROEngineWrapper


class RequestZeROOptimizerWrapper(DeepSpeedOptimizerWrapper):
    """Steps and discards where Accelerate's wrapper does nothing.

    As Accelerate's optimizers do without DeepSpeed, it acts only where ``accelerator.sync_gradients`` is true.
    """

    def __init__(self, optimizer: Any, engine_wrapper: RequestZeROEngineWrapper) -> None:
        super().__init__(optimizer)
        self._engine_wrapper = engine_wrapper
        self._was_skipped = False

    @override
    def step(self, closure: Any = None) -> None:
        """Apply the open window, where ``sync_gradients`` is true. Collective. Accelerate's steps in ``backward``.

        Raises:
            ValueError: with a closure.
            RuntimeError: inside ``no_sync`` or inside a request.
        """
        if closure is not None:
            raise ValueError(
                "optimizer.step(closure) runs the backward itself, which ZeRO cannot: call accelerator.backward "
                "before, and step() without a closure."
            )
        if self.gradient_state.sync_gradients:
            self._engine_wrapper.step()
            self._was_skipped = not self._engine_wrapper.engine.was_step_applied()

    @override
    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Discard the open window, where ``sync_gradients`` is true; after a step there is none.

        Args:
            set_to_none: makes no difference.
        """
        if self.gradient_state.sync_gradients:
            self._engine_wrapper.engine.zero_grad()

    @property
    @override
    def step_was_skipped(self) -> bool:
        """True if the last step left the weights as they were: gradients that are not finite, or none at all.

        Accelerate's version reads the overflow flag only.
        """
        return self._was_skipped
