"""The small training runs in plain Python and plain PyTorch."""

from __future__ import annotations

import torch

from support.lightning_data import batch_value
from support.lightning_model import LR, MOMENTUM, START


def weights_after(gradients: list[list[float]]) -> list[list[float]]:
    """The weights after each update of SGD with these gradients, in fp64, without a learning-rate schedule."""
    weights, velocity, result = list(START), [0.0] * len(START), []
    for gradient in gradients:
        velocity = [MOMENTUM * v + g for v, g in zip(velocity, gradient, strict=True)]
        weights = [w - LR * v for w, v in zip(weights, velocity, strict=True)]
        result.append(weights)
    return result


def reference(windows: list[list[int]]) -> list[list[float]]:
    """Plain PyTorch: the weights after each update with the mean gradient of these batches; none, no update."""
    weights = torch.nn.Parameter(torch.tensor(START))
    optimizer = torch.optim.SGD([weights], lr=LR, momentum=MOMENTUM)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.5 ** (update // 2))
    after = []
    for window in windows:
        if window:
            batches = [batch_value(index, rank) for index in window for rank in (0, 1)]
            weights.grad = torch.stack(batches).mean(0)
            optimizer.step()
            schedule.step()
        after.append(weights.tolist())
    return after
