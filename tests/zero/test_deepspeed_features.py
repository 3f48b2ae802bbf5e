"""DeepSpeed's other features keep working, and mean the same over several requests."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from support.engines import build, flat_masters, masters, module_weights
from support.grid import every_place, every_sum
from support.models import OneWeight
from support.ranks import RankGroup
from support.setup import Setup
from support.updates import applied_by, assert_sums, difference
from support.windows import ALL, IN, LR, Layers, Micro, backward, inputs_of, reference

SOME = (True, False, True, True, False)


# --- other ways to drive a backward ---------------------------------------------------------------------------------


def coalesced(setup: Setup) -> None:
    engine = build(setup)
    for _ in range(2):
        micros = [Micro(ALL, 1), Micro(SOME, 2), Micro(SOME, 3), Micro(ALL, 4)]
        backward(engine, micros[0])
        for block in (micros[1:3], micros[3:]):
            with engine.coalesce_grad_reduction():
                for micro in block:
                    backward(engine, micro, mark=False)
                with pytest.raises(RuntimeError, match="call it after the block"):
                    engine.end_request()
        assert engine.update_window.requests == 3
        assert_sums(applied_by(engine), micros)
    engine.destroy()


@every_place
@every_sum
def test_several_coalesced_requests(two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str) -> None:
    two_ranks.run(coalesced, Setup(stage=stage, offload=offload, model=model, accum=accum))


def without_sync(setup: Setup) -> None:
    engine = build(setup)
    for _ in range(2):
        micros = [Micro(ALL, 1), Micro(ALL, 2), Micro(SOME, 3), Micro(SOME, 4)]
        backward(engine, micros[0])
        with engine.no_sync():
            backward(engine, micros[1], mark=False)
            backward(engine, micros[2], mark=False)
        backward(engine, micros[3])
        assert_sums(applied_by(engine), micros)
    engine.destroy()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@every_sum
def test_no_sync_keeps_gradients_local_until_later(
    two_ranks: RankGroup, offload: bool, overlap: bool, model: str, accum: str
) -> None:
    setup = Setup(stage=1, offload=offload, model=model, accum=accum, zero={"overlap_comm": overlap})
    two_ranks.run(without_sync, setup)


def plain_backward(setup: Setup) -> None:
    """``loss.backward()`` instead of ``engine.backward(loss)``."""
    engine = build(setup)
    micros = [Micro(ALL, 1), Micro(SOME, 2), Micro(ALL, 3)]
    for micro in micros:
        engine.set_gradient_accumulation_boundary(micro.seed != 2)
        x, w = inputs_of(engine, micro.seed)
        engine(x.requires_grad_(), w, micro.uses).backward()
    assert engine.update_window.micro_batches == 3
    assert engine.update_window.requests == 2
    assert_sums(applied_by(engine), micros)
    engine.destroy()


@every_place
@every_sum
@pytest.mark.parametrize("checkpointing", ["none", "reentrant"])
def test_torch_style_backward(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str, checkpointing: str
) -> None:
    setup = Setup(stage=stage, offload=offload, model=model, accum=accum, checkpointing=checkpointing)
    two_ranks.run(plain_backward, setup)


def changed_results(setup: Setup, requestzero: bool) -> list[list[float]]:
    """The loss, what ``backward`` returns, and the loss after a change of that in place, for every way to call it."""
    engine: Any = build(setup, requestzero)
    calls: list[tuple[Any, Any]] = [
        ((), {}),
        ((True,), {}),
        ((), {"scale_wrt_gas": True}),
        ((), {"scale_wrt_gas": False}),
    ]
    found = []
    for args, kwargs in calls:
        x, w = inputs_of(engine, 1)
        loss = engine(x.requires_grad_() + 1, w, ALL) + 3
        before, result = float(loss), engine.backward(loss, *args, **kwargs)
        assert result.grad_fn is not None
        returned = float(result)
        with torch.no_grad():
            result.add_(1)
        found.append([before, returned, float(loss)])
    engine.destroy()
    return found


@pytest.mark.parametrize("steps", [1, 2])
def test_backward_returns_what_deepspeed_returns(one_rank: RankGroup, steps: int) -> None:
    """A tensor of its own, unless the caller has asked for the loss itself."""
    setup = Setup(config={"gradient_accumulation_steps": steps})
    ours, stock = (one_rank.run(changed_results, setup, whose)[0] for whose in (True, False))
    assert ours == stock
    assert [after - before for before, _, after in ours] == [0.0, 0.0, 0.0, 1.0]


def backward_with_a_graph(setup: Setup) -> list[float]:
    """Two requests of ``loss.backward(create_graph=True)``, whose gradients are 2 at a weight of 0; the update."""
    engine = build(setup, model=OneWeight())
    for _ in range(2):
        engine.set_gradient_accumulation_boundary(True)
        loss = engine(torch.full_like(engine.module.weight, 2.0))
        (loss + loss.square()).backward(create_graph=True)
    engine.step()
    update: list[float] = (masters(engine)[0] / -LR).tolist()
    engine.destroy()
    return update


@every_place
@pytest.mark.parametrize("bucket", [8, 4])  # the weight fits into a bucket, or is larger
def test_gradients_may_have_a_graph(two_ranks: RankGroup, stage: int, offload: bool, bucket: int) -> None:
    setup = Setup(stage=stage, offload=offload, zero={"reduce_bucket_size": bucket})
    assert two_ranks.run(backward_with_a_graph, setup) == [[4.0] * 8] * 2


def accumulation_steps(setup: Setup) -> None:
    """DeepSpeed's own counter of micro-batches, without marks: one request per ``gradient_accumulation_steps``."""
    engine = build(setup)
    for _ in range(2):
        micros = [Micro(ALL, seed) for seed in range(4)]
        before = masters(engine)
        for micro in micros:
            backward(engine, micro, mark=False)
            engine.step()
        assert_sums(difference(before, masters(engine)), micros, divisor=4.0)
        assert engine.update_window.requests == 0
    assert (engine.global_steps, engine.micro_steps) == (2, 8)
    engine.destroy()


