"""The choice of how a 16-bit model's matrix products are computed on this processor."""

from __future__ import annotations

from typing import Any

from requestzero.config.precision import PRECISIONS

FP32 = "fp32"


def choose_matmuls(precision: Any, accelerator: str) -> tuple[bool, str]:
    """Return true for products in fp32, and a line that says so and why; empty where there is nothing to choose.

    Args:
        precision: the section ``precision``. Its ``auto`` measures, which takes less than a second.
        accelerator: ``"cpu"`` or ``"gpu"``.
    """
    model = PRECISIONS[precision.mode]
    if accelerator != "cpu" or model == FP32:
        return False, ""
    if precision.matmuls != "auto":
        chosen = FP32 if precision.matmuls == FP32 else model
        return chosen == FP32, f"Matrix products of the {model} model: in {chosen}, as configured."
    import torch

    from requestzero.environment.matmul_speed import measure_matmuls

    speed = measure_matmuls({"bf16": torch.bfloat16, "fp16": torch.float16}[model])
    if speed.prefers_fp32:
        return True, f"Matrix products of the {model} model: in fp32 ({speed}). precision.matmuls=model for {model}."
    return False, f"Matrix products of the {model} model: in {model} ({speed})."
