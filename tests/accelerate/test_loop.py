"""A loop written for Accelerate makes the updates that it makes without DeepSpeed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler

from support.accelerate_loops import Loop, data, make_accelerator, prepare, train, weights
from support.accelerate_state import fresh
from support.failures import assert_fails
from support.fp16 import fp16_on_cpu
from support.models import RowWeight
from support.ranks import RankGroup
from support.setup import KEEP_OPTIMIZER

PLUGINS: dict[str, dict[str, Any]] = {
    "stage 1": {"zero_stage": 1},
    "stage 2": {},
    "stage 1 offload": {"zero_stage": 1, "offload_optimizer_device": "cpu", "hf_ds_config": KEEP_OPTIMIZER},
    "stage 2 offload": {"offload_optimizer_device": "cpu", "hf_ds_config": KEEP_OPTIMIZER},
    "stage 3": {"zero_stage": 3},
    "stage 3 offload": {
        "zero_stage": 3,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "cpu",
        "hf_ds_config": KEEP_OPTIMIZER,
    },
}


def both(ranks: RankGroup, **options: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Per rank, what the loop records with the plugin and without DeepSpeed."""
    ours = ranks.run(train, Loop(**options))
    plain = ranks.run(train, Loop(**{**options, "plugin": None}))
    return list(zip(ours, plain, strict=True))


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("name", PLUGINS)
def test_updates_are_those_of_ddp_bit_for_bit(two_ranks: RankGroup, name: str, n: int) -> None:
    for ours, plain in both(two_ranks, plugin=PLUGINS[name], n=n, epochs=2):
        assert len(ours["updates"]) == 16 // n
        assert ours["updates"] == plain["updates"]
        assert ours["synced"] == plain["synced"]
        assert ours["counts"] == (16 // n, 16 // n)


def test_windows_of_three_within_rounding(two_ranks: RankGroup) -> None:
    """DDP sums thirds, the step divides a sum by three."""
    for ours, plain in both(two_ranks, n=3, batches=6, optimizer="adamw", lr=1e-2):
        for update, expected in zip(ours["updates"], plain["updates"], strict=True):
            assert update["weights"] == pytest.approx(expected["weights"], rel=1e-6)
            assert update["lr"] == expected["lr"]


def test_a_short_last_window_is_divided_by_its_own_count(two_ranks: RankGroup) -> None:
    for ours, plain in both(two_ranks, n=4, batches=6, epochs=2, schedule=False):
        rows = data(6, 2)
        full, short = rows[:8].mean(0) * 0.5, rows[8:].mean(0) * 0.5
        assert ours["updates"][1]["weights"] == (-full - short).tolist()
        # Accelerate divides by N here: the one difference.
        assert plain["updates"][1]["weights"] == (-full - short / 2).tolist()
        assert [len(ours["updates"]), ours["counts"]] == [4, (4, 4)]
        assert ours["synced"] == plain["synced"]


@pytest.mark.parametrize("name", ["stage 1", "stage 2 offload", "stage 3"])
def test_a_skipped_update_moves_neither_weights_nor_scheduler(two_ranks: RankGroup, name: str) -> None:
    plugin = {**PLUGINS[name], "hf_ds_config": {**KEEP_OPTIMIZER, "bf16": {"enabled": True}}}
    for ours in two_ranks.run(train, Loop(plugin=plugin, n=2, nan_at=(2,))):
        assert [update["skipped"] for update in ours["updates"]] == [
            (False, False),
            (True, True),
            (False, False),
            (False, False),
        ]
        assert [update["lr"] for update in ours["updates"]] == [0.25, 0.25, 0.125, 0.0625]
        assert ours["updates"][1]["weights"] == ours["updates"][0]["weights"] != ours["updates"][2]["weights"]
        assert ours["counts"] == (4, 3)


def test_several_backwards_in_one_block_count_as_one(two_ranks: RankGroup) -> None:
    for ours, plain in both(two_ranks, n=2, backwards=2):
        assert ours["updates"] == plain["updates"]


def test_sum_divides_by_nothing(two_ranks: RankGroup) -> None:
    for ours in two_ranks.run(train, Loop(plugin={"normalization": "sum"}, n=4, schedule=False)):
        assert ours["updates"][0]["weights"] == (-data(8, 2)[:8].sum(0) / 2 * 0.5).tolist()


@pytest.mark.parametrize("by_torch", [False, True])
def test_clipping_is_that_of_ddp(two_ranks: RankGroup, by_torch: bool) -> None:
    for name in ("stage 1", "stage 2", "stage 2 offload", "stage 3 offload"):
        for ours, plain in both(two_ranks, plugin=PLUGINS[name], n=2, clip=0.75, clip_by_torch=by_torch):
            assert min(update["norm"] for update in plain["updates"]) > 0.75
            for update, expected in zip(ours["updates"], plain["updates"], strict=True):
                assert update["norm"] == pytest.approx(expected["norm"], rel=1e-6)
                assert update["weights"] == pytest.approx(expected["weights"], rel=1e-5)


def test_without_clip_grad_norm_nothing_is_clipped(two_ranks: RankGroup) -> None:
    """DeepSpeed and Accelerate clip at 1.0 by default."""
    (ours, _), _ = both(two_ranks, n=2)
    assert ours["config"]["gradient_clipping"] == 0.0
    assert math.hypot(*ours["updates"][0]["weights"]) > 1.0


def test_auto_is_resolved(two_ranks: RankGroup) -> None:
    config = {key: "auto" for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping")}
    config |= {"gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"}}
    for ours in two_ranks.run(train, Loop(plugin={"hf_ds_config": config}, n=2)):
        sizes = [ours["config"][key] for key in ("train_batch_size", "train_micro_batch_size_per_gpu")]
        assert sizes == [4, 1]
        assert ours["config"]["gradient_accumulation_steps"] == 2
        assert ours["config"]["bf16"] == {"enabled": False}


def left_out(plugin: dict[str, Any] | None) -> list[float]:
    """A micro-batch that all ranks leave out: Accelerate has counted its block."""
    with fresh():
        accelerator, model, optimizer, loader, _ = prepare(Loop(plugin=plugin, n=4))
        for index, batch in enumerate(loader):
            with accelerator.accumulate(model):
                if index != 1:
                    accelerator.backward(model(batch))
                optimizer.step()
                optimizer.zero_grad()
        return weights(accelerator, model)


def test_a_micro_batch_that_is_left_out_counts_as_in_ddp(two_ranks: RankGroup) -> None:
    assert two_ranks.run(left_out, {}) == two_ranks.run(left_out, None)


def in_fp16(loop: Loop) -> dict[str, Any]:
    with fp16_on_cpu():
        return train(loop)


def test_fp16_divides_by_the_scale_of_its_window(two_ranks: RankGroup) -> None:
    """The loss scale doubles after every second update."""
    overflow = {"initial_scale_power": 3, "loss_scale_window": 2, "hysteresis": 1}
    options: dict[str, Any] = {"n": 2, "clip": 1e6, "accelerator": {"mixed_precision": "fp16"}, "schedule": False}
    for ours in two_ranks.run(in_fp16, Loop(plugin={"overflow": overflow}, **options)):
        sums = data(8, 2).view(4, 4, 8).mean(1)
        assert [update["norm"] for update in ours["updates"]] == pytest.approx(sums.norm(dim=1).tolist(), rel=1e-6)
        assert ours["updates"][-1]["weights"] == (-0.5 * sums.sum(0)).tolist()
        assert ours["config"]["fp16"] == {"enabled": True, "auto_cast": True, **overflow}


def plain_accumulation(plugin: dict[str, Any] | None) -> list[float]:
    """Accumulation by hand, as in the first chapter of Accelerate's documentation: no ``accumulate``."""
    with fresh():
        accelerator, model, optimizer, loader, _ = prepare(Loop(plugin=plugin))
        for index, batch in enumerate(loader):
            accelerator.backward(model(batch) / 4)
            if index % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        return weights(accelerator, model)


def skipping_synchronization(plugin: dict[str, Any] | None) -> tuple[list[float], int]:
    """``no_sync`` by hand, with a loss that Accelerate divides by N."""
    with fresh():
        accelerator, model, optimizer, loader, _ = prepare(Loop(plugin=plugin, n=4))
        for index, batch in enumerate(loader):
            if index % 4 == 3:
                accelerator.backward(model(batch))
                optimizer.step()
                optimizer.zero_grad()
            else:
                with accelerator.no_sync(model):
                    accelerator.backward(model(batch))
        return weights(accelerator, model), accelerator.gradient_accumulation_steps


@pytest.mark.parametrize("loop", [plain_accumulation, skipping_synchronization])
@pytest.mark.parametrize("name", PLUGINS)
def test_accumulation_by_hand(two_ranks: RankGroup, name: str, loop: Any) -> None:
    assert two_ranks.run(loop, PLUGINS[name]) == two_ranks.run(loop, None)


def discard() -> tuple[list[float], bool]:
    with fresh():
        accelerator, model, optimizer, loader, scheduler = prepare(Loop())
        for batch in loader:
            accelerator.backward(model(batch))
        optimizer.zero_grad()
        optimizer.step()
        scheduler.step()
        return weights(accelerator, model), optimizer.step_was_skipped


def test_zero_grad_discards_the_open_window(two_ranks: RankGroup) -> None:
    for values, skipped in two_ranks.run(discard):
        assert values == [0.0] * 8
        assert skipped  # nothing was applied


def norms_around_a_step(plugin: dict[str, Any]) -> list[float]:
    with fresh():
        accelerator, model, optimizer, loader, _ = prepare(Loop(plugin=plugin, n=2))
        norms = []
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch))
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), float("inf"))))
                optimizer.step()
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.deepspeed_engine_wrapped.get_global_grad_norm()))
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        return norms


