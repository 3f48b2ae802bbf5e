"""The optimizer that manual optimization gets from ``self.optimizers()``.

Written for Lightning 2.6.6.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer


class WindowLightningOptimizer(LightningOptimizer):
    """Forwards the methods that change or read the optimizer's state.

    Lightning's wrapper derives its class from that of the optimizer, so these methods would run on the wrapper and
    leave their results there: ``zero_grad()`` would discard nothing.
    """

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Discard the open window."""
        self._optimizer.zero_grad(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the optimizer's state."""
        return self._optimizer.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the optimizer's state."""
        return self._optimizer.load_state_dict(*args, **kwargs)
