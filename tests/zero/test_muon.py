"""Muon: the window's divided sum meets the momentum once, in every dtype, for matrices split over ranks as well."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from support.engines import module_weights
from support.grid import PLACES, every_place, every_sum
from support.muon import Matrices, batch, build_muon, momentum
from support.ranks import RankGroup


def muon_groups(engine: Any) -> list[int]:
    optimizer = engine.optimizer
    return [i for i, group in enumerate(optimizer.bit16_groups) if getattr(group[0], "use_muon", False)]


def is_split(engine: Any) -> bool:
    return any(len(ids) > 1 for i in muon_groups(engine) for ids in engine.optimizer.param_to_partition_ids[i].values())


def keep_vectors_apart() -> Any:
    """Mend what DeepSpeed's own loses: see ``test_no_vector_is_lost_beside_a_matrix``."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    original = DeepSpeedZeroOptimizer._get_compact_grad_partition_slice

    def mended(self: Any, group_idx: int, partition_id: int, param_id: int, numel: int) -> Any:
        output = original(self, group_idx, partition_id, param_id, numel)
        return torch.zeros(int(numel), device=self.bit16_groups_flat[0].device) if output is None else output

    return patch.object(DeepSpeedZeroOptimizer, "_get_compact_grad_partition_slice", mended)


def three_updates(
    stage: int, offload: bool, model: str, accum: str, requestzero: bool
) -> tuple[list[torch.Tensor], float]:
    """Three updates of two requests: here as requests, on DeepSpeed's own as one request of two micro-batches."""
    with nullcontext() if requestzero else keep_vectors_apart():
        return _three_updates(stage, offload, model, accum, requestzero)


def _three_updates(
    stage: int, offload: bool, model: str, accum: str, requestzero: bool
) -> tuple[list[torch.Tensor], float]:
    engine = build_muon(stage, offload, model, accum, requestzero)
    assert muon_groups(engine)
    assert is_split(engine)
    for step in range(3):
        for request in range(2):
            engine.set_gradient_accumulation_boundary(requestzero or request == 1)
            loss = engine(batch(engine, step, request))
            engine.backward(loss if requestzero else loss / 2)
        engine.step(**({"divisor": 2.0} if requestzero else {}))
    result = module_weights(engine), float(engine.get_global_grad_norm())
    engine.destroy()
    return result


@every_place
@every_sum
def test_muon_sees_the_windows_divided_sum_once(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str
) -> None:
    if (stage, offload, model, accum) == (1, False, "bf16", "fp32"):
        stage = 2  # DeepSpeed's own is its BF16_Optimizer there; this class is compared at stage 2
    ours = two_ranks.run(three_updates, stage, offload, model, accum, True)[0]
    stock = two_ranks.run(three_updates, stage, offload, model, accum, False)[0]
    # The norm, by which both clip, is added up in another order; bf16 weights are rounded.
    tolerance = 1e-5 if model == "fp32" else 8e-3
    for a, b in zip(ours[0], stock[0], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
    assert ours[1] == pytest.approx(stock[1], rel=1e-5)


def vectors(stage: int, offload: bool, comm_dtype: str | None, requestzero: bool) -> list[torch.Tensor]:
    """After one backward, the gradient of every vector less what plain PyTorch gives for the mean over ranks."""
    import deepspeed.comm as dist
    from deepspeed.utils import safe_get_full_grad

    config = {"communication_data_type": comm_dtype} if comm_dtype else {}
    engine = build_muon(stage, offload, "bf16", "fp32", requestzero, **config)
    plain = Matrices().to(engine.device, torch.bfloat16)
    plain(batch(engine, 0, 0)).backward()
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(batch(engine, 0, 0)))
    differences = []
    for param, reference in zip(engine.module.parameters(), plain.parameters(), strict=True):
        if param.dim() == 1:
            mean = reference.grad.float() / dist.get_world_size()
            dist.all_reduce(mean)
            differences.append((safe_get_full_grad(param).float() - mean).cpu())
    engine.destroy()
    return differences


