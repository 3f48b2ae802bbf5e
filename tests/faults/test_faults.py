"""The harness of injected faults: what it draws, what it runs, and that nothing that does not hold escapes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from requestzero.faults.combination import Combination, Fault, FrontEnd, Point
from requestzero.faults.damage import change, cut
from requestzero.faults.drawing import KINDS, draw
from requestzero.faults.expectation import broken
from requestzero.faults.journal import Record
from requestzero.faults.places import checkpoints
from requestzero.faults.ranks import End, Limits
from requestzero.faults.references import References
from requestzero.faults.setup import Precision, Setup
from requestzero.faults.table import summary, write_table
from requestzero.faults.trial import Result, try_out

RAISES = Combination(FrontEnd.ENGINE, Point.FORWARD, Fault.RAISE, Setup(stage=1), rank=1, update=2)
TEXT = "injected on rank 1: forward"


def test_a_drawing_has_every_fault_at_every_point_of_every_front_end() -> None:
    drawn = draw(500, seed=7)
    assert {(each.front_end, each.point, each.fault) for each in drawn} == set(KINDS)
    assert len(KINDS) == len(FrontEnd) * len(Point) * len(Fault)
    assert draw(50, seed=7) == drawn[:50]
    assert draw(50, seed=8) != drawn[:50]
    assert len({(each.front_end, each.point, each.fault) for each in drawn[:50]}) == 50


def test_a_drawing_has_every_training_at_every_point() -> None:
    drawn = draw(500, seed=7)
    for point in Point:
        setups = [each.setup for each in drawn if each.point is point]
        assert {(each.stage, each.offload) for each in setups} == {(n, o) for n in (1, 2, 3) for o in (False, True)}
        assert {each.precision for each in setups} == set(Precision)
        assert {each.saves_inside for each in setups} == {False, True}
        assert {each.aborts for each in setups} == ({True} if point is Point.ABORT else {False, True})


def ended() -> End:
    return End(Record(started=0, updates={1: "a", 2: "b"}, saved=2, injected=True, ended=True), 0, by_itself=True)


def failed(text: str = TEXT, error: str | None = "RankDisagreementError") -> End:
    record = Record(started=0, updates={1: "a"}, saved=1, injected=True, error=error, text=text)
    return End(record, 1, by_itself=True)


def changed(end: End, **fields: Any) -> End:
    return replace(end, record=replace(end.record, **fields))


BROKEN: list[tuple[Combination, list[End], str]] = [
    (RAISES, [failed(), changed(failed(), injected=False)], "the fault did not happen"),
    (RAISES, [replace(failed(), by_itself=False), failed()], "rank 0 did not end"),
    (RAISES, [changed(failed(), updates={1: "other"}), failed()], "rank 0 has applied another update"),
    (RAISES, [ended(), failed()], "rank 0 has ended as if nothing had happened"),
    (RAISES, [failed("something else"), failed()], "the ranks have ended with different errors"),
    (RAISES, [failed(error=None), failed()], r"rank 0 has ended without an error \(exit code 1\)"),
    (replace(RAISES, fault=Fault.KILL), [ended(), failed(error=None)], "have not noticed that a rank is gone"),
    (replace(RAISES, fault=Fault.SLEEP), [failed(), failed()], "a slow rank was not waited for"),
]


@pytest.mark.parametrize(("combination", "ends", "found"), BROKEN)
def test_what_does_not_hold_is_found(combination: Combination, ends: list[End], found: str) -> None:
    with pytest.raises(AssertionError, match=found):
        raise AssertionError("; ".join(broken(combination, ends, [ended(), ended()])))


HOLDS: list[tuple[Combination, list[End]]] = [
    (RAISES, [failed(f"rank 1 has failed: {TEXT}"), failed(TEXT, "InjectedError")]),
    (replace(RAISES, fault=Fault.KILL), [failed("The connection is lost"), failed(error=None)]),
    (replace(RAISES, fault=Fault.STOP), [failed("not come within"), replace(failed(error=None), by_itself=False)]),
    (replace(RAISES, fault=Fault.SLEEP), [ended(), ended()]),
]


@pytest.mark.parametrize(("combination", "ends"), HOLDS)
def test_what_holds_is_not(combination: Combination, ends: list[End]) -> None:
    assert list(broken(combination, ends, [ended(), ended()])) == []


def test_the_newest_checkpoint_is_the_one_that_is_named(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        (tmp_path / f"global_step{number}").mkdir()
    setup = Setup(stage=1)
    assert [path.name for path in checkpoints(tmp_path, setup)] == ["global_step10", "global_step2", "global_step1"]
    (tmp_path / "global_step2.1").mkdir()
    (tmp_path / "latest").write_text("global_step2.1")
    names = [path.name for path in checkpoints(tmp_path, setup)]
    assert names == ["global_step2.1", "global_step2", "global_step1"]


@pytest.mark.parametrize("damage", [cut, change])
def test_damage_is_done_to_what_is_read(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    import torch

    saved = {"weights": torch.arange(1000.0), "name": "a"}
    torch.save(saved, tmp_path / "file.pt")
    damage(tmp_path / "file.pt")
    try:
        found = torch.load(tmp_path / "file.pt")
    except RuntimeError:
        return
    assert not torch.equal(found["weights"], saved["weights"])


@pytest.mark.parametrize("damage", [cut, change])
def test_damage_is_done_to_the_sums_of_a_window(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    save_file({"weights": torch.ones(100)}, tmp_path / "file.safetensors")
    damage(tmp_path / "file.safetensors")
    try:
        found = load_file(tmp_path / "file.safetensors")
    except SafetensorError:
        return
    assert int((found["weights"] != 1).sum()) == 1


def test_results_are_told(tmp_path: Path) -> None:
    at_stage_2 = replace(RAISES, setup=Setup(stage=2, precision=Precision.BF16))
    error = Result(RAISES, "RankDisagreementError: why", resumed="update 2")
    results = [Result(RAISES, "hangs", broken=["rank 0 did not end"]), Result(at_stage_2, "trains on"), error]
    assert summary(results) == "3 combinations: 2 hold, 1 do not"
    write_table(tmp_path / "table.md", results, seed=3)
    text = (tmp_path / "table.md").read_text()
    assert "| forward | **does not hold** 1, goes on 1, resumed 1 | - |" in text
    assert "| ZeRO | stage 1 | 2 | 1 |" in text
    assert "| model | bf16 | 1 | 1 |" in text
    assert "Errors of the ranks without the fault: RankDisagreementError 1." in text
    assert "- engine, ZeRO 1: forward, raises: rank 0 did not end." in text


NO_GRADIENT = replace(RAISES, point=Point.BACKWARD, fault=Fault.NONE)
ABORTS = Setup(stage=1, aborts=True)
"""In the window after two updates its second request is aborted."""


@pytest.mark.parametrize(("setup", "place", "compared"), [(Setup(1), 1, 1), (ABORTS, 0, 0), (ABORTS, 2, 1)])
def test_the_same_gradient_is_none_in_what_it_is_compared_with(setup: Setup, place: int, compared: int) -> None:
    combination = replace(NO_GRADIENT, front_end=FrontEnd.LIGHTNING, setup=setup, request=place)
    assert combination.omits_gradient
    assert combination.in_reference() == replace(NO_GRADIENT, setup=setup.reference(), request=compared)


@pytest.mark.parametrize(("setup", "place"), [(Setup(2), 1), (ABORTS, 1)])
def test_ranks_disagree_or_the_request_is_aborted(setup: Setup, place: int) -> None:
    """No update goes on without the gradient."""
    assert not replace(NO_GRADIENT, setup=setup, request=place).omits_gradient


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("references"), Limits())


def test_a_rank_that_raises_ends_the_other_and_the_run_resumes(references: References, tmp_path: Path) -> None:
    result = try_out(RAISES, references, tmp_path, Limits())
    assert result.broken == []
    assert TEXT in result.outcome
    assert result.resumed == "update 2"


def test_an_update_without_a_gradient(references: References, tmp_path: Path) -> None:
    combination = replace(NO_GRADIENT, front_end=FrontEnd.ACCELERATE)
    result = try_out(combination, references, tmp_path, Limits())
    assert (result.broken, result.outcome) == ([], "trains on")
    found, whole = references.with_fault(combination)[0], references.whole(combination.setup)[0]
    assert found.record.updates[3] != whole.record.updates[3]


def test_a_fault_that_nobody_notices_is_told(references: References, tmp_path: Path) -> None:
    result = try_out(replace(RAISES, update=99), references, tmp_path, Limits())
    assert result.broken == ["the fault did not happen"]


def test_a_resumed_run_with_other_weights_is_told(references: References, tmp_path: Path) -> None:
    """The reference is another run: that of another stage, whose partitions differ."""
    other: Any = References(tmp_path / "other", Limits())
    other.whole = lambda setup: references.whole(replace(setup, stage=2))
    result = try_out(RAISES, other, tmp_path / "trial", Limits())
    assert any("the resumed run ends with other weights" in each for each in result.broken)
