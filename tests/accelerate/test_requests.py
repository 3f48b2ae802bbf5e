"""Requests of several micro-batches and windows of any number of requests, marked explicitly or by a loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from requestzero import MicroBatch, RequestLoader, RequestZeROPlugin
from support.accelerate_loops import Loop, make_accelerator, prepare, weights
from support.accelerate_state import fresh
from support.failures import assert_fails
from support.ranks import RankGroup
from support.recorded_windows import CASES, TwoLayers
from support.setup import KEEP_OPTIMIZER
from support.whole_weights import copies

LR = 1 / 16
CONFIGURATIONS = {
    f"zero{stage} {device} model={model} accumulate={accumulation}": (stage, device, model, accumulation)
    for stage, device, model, accumulation in (
        (1, "none", "bf16", "fp32"),
        (1, "cpu", "bf16", "bf16"),
        (2, "none", "no", "fp32"),
        (2, "cpu", "bf16", "fp32"),
        (3, "none", "no", "fp32"),
        (3, "cpu", "bf16", "fp32"),
    )
}


def set_up(configuration: tuple[int, str, str, str]) -> tuple[Any, ...]:
    stage, device, precision, accumulation = configuration
    plugin = RequestZeROPlugin(
        KEEP_OPTIMIZER,
        zero_stage=stage,
        offload_optimizer_device=device,
        grad_accum_dtype=accumulation,
        normalization="sum",
    )
    accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision=precision)
    model = TwoLayers()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return accelerator, plugin.requests(accelerator), *accelerator.prepare(model, optimizer)


def inputs_of(micro: dict[str, Any], accelerator: Accelerator, model: Any) -> torch.Tensor:
    value = float(micro["value_by_rank"][accelerator.process_index])
    return torch.full((1, 4), value, dtype=next(model.parameters()).dtype, device=accelerator.device)


def change(before: list[torch.Tensor], model: Any) -> list[float]:
    changes = [(b - p).double() / LR for b, p in zip(before, copies(model), strict=True)]
    assert all(bool((c == c.flatten()[0]).all()) for c in changes)
    return [c.flatten()[0].item() for c in changes]


def play_with_blocks(configuration: tuple[int, str, str, str]) -> list[list[list[float]]]:
    """Every case with ``request()`` blocks; per case and window the applied gradient of both layers."""
    return [_play_with_blocks(configuration, case["windows"]) for case in CASES]


def _play_with_blocks(configuration: tuple[int, str, str, str], windows: list[Any]) -> list[list[float]]:
    with fresh():
        accelerator, requests, model, optimizer = set_up(configuration)
        applied = []
        for window in windows:
            before = copies(model)
            for request in split(window):
                with requests.request():
                    for micro in request:
                        accelerator.backward(model(inputs_of(micro, accelerator, model), micro["uses"]))
            optimizer.step()
            applied.append(change(before, model))
        accelerator.free_memory()
        return applied


def split(window: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The micro-batches of each request; what is left over at the window's end is one too."""
    request: list[dict[str, Any]] = []
    for micro in window:
        request.append(micro)
        if micro["request_end"]:
            yield request
            request = []
    if request:
        yield request


def play_with_loader(configuration: tuple[int, str, str, str]) -> list[list[list[float]]]:
    """Every case with a loader of ``MicroBatch`` that marks requests and windows."""
    return [_play_with_loader(configuration, case["windows"]) for case in CASES]


def _play_with_loader(configuration: tuple[int, str, str, str], windows: list[Any]) -> list[list[float]]:
    with fresh():
        accelerator, requests, model, optimizer = set_up(configuration)
        loader = []
        for window in windows:
            for position, micro in enumerate(window):
                last = position == len(window) - 1
                loader.append(MicroBatch(micro, micro["request_end"] or last, window_end=last))
        applied = []
        before = copies(model)
        for micro in requests.micro_batches(loader):
            accelerator.backward(model(inputs_of(micro, accelerator, model), micro["uses"]))
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                applied.append(change(before, model))
                before = copies(model)
        accelerator.free_memory()
        return applied


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_case_is_exact(two_ranks: RankGroup, name: str) -> None:
    assert len(CASES) == 15
    expected = [case["expected_gradient"] for case in CASES]
    play = play_with_loader if name.startswith(("zero1 cpu", "zero2 none", "zero3 cpu")) else play_with_blocks
    for applied in two_ranks.run(play, CONFIGURATIONS[name]):
        assert applied == expected


def requests_of(sizes: tuple[int, ...]) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [list(torch.randint(-8, 9, (size, 8), generator=generator) / 4) for size in sizes]


SIZES = (3, 1, 9, 4, 6, 2, 5)


def train_on_requests(n: int, prepared: bool, plugin: dict[str, Any]) -> dict[str, Any]:
    """A ``RequestLoader`` that the loop counts ``n`` requests a window of; the last window is shorter."""
    with fresh():
        loop = Loop(plugin=plugin, n=n)
        accelerator, model, optimizer, _, scheduler = prepare(loop)
        loader: Any = RequestLoader(requests_of(SIZES), torch.stack, shuffle=False, filler=torch.zeros_like)
        if prepared:
            loader = accelerator.prepare(loader)
        else:
            loader = accelerator.deepspeed_plugin.requests(accelerator).micro_batches(loader)
        window = accelerator.deepspeed_plugin.requests(accelerator)
        record: dict[str, Any] = {"windows": [], "length": len(loader)}
        for inputs in loader:
            accelerator.backward(model(inputs))
            counts = (window.window.micro_batches, window.window.requests)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                record["windows"].append((*counts, weights(accelerator, model), optimizer.param_groups[0]["lr"]))
        record["synced"] = accelerator.sync_gradients
        return record