@every_place
@every_sum
def test_gradient_accumulation_steps(two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str) -> None:
    config = {"gradient_accumulation_steps": 4}
    two_ranks.run(accumulation_steps, Setup(stage=stage, offload=offload, model=model, accum=accum, config=config))


# --- states ---------------------------------------------------------------------------------------------------------


def states_moved(setup: Setup) -> None:
    engine = build(setup)
    micros = [Micro(ALL, 1), Micro(SOME, 2), Micro(ALL, 3)]
    for micro in micros:
        backward(engine, micro)
        if micro.seed == 2:
            engine.offload_states(pin_memory=False)
            engine.reload_states()
    assert_sums(applied_by(engine), micros)
    engine.destroy()


@every_place
@every_sum
def test_states_can_be_offloaded_inside_a_window(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str
) -> None:
    two_ranks.run(states_moved, Setup(stage=stage, offload=offload, model=model, accum=accum))


HYPERPARAMETERS = ({"lr": LR, "weight_decay": 0.125}, {"lr": LR / 2, "weight_decay": 0.5})
"""Of two parameter groups."""


def universal_checkpoint(setup: Setup, folder: str) -> None:
    """Save after three updates with groups of different hyperparameters, and convert to the universal format."""
    import deepspeed.comm as dist
    from deepspeed.checkpoint.ds_to_universal import main as convert

    engine = build(setup)
    for group, values in zip(engine.optimizer.param_groups, HYPERPARAMETERS, strict=True):
        group.update(values)
    for seed in range(3):
        backward(engine, Micro(ALL, seed, False))
        backward(engine, Micro(ALL, seed + 10))
        engine.step()
    engine.save_checkpoint(
        folder, tag="saved", client_state={"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    )
    dist.barrier()
    if dist.get_rank() == 0:
        import argparse

        convert(
            argparse.Namespace(
                input_folder=f"{folder}/saved",
                output_folder=f"{folder}/universal",
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=False,
            )
        )
    dist.barrier()
    engine.destroy()


@dataclass
class Resumed:
    """An engine that has loaded a checkpoint and made one update."""

    weights: list[torch.Tensor]
    hyperparameters: tuple[dict[str, float], ...]
    """By parameter group, as the checkpoint has left them."""
    steps: list[float]
    """Counts of the optimizer for every flat master weight."""


def load_and_go_on(setup: Setup, folder: str, tag: str, used: bool) -> Resumed:
    """``used``: the engine has trained before it loads."""
    engine = build(setup)
    if used:
        backward(engine, Micro(ALL, 77))
        engine.step()
    engine.load_checkpoint(folder, tag=tag)
    groups = tuple({name: group[name] for name in HYPERPARAMETERS[0]} for group in engine.optimizer.param_groups)
    for seed in (7, 8):
        backward(engine, Micro(ALL, seed))
    engine.step()
    steps = [float(engine.optimizer.state[flat]["step"]) for flat in flat_masters(engine)]
    resumed = Resumed(masters(engine), groups, steps)
    engine.destroy()
    return resumed


def assert_resumed(from_universal: list[Resumed], from_saved: list[Resumed], flats: int) -> None:
    """Of all ranks: the same to the last bit, each group with what it was saved with, after a fourth step."""
    for found, expected in zip(from_universal, from_saved, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found.weights, expected.weights, strict=True))
        assert found.hyperparameters == expected.hyperparameters == HYPERPARAMETERS
        assert found.steps == expected.steps == [4.0] * flats


@every_place
@pytest.mark.parametrize("round_robin", [False, True])
def test_universal_checkpoints(
    two_ranks: RankGroup, stage: int, offload: bool, round_robin: bool, tmp_path: Any
) -> None:
    setup = Setup(
        stage=stage,
        offload=offload,
        model="bf16",
        accum="fp32",
        groups=2,
        optimizer="adamw",
        zero={"round_robin_gradients": round_robin},
    )
    two_ranks.run(universal_checkpoint, setup, str(tmp_path))
    universal = replace(setup, config={"checkpoint": {"load_universal": True}})
    assert_resumed(
        two_ranks.run(load_and_go_on, universal, str(tmp_path), "universal", True),
        two_ranks.run(load_and_go_on, setup, str(tmp_path), "saved", False),
        flats=2,
    )


def module_copied(setup: Setup) -> bool:
    engine = build(setup)
    backward(engine, Micro(ALL, 1))
    twin = copy.deepcopy(engine.module)
    same = all(torch.equal(a, b) for a, b in zip(twin.parameters(), engine.module.parameters(), strict=True))
    engine.destroy()
    return same


@every_place
def test_the_module_can_be_copied_inside_a_window(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    assert two_ranks.run(module_copied, Setup(stage=stage, offload=offload)) == [True, True]


# --- optimizers -----------------------------------------------------------------------------------------------------


class Smooth(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b = torch.nn.Linear(IN, 9), torch.nn.Linear(9, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x))).square().mean()


def batch(step: int, request: int, rank: int) -> torch.Tensor:
    return torch.randn(3, IN, generator=torch.Generator().manual_seed(1000 * step + 10 * request + rank))


def adamw_parity(stage: int, offload: bool, cpu_adam: bool, clip: float) -> float:
    """Largest difference of the weights to ``torch.optim.AdamW`` after six updates of three requests, divided by 3."""
    import deepspeed.comm as dist

    optimizer = "cpu_adam" if cpu_adam else "adamw"
    setup = Setup(stage=stage, offload=offload, optimizer=optimizer, config={"gradient_clipping": clip})
    engine = build(setup, model=Smooth(), lr=0.01, weight_decay=0.01)
    model = Smooth()
    reference = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(6):
        for request in range(3):
            engine.set_gradient_accumulation_boundary(True)
            engine.backward(engine(batch(step, request, dist.get_rank()).to(engine.device)))
            for rank in range(dist.get_world_size()):
                (model(batch(step, request, rank)) / 3 / dist.get_world_size()).backward()
        engine.step(divisor=3.0)
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            assert float(engine.get_global_grad_norm()) == pytest.approx(norm.item(), rel=1e-5)
        reference.step()
        reference.zero_grad()
    pairs = zip(engine.module.parameters(), model.parameters(), strict=True)
    difference = max((a.detach().cpu() - b.detach()).abs().max().item() for a, b in pairs)
    engine.destroy()
    return difference


@every_place
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_adamw_equals_torch(two_ranks: RankGroup, stage: int, offload: bool, clip: float) -> None:
    # fp32 gradients are summed in another order than in the reference: a few units in the last place, which Adam's
    # division by the square root of the second moment passes on; six updates of 0.01 on weights below 1.
    assert max(two_ranks.run(adamw_parity, stage, offload, False, clip)) < 2e-6


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_cpu_adam_equals_torch(two_ranks: RankGroup, stage: int) -> None:
    # DeepSpeed's kernel fuses its arithmetic differently.
    assert max(two_ranks.run(adamw_parity, stage, True, True, 0.0)) < 2e-5


def bf16_masters(stage: int, accum: str, requests: int) -> tuple[torch.Tensor, list[int]]:
    """Error of the gradient that a bf16 host gradient holds, and the partition's bytes after every request."""
    from deepspeed.utils import safe_get_full_grad

    config = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, "communication_data_type": "fp32"}
    # Where every request is reduced: at stage 1 there is no partition before the window's end otherwise.
    at = "request" if stage == 1 else None
    setup = Setup(stage=stage, offload=True, model="bf16", accum=accum, optimizer="cpu_adam", config=config, at=at)
    engine = build(setup, model=torch.nn.Sequential(torch.nn.Linear(8, 1, bias=False)))
    weight, held = engine.module[0].weight, []
    exact = torch.zeros(8, dtype=torch.float64)
    for i in range(requests):
        x = (1 + torch.rand(8, generator=torch.Generator().manual_seed(i))).bfloat16()
        exact += x.double()
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(x.to(engine.device)).sum())
        held.append(engine.grad_partition_bytes)
    grad = safe_get_full_grad(weight).cpu().flatten()
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()
    return ((grad.double() - exact) / exact).abs().max(), held


