"""Sections of a DeepSpeed config that say what becomes of gradients that are not finite."""

from __future__ import annotations

from typing import Any

STATIC_FP16: dict[str, Any] = {"fp16": {"enabled": True, "loss_scale": 16.0}}
UNCHECKED_BF16: dict[str, Any] = {"bf16": {"enabled": True, "check_grad_overflow": False}}


def overflow_config(model: str, **policy: Any) -> dict[str, Any]:
    """A policy that takes effect for this dtype: gradients are checked, and fp16 has a static loss scale of 16."""
    if model == "fp32":
        return {"overflow": {"check_grad_overflow": True, **policy}}
    section = STATIC_FP16 if model == "fp16" else {model: {"enabled": True}}
    return {**section, "overflow": policy}


def fp16_masters(**policy: Any) -> dict[str, Any]:
    """fp16 master weights and host gradients, unscaled losses, and reduction in fp32.

    A sum that fp32 holds can be beyond the range of the host gradient.
    """
    section = {"enabled": True, "loss_scale": 1.0, "fp16_master_weights_and_grads": True}
    overflow = {"overflow": policy} if policy else {}
    return {"fp16": section, "communication_data_type": "fp32", **overflow}