def expected_windows(n: int, ranks: int) -> list[tuple[int, int, list[float], float]]:
    weight, rate, expected = torch.zeros(8), 0.5, []
    requests = requests_of(SIZES)
    for start in range(0, len(requests), n):
        total, count = torch.zeros(8), 0
        for request in requests[start : start + n]:
            total += torch.stack(request).sum(0)
            count += -(-len(request) // ranks)
        weight = weight - rate * (total / ranks / count)
        rate /= 2
        expected.append((count, len(requests[start : start + n]), weight.tolist(), rate))
    return expected


@pytest.mark.parametrize("prepared", [True, False])
def test_windows_of_requests_from_a_loader(two_ranks: RankGroup, prepared: bool) -> None:
    for record in two_ranks.run(train_on_requests, 2, prepared, {"zero_stage": 2}):
        assert record["length"] == sum(-(-size // 2) for size in SIZES)
        assert record["synced"] is True
        for got, expected in zip(record["windows"], expected_windows(2, 2), strict=True):
            assert got[:2] == expected[:2]
            assert got[2] == pytest.approx(expected[2], rel=1e-6)
            assert got[3] == expected[3]


def marked(batches: list[Any], requests_per_update: int | None = None) -> list[tuple[bool, bool]]:
    """For each micro-batch: it ends its window; the window was empty after ``optimizer.step()``."""
    with fresh():
        accelerator, model, optimizer, _, _ = prepare(Loop())
        requests = accelerator.deepspeed_plugin.requests(accelerator)
        found = []
        for inputs in requests.micro_batches(batches, requests_per_update):
            assert isinstance(inputs, torch.Tensor)
            accelerator.backward(model(inputs))
            optimizer.step()
            found.append((accelerator.sync_gradients, not requests.window.is_open))
        return found


ROW = torch.ones(1, 8)


def test_plain_batches_are_requests_and_a_pass_ends_with_its_window(two_ranks: RankGroup) -> None:
    expected = [(end, end) for end in (False, True, False, True, True)]
    assert two_ranks.run(marked, [ROW] * 5, 2) == [expected] * 2


def test_a_loader_that_ends_inside_a_request_says_so(two_ranks: RankGroup) -> None:
    batches = [MicroBatch(ROW, request_end=False, request_id="r7")]
    for text in two_ranks.run(warned, batches):
        assert "The loader ended inside request 'r7': its micro-batches so far go into the update" in text


def warned(batches: list[Any]) -> str:
    import warnings

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert marked(batches) == [(True, True)]
    return " ".join(str(item.message) for item in found)


def misuse(how: str) -> None:
    with fresh():
        accelerator = make_accelerator(Loop())
        plugin = accelerator.deepspeed_plugin
        requests = plugin.requests(accelerator)
        if how == "unprepared":
            with requests.request():
                pass
        model = torch.nn.Linear(8, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        dataset = torch.utils.data.DataLoader(torch.ones(4, 8), batch_size=1)
        loss = lambda: model(ROW).sum()  # noqa: E731
        if how == "prepared loader":
            requests.micro_batches(accelerator.prepare(dataset))
        if how == "open window":
            accelerator.backward(loss())
            next(iter(requests.micro_batches([ROW])))
        if how == "nested":
            with requests.request(), requests.request():
                pass
        if how == "step inside":
            with requests.request():
                accelerator.backward(loss())
                optimizer.step()
        if how == "norm inside":
            with requests.request():
                accelerator.backward(loss())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
        if how == "accumulate":
            for _ in requests.micro_batches([ROW]):
                with accelerator.accumulate(model):
                    pass
        if how == "marks":
            for _ in requests.micro_batches([MicroBatch(ROW, window_end=True)], 2):
                pass
        if how == "registered":
            loader = RequestLoader([[ROW]], torch.cat)
            accelerator.register_for_checkpointing(loader)
            next(iter(requests.micro_batches(loader)))
        if how == "no state":
            requests.micro_batches([ROW]).state_dict()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("unprepared", "RuntimeError: This Accelerator has not prepared a model with a RequestZeROPlugin"),
        (
            "prepared loader",
            "ValueError: The loader was prepared by Accelerate, which deals neighbouring",
        ),
        ("open window", r"RuntimeError: An update window is open \(1 micro-batches since the last step\) where a pass"),
        ("nested", "RuntimeError: The ends of requests are being marked already"),
        ("step inside", r"RuntimeError: optimizer.step\(\) inside a request: gradients are complete at its end"),
        ("norm inside", r"RuntimeError: accelerator.clip_grad_norm_\(\) inside a request"),
        ("accumulate", r"RuntimeError: accelerator.accumulate\(\) counts micro-batches, but the ends of requests are"),
        ("marks", r"ValueError: The loader marks the ends .* but micro_batches\(requests_per_update=2\) asks to count"),
        ("registered", "RuntimeError: The loader itself is registered for checkpointing"),
        ("no state", r"TypeError: list has no state_dict\(\), so its place cannot be saved"),
    ],
)
def test_misuse_is_told(two_ranks: RankGroup, how: str, message: str) -> None:
    assert_fails(two_ranks, f"^{message}", misuse, how)