@pytest.mark.parametrize("stage", [1, 2])
def test_16_bit_masters_keep_the_fp32_partition_until_the_step(two_ranks: RankGroup, stage: int) -> None:
    for error, held in two_ranks.run(bf16_masters, stage, "fp32", 16):
        assert held == [16] * 16, "four fp32 elements per rank, not released: bf16 could not restore them"
        assert error <= 2**-8, "one rounding to bf16"


def adam_states(setup: Setup) -> list[torch.Tensor]:
    """First moments after one window, as ``safe_get_full_optimizer_state`` gives them: a tenth of the gradient."""
    from deepspeed.utils import safe_get_full_optimizer_state

    engine = build(setup)
    for seed in (1, 2):
        backward(engine, Micro(ALL, seed))
    engine.step()
    moments = [safe_get_full_optimizer_state(p, "exp_avg").cpu().clone() for p in engine.module.parameters()]
    engine.destroy()
    return moments


@every_place
@pytest.mark.parametrize("zero", [{}, {"round_robin_gradients": True}, {"parameter_alignment": True}])
def test_optimizer_states_can_be_read(two_ranks: RankGroup, stage: int, offload: bool, zero: dict[str, Any]) -> None:
    setup = Setup(stage=stage, offload=offload, model="bf16", accum="fp32", optimizer="adamw", zero=zero)
    expected = reference([[Micro(ALL, 1), Micro(ALL, 2)]], 2)[0]
    for moments in two_ranks.run(adam_states, setup):
        for moment, gradient in zip(moments, expected, strict=True):
            torch.testing.assert_close(moment.double(), gradient / 10, rtol=1e-6, atol=0)


