"""Blocks of requests that are aborted, under Accelerate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from requestzero import AbortRequest, DuplicateRequestError
from support.accelerate_loops import Loop, data, prepare, weights
from support.accelerate_state import fresh
from support.ranks import RankGroup
from support.setup import KEEP_OPTIMIZER

BAD = {1: AbortRequest("too long"), 3: KeyError("no data")}


def aborted_blocks(plugin: dict[str, Any], failing: tuple[int, ...]) -> tuple[list[float], float, list[int]]:
    """A window of five requests, two of which are left on some ranks; the weights, the counter, and what was raised."""
    loop = Loop(plugin={"hf_ds_config": KEEP_OPTIMIZER, "abort": True, **plugin}, schedule=False)
    with fresh():
        accelerator, model, optimizer, *_ = prepare(loop)
        used = accelerator.state.deepspeed_plugin
        requests, raised = used.requests(accelerator), []
        rows = data(5, 2)[accelerator.process_index :: 2]
        for number, row in enumerate(rows):
            try:
                with requests.request(f"r{number}", once=True):
                    if number in BAD and accelerator.process_index in failing:
                        raise BAD[number]
                    accelerator.backward(model(row[None].to(accelerator.device)))
            except KeyError:
                raised.append(number)
        with pytest.raises(DuplicateRequestError), requests.request("r0", once=True):
            pass
        assert requests.window.micro_batches == 3
        optimizer.step()
        optimizer.zero_grad()
        aborted = used.metrics(accelerator)["requests/aborted"]
        found = weights(accelerator, model)
        accelerator.free_memory()
        return found, aborted, raised


@pytest.mark.parametrize("failing", [(0, 1), (1,)])
@pytest.mark.parametrize(
    "plugin",
    [{"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 2, "offload_optimizer_device": "cpu"}, {"zero_stage": 3}],
    ids=str,
)
def test_the_other_blocks_are_applied(two_ranks: RankGroup, plugin: dict[str, Any], failing: tuple[int, ...]) -> None:
    rows = data(5, 2).view(5, 2, -1)[[0, 2, 4]]
    expected = torch.zeros(rows.shape[-1]) - 0.5 * (rows.mean(1).sum(0) / 3)
    for rank, (found, aborted, raised) in enumerate(two_ranks.run(aborted_blocks, plugin, failing)):
        assert torch.allclose(torch.tensor(found), expected, rtol=1e-6)
        assert (aborted, raised) == (2, [3] if rank in failing else [])
