"""The training in which a fault happens: stage, place, precision, saves within windows, requests that are aborted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

REQUESTS = (2, 1)
"""Micro-batches per rank of the requests of an update."""
CLIPPING = 0.5
"""Largest norm of an update's gradient: with it the norm of a window counts too."""


class Precision(Enum):
    """Of the model, and of the sums."""

    FP32 = "fp32"
    BF16 = "bf16"
    BF16_FP32_SUMS = "bf16 with fp32 sums"


@dataclass(frozen=True)
class Setup:
    """One training, whatever its front end."""

    stage: int
    """Of ZeRO."""
    offload: bool = False
    """Of the optimizer."""
    precision: Precision = Precision.FP32
    saves_inside: bool = False
    """A checkpoint is saved after every request, and not only after every update."""
    aborts: bool = False
    """In every window one more request comes, which a rank aborts."""
    reduces_per_request: bool = False
    """Stage 1, which else reduces once per window, as early as saves within windows and aborts let it."""

    @property
    def requests_per_update(self) -> int:
        """Requests that come in a window, applied or not."""
        return len(REQUESTS) + self.aborts

    @property
    def place_step(self) -> int:
        """Requests between two checkpoints."""
        return 1 if self.saves_inside else self.requests_per_update

    @property
    def is_half(self) -> bool:
        """True for a 16-bit model."""
        return self.precision is not Precision.FP32

    def aborted_request(self, window: int) -> int | None:
        """Return the place, in the window of this number, of the request that a rank aborts: another in each."""
        return (window + 2) % self.requests_per_update if self.aborts else None

    def reference(self) -> Setup:
        """Return the training of the same bits in which nothing is aborted, and nothing is saved within a window."""
        early = self.stage == 1 and (self.saves_inside or self.aborts or self.reduces_per_request)
        return replace(self, saves_inside=False, aborts=False, reduces_per_request=early)

    def config(self) -> dict[str, Any]:
        """Return the DeepSpeed config, without dtype and clipping, for which front ends have arguments."""
        zero: dict[str, Any] = {"stage": self.stage}
        if self.stage == 3:
            zero["stage3_param_persistence_threshold"] = 0  # or nothing of so small a model is gathered
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        if self.offload:
            config["zero_force_ds_cpu_optimizer"] = False
        if self.precision is Precision.BF16_FP32_SUMS:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        own = {"abort": True} if self.aborts else {}
        if self.reduces_per_request:
            own["reduce_gradients_at"] = "request"  # type: ignore[assignment]
        return config | ({"requestzero": own} if own else {})

    def __str__(self) -> str:
        parts = [f"ZeRO {self.stage}", *(["offload"] if self.offload else [])]
        parts += [self.precision.value] if self.is_half else []
        parts += ["saves within windows"] if self.saves_inside else []
        parts += ["aborts"] if self.aborts else []
        return ", ".join(parts + (["reduces per request"] if self.reduces_per_request else []))