@pytest.mark.parametrize("name", PLUGINS)
def test_the_pending_norm_is_the_one_that_the_step_reports(two_ranks: RankGroup, name: str) -> None:
    for norms in two_ranks.run(norms_around_a_step, PLUGINS[name]):
        assert norms[0:-1:2] == norms[1:-1:2]
        assert norms[0] > 0
        assert norms[-1] == 0.0  # nothing pending


def clip(max_norm: float, configured: Any) -> None:
    with fresh():
        accelerator, model, _, loader, _ = prepare(Loop(plugin={"gradient_clipping": configured}))
        accelerator.backward(model(next(iter(loader))))
        accelerator.clip_grad_norm_(model.parameters(), max_norm)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.5, 1.0), r"clip_grad_norm_\(max_norm=0.5\) contradicts gradient_clipping=1.0 of the DeepSpeed config"),
        ((0.5, 0.0), "contradicts gradient_clipping=0.0"),
        ((0.0, None), r"clip_grad_norm_\(max_norm=0.0\) is not allowed: use a positive number"),
    ],
)
def test_clipping_that_would_be_ignored_is_an_error(two_ranks: RankGroup, arguments: Any, message: str) -> None:
    assert_fails(two_ranks, f"^ValueError: .*{message}", clip, *arguments)


