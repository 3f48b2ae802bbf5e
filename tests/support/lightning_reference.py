"""The small training runs in plain Python."""

from __future__ import annotations

from support.lightning_model import LR, MOMENTUM, START


def weights_after(gradients: list[list[float]]) -> list[list[float]]:
    """The weights after each update of SGD with these gradients, in fp64, without a learning-rate schedule."""
    weights, velocity, result = list(START), [0.0] * len(START), []
    for gradient in gradients:
        velocity = [MOMENTUM * v + g for v, g in zip(velocity, gradient, strict=True)]
        weights = [w - LR * v for w, v in zip(weights, velocity, strict=True)]
        result.append(weights)
    return result