def gradients_read_and_set(setup: Setup) -> None:
    from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

    engine = build(setup)
    params = list(engine.module.parameters())
    for micros in ([Micro(ALL, 1), Micro(SOME, 2)], [Micro(SOME, 3), Micro(ALL, 4)]):
        backward(engine, micros[0])
        backward(engine, micros[1])
        expected = reference([micros], 2)[0]
        for param, gradient in zip(params, expected, strict=True):
            assert torch.equal(safe_get_full_grad(param).cpu().double(), gradient)
        for i, param in enumerate(params):
            safe_set_full_grad(param, torch.full_like(param, i + 1.0, dtype=torch.float32))
        backward(engine, Micro(ALL, 5))
        added = reference([[Micro(ALL, 5)]], 2)[0]
        for i, (applied, more) in enumerate(zip(applied_by(engine), added, strict=True)):
            assert torch.equal(applied, more + (i + 1.0))
    engine.destroy()


@every_place
@every_sum
@pytest.mark.parametrize("groups", [1, 3])
def test_gradients_can_be_read_and_set_under_parameter_alignment(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str, groups: int
) -> None:
    zero = {"parameter_alignment": True}
    setup = Setup(stage=stage, offload=offload, model=model, accum=accum, groups=groups, zero=zero)
    two_ranks.run(gradients_read_and_set, setup)


def without_norm(setup: Setup) -> None:
    import deepspeed.comm as dist

    engine = build(setup)
    micros = [Micro(ALL, 1), Micro(SOME, 2)]
    for poison in (False, True, False):
        for micro in micros:
            backward(engine, micro)
        if poison:
            weight = engine.module.layers[0].weight
            rank = dist.get_rank()
            handle = weight.register_hook(lambda grad, rank=rank: grad * float("nan") if rank == 0 else grad)
            backward(engine, Micro(ALL, 3))
            handle.remove()
        applied = applied_by(engine, divisor=2.0)
        assert engine.was_step_applied() is not poison
        assert_sums(applied, [] if poison else micros, divisor=2.0)
        assert engine.get_global_grad_norm() is None
    assert (engine.skipped_steps, engine.applied_updates) == (1, 2)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 2])