def test_clipping_that_agrees_is_accepted(two_ranks: RankGroup) -> None:
    two_ranks.run(clip, 0.5, 0.5)
    two_ranks.run(clip, float("inf"), 0.5)


def wrong_step(how: str) -> None:
    with fresh():
        accelerator, model, optimizer, loader, _ = prepare(Loop(plugin={"zero_stage": 1}))
        batch = next(iter(loader))
        if how == "closure":
            optimizer.step(lambda: model(batch))
        elif how == "no_sync":
            with accelerator.no_sync(model):
                accelerator.backward(model(batch))
                optimizer.step()
        else:
            accelerator.backward(model(batch))
            accelerator.backward(model(batch), scale_wrt_gas=False)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("closure", r"^ValueError: optimizer.step\(closure\) runs the backward itself, which ZeRO cannot"),
        ("no_sync", r"^RuntimeError: optimizer.step\(\) inside accelerator.no_sync\(\): call it after the block"),
        (
            "mixed",
            r"^ValueError: accelerator.backward\(scale_wrt_gas=False\) comes in a window that was begun with",
        ),
    ],
)
def test_steps_that_cannot_be_right(two_ranks: RankGroup, how: str, message: str) -> None:
    assert_fails(two_ranks, message, wrong_step, how)


def late_scheduler() -> list[float]:
    """A scheduler that is prepared after the optimizer."""
    with fresh():
        accelerator = make_accelerator(Loop(n=2))
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step // 2))
        model, optimizer = accelerator.prepare(model, optimizer)
        scheduler = accelerator.prepare(scheduler)
        rates = []
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 8)).sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates


