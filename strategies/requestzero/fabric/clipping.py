"""The check of ``fabric.clip_gradients(error_if_nonfinite=True)``."""

from __future__ import annotations

import torch


def check_finite(norm: torch.Tensor) -> None:
    """Raise RuntimeError for a norm that is not finite, as PyTorch does. Reads it, which waits for the device."""
    if not bool(norm.isfinite()):
        raise RuntimeError(
            f"clip_gradients: the norm of the window's gradient is {float(norm)}. Give error_if_nonfinite=False to let "
            "the overflow policy decide in the step."
        )