def test_without_the_gradient_norm(two_ranks: RankGroup, stage: int) -> None:
    """``compute_grad_norm: false`` (on the device): sums, divisor and the skipping of overflows are the same."""
    zero = {"compute_grad_norm": False}
    two_ranks.run(without_norm, Setup(stage=stage, model="bf16", accum="bf16", zero=zero))


def pickled(setup: Setup, requestzero: bool, how: str) -> str:
    engine = build(setup, requestzero)
    backward(engine, Micro(ALL, 1))
    try:
        if how == "pickle":
            pickle.dumps(engine.module)
        else:
            torch.save(engine.module, io.BytesIO())
        result = "written"
    except Exception as error:
        result = type(error).__name__
    engine.destroy()
    return result


@every_place
@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_the_module_is_pickled_as_on_stock(two_ranks: RankGroup, stage: int, offload: bool, how: str) -> None:
    setup = Setup(stage=stage, offload=offload)
    ours = two_ranks.run(pickled, setup, True, how)
    assert ours == two_ranks.run(pickled, setup, False, how)
    print(setup, how, ours)


# --- engines side by side -------------------------------------------------------------------------------------------


def classes_side_by_side() -> list[str]:
    import deepspeed
    from deepspeed.runtime import engine as deepspeed_engine

    from requestzero.zero.upstream import optimizer_class

    engines = [build(Setup()), build(Setup(), requestzero=False), build(Setup())]
    names = [f"{type(e).__name__}/{type(e.optimizer).__name__}" for e in engines]
    names = [name.replace(optimizer_class().__name__, "RequestZeROOptimizer") for name in names]
    names += [deepspeed.DeepSpeedEngine.__name__, deepspeed_engine.DeepSpeedZeroOptimizer.__name__]
    for engine in engines:
        engine.destroy()
    return names


def test_other_engines_keep_the_stock_classes(one_rank: RankGroup) -> None:
    ours, stock = "RequestZeROEngine/RequestZeROOptimizer", "DeepSpeedEngine/DeepSpeedZeroOptimizer"
    assert one_rank.run(classes_side_by_side) == [[ours, stock, ours, "DeepSpeedEngine", "DeepSpeedZeroOptimizer"]]


def failed_construction() -> list[str]:
    import deepspeed
    from deepspeed.runtime import engine as deepspeed_engine

    import requestzero

    with pytest.raises(AssertionError):
        requestzero.initialize(model=Layers(), config=Setup().deepspeed_config() | {"train_batch_size": 17})
    return [deepspeed.DeepSpeedEngine.__name__, deepspeed_engine.DeepSpeedZeroOptimizer.__name__]


def test_a_failed_construction_restores_the_stock_classes(two_ranks: RankGroup) -> None:
    assert two_ranks.run(failed_construction)[0] == ["DeepSpeedEngine", "DeepSpeedZeroOptimizer"]


# --- checkpoints of one class in the other --------------------------------------------------------------------------


def save_after_two_updates(setup: Setup, requestzero: bool, folder: str) -> list[torch.Tensor]:
    engine = build(setup, requestzero)
    for seed in range(2):
        backward(engine, Micro(ALL, seed))
        engine.step()
    engine.save_checkpoint(folder)
    weights = module_weights(engine)
    engine.destroy()
    return weights


def load_and_step(setup: Setup, requestzero: bool, folder: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    engine = build(setup, requestzero)
    engine.load_checkpoint(folder)
    loaded = module_weights(engine)
    backward(engine, Micro(ALL, 9))
    engine.step()
    stepped = module_weights(engine)
    engine.destroy()
    return loaded, stepped


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("ours_saves", [False, True])
def test_checkpoints_are_exchanged_with_stock(
    two_ranks: RankGroup, stage: int, offload: bool, ours_saves: bool, tmp_path: Any
) -> None:
    """Also at stage 1 in bf16 with fp32 accumulation, where stock is DeepSpeed's ``BF16_Optimizer``."""
    setup = Setup(stage=stage, offload=offload, model="bf16", accum="fp32", optimizer="adamw")
    saved = two_ranks.run(save_after_two_updates, setup, ours_saves, str(tmp_path))[0]
    by_other = two_ranks.run(load_and_step, setup, not ours_saves, str(tmp_path))[0]
    by_same = two_ranks.run(load_and_step, setup, ours_saves, str(tmp_path))[0]
    assert all(torch.equal(a, b) for a, b in zip(saved, by_other[0], strict=True))
    for a, b in zip(by_other[1], by_same[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