def test_a_scheduler_that_is_prepared_later_steps_with_the_updates(two_ranks: RankGroup) -> None:
    assert two_ranks.run(late_scheduler) == [[1.0, 0.5, 0.5, 0.25]] * 2


def deepspeeds_own() -> list[tuple[bool, float, float]]:
    """Optimizer and scheduler from the DeepSpeed config; the engine steps the scheduler, once per applied update."""
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_type": "linear", "warmup_max_lr": 0.5, "warmup_num_steps": 4},
        },
    }
    with fresh():
        accelerator = make_accelerator(Loop(plugin={"hf_ds_config": config}, n=2))
        model: Any = RowWeight()
        optimizer: Any = DummyOptim(model.parameters(), lr=0.5)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, DummyScheduler(optimizer))
        found = []
        for row in data(8, 1):
            with accelerator.accumulate(model):
                accelerator.backward(model(row[None]))
                optimizer.step()
                applied = scheduler.get_last_lr()[0]
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                found.append((weights(accelerator, model)[0] != 0, applied, scheduler.get_last_lr()[0]))
        return found


def test_optimizer_and_scheduler_of_the_deepspeed_config(two_ranks: RankGroup) -> None:
    """Each update has the rate of its own number, as with a scheduler of PyTorch; DeepSpeed's are one update late."""
    for found in two_ranks.run(deepspeeds_own):
        assert found == [(False, 0.0, 0.125), (True, 0.125, 0.25), (True, 0.25, 0.375), (True, 0.375, 0.5)]


def gathered() -> tuple[int, list[str], bool]:
    with fresh():
        accelerator, model, _, _, _ = prepare(Loop())
        loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(5), batch_size=1))
        found = [accelerator.gather_for_metrics(batch) for batch in loader]
        names = list(accelerator.get_state_dict(model))
        return len(torch.cat(found)), names, type(accelerator.unwrap_model(model)).__name__ == "RowWeight"


def test_gather_for_metrics_and_unwrap_model(two_ranks: RankGroup) -> None:
    assert two_ranks.run(gathered) == [(5, ["weight"], True)] * 2


class OwnAccelerator(Accelerator):
    def greet(self) -> str:
        return "hello"


def subclassed() -> str:
    from requestzero import RequestZeROPlugin

    with fresh():
        accelerator = OwnAccelerator(deepspeed_plugin=RequestZeROPlugin())
        assert isinstance(accelerator, OwnAccelerator)
        return f"{accelerator.greet()} {type(accelerator).__name__} {accelerator.engine_wrapper}"  # type: ignore[attr-defined]


def test_a_subclass_of_accelerator_stays_one(two_ranks: RankGroup) -> None:
    assert two_ranks.run(subclassed) == ["hello OwnAccelerator None"] * 2
