"""The parts that measure, each against a piece of work that is counted by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from requestzero.probe.counters import Allocations, Operators
from requestzero.probe.grid import STOCK, Configuration, Engine
from requestzero.probe.models import TOKENS, ModelChoice, Shape
from requestzero.probe.reference import add_references, bytes_between_requests, ratio
from requestzero.probe.result import Row, most
from requestzero.probe.timing import ratios, spread
from requestzero.probe.windows import LONGEST, OUTS, random_windows, reference, values, wrong_updates
from support.tiny_llama import tiny_llama

# --- counters -------------------------------------------------------------------------------------------------------


def test_operators_host_reads_and_traffic() -> None:
    host, device = torch.zeros(4), torch.ones(4, dtype=torch.bfloat16)
    with Operators([host]) as counted:
        wide = device.float()  # 1
        host[:2].copy_(wide[:2])  # 2 and 3: views; 4: 8 bytes to the host
        wide.add_(host)  # 5: 16 bytes from the host
        host.mul_(2)  # 6: stays there
        assert wide.sum().item() == 6.0  # 7: sum; 8: a read
        assert bool((wide > 0).all())  # 9, 10; 11: a read
        wide.tolist()  # 12: a read without an operator
    assert (counted.total, counted.host_reads) == (12, 3)
    assert (counted.copies_into_destinations, counted.bytes_to_host) == (1, 8)
    assert (counted.copies_from_host, counted.bytes_from_host) == (1, 16)
    assert torch.Tensor.tolist(host) == [2, 2, 0, 0]


def test_memory_is_counted_by_storage_whoever_holds_it() -> None:
    allocations = Allocations()
    with allocations:
        made = torch.zeros(256)
    view = made[:1]  # four bytes of a kilobyte
    del made
    assert allocations.bytes_in_use == 1024, "an attribute that was cleared frees nothing"
    del view
    assert allocations.bytes_in_use == 0


def test_the_peak_is_what_was_in_use_at_once() -> None:
    allocations, given = Allocations(), torch.zeros(64)
    with allocations:
        kept = torch.zeros(64)
        for _ in range(3):
            torch.zeros(128)
        given.add_(1), given.view(8, 8)
    assert (allocations.bytes_in_use, allocations.peak_bytes) == (256, 256 + 512)
    allocations.ignore([kept])
    allocations.restart_peak()
    assert (allocations.bytes_in_use, allocations.peak_bytes) == (0, 0)


# --- windows --------------------------------------------------------------------------------------------------------


def test_random_windows_are_seeded_uneven_and_short_enough_to_be_exact() -> None:
    windows = random_windows(50, 8, seed=1)
    assert windows == random_windows(50, 8, seed=1) != random_windows(50, 8, seed=2)
    assert len({len(window) for window in windows}) > 3
    assert max(map(len, windows)) <= LONGEST
    assert all(window[-1].request_end for window in windows)
    absent = [not any(micro.uses[i] for micro in window) for window in windows for i in range(len(OUTS))]
    assert any(absent)
    assert not all(absent)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 16])
def test_the_sums_of_random_windows_are_exact_in_bf16(world_size: int) -> None:
    for window in reference(random_windows(30, 8, seed=0), world_size):
        for total in window:
            assert torch.equal(total, total.bfloat16().double())


def test_every_rank_has_values_of_its_own() -> None:
    seen = {str(values(7, rank, 4)) for rank in range(4)}
    assert len(seen) == 4


def test_one_wrong_bit_is_a_wrong_update() -> None:
    right = [[torch.zeros(2), torch.ones(2)]]
    assert wrong_updates(right, right) == 0
    assert wrong_updates([[torch.zeros(2), torch.tensor([1.0, 1.0 + 2**-23])]], right) == 1


# --- a model of the user's own ----------------------------------------------------------------------------------------


def test_a_hugging_face_model_gets_tokens(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    choice = ModelChoice(layers=1, width=1, path=str(tmp_path))
    model = choice.build()
    tokens = choice.inputs(SimpleNamespace(module=model, global_rank=0, device="cpu"))
    assert tokens.shape == (1, TOKENS)
    model(tokens).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert choice.shape() == Shape(sum(p.numel() for p in model.parameters()), len(list(model.parameters())))


# --- the reference column -------------------------------------------------------------------------------------------

SHAPE = Shape(parameters=1000, tensors=10)
BF16, WIDE = Configuration(2, True, "bf16", "bf16"), Configuration(2, True, "bf16", "fp32")
DEVICE = Configuration(1, False, "bf16", "bf16")


@pytest.mark.parametrize(
    ("configuration", "engine", "device", "held"),
    [
        (WIDE, STOCK, "cpu", 4 * 1000 / 2),
        (WIDE, Engine(True, True), "cpu", 4 * 1000 / 2),
        (WIDE, Engine(True, False), "cpu", 0),
        (BF16, Engine(True), "cpu", 0),
        (DEVICE, Engine(True), "cpu", 2 * 1000 / 2),
        (WIDE, Engine(True, False), "cuda", 2 * 1000),
        (WIDE, STOCK, "cuda", 2 * 1000 + 4 * 1000 / 2),
    ],
)
def test_the_predicted_partition(configuration: Configuration, engine: Engine, device: str, held: float) -> None:
    assert bytes_between_requests(Row(configuration, engine), SHAPE, 2, device) == held


def test_the_public_figures_stand_for_their_own_shape() -> None:
    shape = Shape(8 * 4096**2, 8)
    engines = (STOCK, Engine(True, False), Engine(True, True))
    held = [bytes_between_requests(Row(WIDE, engine), shape, 1, "cuda") / 2**20 for engine in engines]
    assert bytes_between_requests(Row(WIDE, Engine(True, "auto")), shape, 1, "cuda") is None
    assert held == [816, 304, 816]
    assert bytes_between_requests(Row(WIDE, STOCK), shape, 1, "cpu") == 4 * 8 * 4096**2


def test_references_and_ratios_are_added() -> None:
    row = Row(WIDE, STOCK, {"precision": 0.0, "bytes_between_requests": 3000, "host_reads_backward": 5})
    add_references(row, SHAPE, 2, "cpu")
    assert (row.values["precision_reference"], row.values["precision_to_reference"]) == (0.0, 1.0)
    assert row.values["bytes_between_requests_to_reference"] == 1.5
    assert (row.values["host_reads_backward_reference"], row.values["host_reads_backward_to_reference"]) == (5, 1)
    qwen = Row(BF16, STOCK, {"host_reads_backward": 399})
    add_references(qwen, Shape(4 * 10**9, 398), 1, "cuda")
    assert qwen.values["host_reads_backward_to_reference"] == 1
    assert ratio(1.0, 0.0) is None


# --- many ranks and windows in one ----------------------------------------------------------------------------------


def test_the_most_over_ranks() -> None:
    assert most([3, 5]) == 5
    assert most([[1, 9], [4, 2]]) == [4, 9]


def test_ratios_are_of_neighbouring_windows() -> None:
    found = spread(ratios([1.0, 2.0, 9.0], [2.0, 4.0, 9.0]))
    assert (found.median, found.low, found.high) == (0.5, 0.5, 1.0)