@every_place
@pytest.mark.parametrize("comm_dtype", [None, "fp32"])
def test_no_vector_is_lost_beside_a_matrix(
    two_ranks: RankGroup, stage: int, offload: bool, comm_dtype: str | None
) -> None:
    """Matrices and vectors share a bucket, and only the vectors have a flat fp32 partition."""
    for differences in two_ranks.run(vectors, stage, offload, comm_dtype, True):
        assert all(d.abs().max() == 0 for d in differences)


def test_stock_loses_a_vector_beside_a_matrix(two_ranks: RankGroup) -> None:
    """This can fail: DeepSpeed's own reduces the last vector with the matrix after it, and adds it to no sum.

    The vector comes before the matrix: PyTorch's linear function gives a bias its gradient before the weight.
    """
    differences = two_ranks.run(vectors, 2, True, None, False)[0]
    assert differences[-1].abs().max() > 5e-2


def requests_or_one(stage: int, offload: bool, model: str, accum: str, one_request: bool) -> list[torch.Tensor]:
    """Two updates of three micro-batches, each a request of its own, or all of them one request."""
    engine = build_muon(stage, offload, model, accum)
    for step in range(2):
        for request in range(3):
            engine.set_gradient_accumulation_boundary(request == 2 or not one_request)
            engine.backward(engine(batch(engine, step, request)))
        engine.step()
    result = module_weights(engine) + momentum(engine)
    engine.destroy()
    return result


@every_place
@every_sum
def test_where_requests_end_does_not_matter(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str
) -> None:
    several = two_ranks.run(requests_or_one, stage, offload, model, accum, False)
    one = two_ranks.run(requests_or_one, stage, offload, model, accum, True)
    for a, b in zip(several, one, strict=True):
        assert len(a) == len(b) > 6
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y)


def poisoned_window(stage: int, offload: bool, model: str, accum: str) -> None:
    engine = build_muon(stage, offload, model, accum)

    def window(poison: bool = False) -> None:
        for request in range(2):
            engine.set_gradient_accumulation_boundary(True)
            x = batch(engine, 0, request)
            engine.backward(engine(x * float("nan") if poison and request == 0 else x))
        engine.step()

    window()
    before = module_weights(engine) + momentum(engine)
    window(poison=True)
    assert not engine.was_step_applied()
    assert all(torch.equal(a, b) for a, b in zip(before, module_weights(engine) + momentum(engine), strict=True))
    assert len(before) > 6
    window()
    assert engine.was_step_applied()
    after = module_weights(engine) + momentum(engine)
    engine.destroy()
    twin = build_muon(stage, offload, model, accum)
    for _ in range(2):
        for request in range(2):
            twin.set_gradient_accumulation_boundary(True)
            twin.backward(twin(batch(twin, 0, request)))
        twin.step()
    assert all(torch.equal(a, b) for a, b in zip(after, module_weights(twin) + momentum(twin), strict=True))
    twin.destroy()


@every_place
@every_sum
def test_a_window_that_is_not_finite_leaves_the_momentum(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str
) -> None:
    two_ranks.run(poisoned_window, stage, offload, model, accum)


def absent_matrix(stage: int, offload: bool, model: str, accum: str, requests: int) -> list[torch.Tensor]:
    """A window with all matrices, then one without ``b``: its gradient is zero there, whatever came before."""
    engine = build_muon(stage, offload, model, accum)
    for step, use_b in enumerate((True, False)):
        for request in range(requests):
            engine.set_gradient_accumulation_boundary(request == requests - 1)
            engine.backward(engine(batch(engine, step, request), use_b))
        before = engine.module.b.weight.detach().float().clone()
        engine.step()
        assert engine.was_step_applied()
    # Zero gradient, momentum from the first window: Muon goes on along it, orthogonalised.
    change = (before - engine.module.b.weight.detach().float()).cpu()
    result = [change, *momentum(engine)]
    engine.destroy()
    return result


def test_an_absent_matrix_has_a_zero_gradient(two_ranks: RankGroup) -> None:
    """On every place the same, and what the momentum alone gives."""
    changes = {}
    for stage, offload in PLACES:
        changes[stage, offload] = two_ranks.run(absent_matrix, stage, offload, "fp32", "fp32", 2)[0][0]
    first = changes[1, False]
    assert first.any()
    for change in changes.values():
        torch.testing.assert_close(change, first, rtol=0, atol=1e-5)
