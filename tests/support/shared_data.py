"""Windows of rows that any number of ranks shares out, whose updates are the same in every bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from support.windows import ALL, values

ROWS = 12
"""In a window; for one to four ranks."""


def run_rows(engine: Any, window: int, rows: range = range(ROWS)) -> None:
    """Run the rows of a window, each a request of one micro-batch and of weight 1, dealt out to the ranks."""
    import deepspeed.comm as dist

    for row in rows[dist.get_rank() :: dist.get_world_size()]:
        x, w = values(window * ROWS + row, 0, 1)
        dtype = next(engine.module.parameters()).dtype
        x = x * ROWS * ROWS  # so that the mean over ranks and that over rows are exact
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(x.to(engine.device, dtype), w.to(engine.device, dtype), ALL), weight=1.0)


def whole_states(engine: Any) -> list[dict[str, torch.Tensor]]:
    """Return every parameter's whole master weight and optimizer state at stages 1 and 2, on the CPU (collective)."""
    import torch.distributed as dist

    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, list(_own_parts(engine.optimizer)))
    found: list[dict[str, torch.Tensor]] = [{} for _ in engine.optimizer.layout.params]
    for param_id, key, start, part in (part for rank in parts for part in rank):
        whole = torch.zeros(engine.optimizer.layout.params[param_id].numel())
        found[param_id].setdefault(key, whole)[start : start + part.numel()] = part
    return found


def _own_parts(optimizer: Any) -> Iterator[tuple[int, str, int, torch.Tensor]]:
    for group in optimizer.layout.groups:
        flat = optimizer.single_partition_of_fp32_groups[group.index]
        for key, value in {"master": flat, **optimizer.optimizer.state[flat]}.items():
            for param_id, place in group.owned.items():
                if value.numel() == flat.numel():  # not the number of steps
                    yield param_id, key, place.start, value[place.offset :][: place.numel].detach().cpu()
