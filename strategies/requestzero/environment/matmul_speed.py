"""Speed of this processor's matrix products in 16 bits against fp32, measured: its list of features does not tell."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

CLEARLY = 1.5
"""Ratio above which 16-bit products are given up. Processors with 16-bit units have 0.2 to 0.5, others 2.4 to 20."""
LAYER = (512, 128, 512)
"""Tokens, inputs and outputs of the linear layer that is measured unless another one is given."""
_REPEATS = 5


@dataclass(frozen=True)
class MatmulSpeed:
    """CPU seconds of a small linear layer's forward and backward, the best of a few: other processes do not count."""

    dtype: torch.dtype
    """The 16-bit dtype that was measured."""
    sixteen_bit_seconds: float
    fp32_seconds: float

    @property
    def ratio(self) -> float:
        """Time in 16 bits, divided by that in fp32."""
        return self.sixteen_bit_seconds / self.fp32_seconds

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name} takes {self.ratio:.1f} times as long as fp32 on this processor, measured"

    @property
    def prefers_fp32(self) -> bool:
        """True if 16-bit products are clearly slower."""
        return self.ratio > CLEARLY


def measure_matmuls(dtype: torch.dtype, layer: tuple[int, int, int] = LAYER) -> MatmulSpeed:
    """Measure on the CPU, with one thread; takes less than a second.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        layer: tokens, inputs and outputs of a linear layer.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # other threads may be busy, which would count for the dtype that has met them
    try:
        pairs = [(_seconds(dtype, layer), _seconds(torch.float32, layer)) for _ in range(_REPEATS)]
    finally:
        torch.set_num_threads(threads)
    return MatmulSpeed(dtype, min(pair[0] for pair in pairs), min(pair[1] for pair in pairs))


def _seconds(dtype: torch.dtype, layer: tuple[int, int, int]) -> float:
    tokens, inputs, outputs = layer
    x = torch.ones(tokens, inputs, dtype=dtype, requires_grad=True)
    weight = torch.ones(outputs, inputs, dtype=dtype, requires_grad=True)
    gradient = torch.ones(tokens, outputs, dtype=dtype)
    begun = time.thread_time()
    torch.nn.functional.linear(x, weight).backward(gradient)
    return time.thread_time() - begun
