"""The self-test: what it runs, that it finds what is wrong, and what it prints."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from requestzero.doctor.__main__ import main
from requestzero.doctor.verify import gpu, life_cycle, slow_windows
from requestzero.doctor.verify.configurations import ALWAYS, PLACES, SUMS, configurations
from requestzero.doctor.verify.result import Check, Run, Updates, Verification
from requestzero.doctor.verify.run import GPU_LIMIT, Group, Part, plan, run_group
from requestzero.doctor.verify.setup import Setup
from requestzero.doctor.verify.updates import compare, telling_windows
from requestzero.environment.proved_sources import differences
from requestzero.environment.versions import UNPROVED, deepspeed_folder
from requestzero.probe.ranks import Launch
from requestzero.probe.windows import random_windows
from support.fake_cuda import fake_cuda
from support.fp16 import fp16_on_cpu
from support.ranks import RankGroup


def test_enough_is_configured() -> None:
    """At least 28 on the CPU; every place with every pair of dtypes, and both halves of every option."""
    found = configurations(cuda=False, stage_3=False)
    assert len({str(setup) for setup in found}) == len(found) >= 28
    plain = {(s.stage, s.offload, s.model, s.accum) for s in found if s == Setup(s.stage, s.offload, s.model, s.accum)}
    assert plain == {(*place, *dtypes) for place in PLACES for dtypes in SUMS}
    assert ALWAYS == 28
    assert {"fp16"} == {s.model for s in configurations(cuda=True, stage_3=False)} - {s.model for s in found}


def test_stage_3_is_configured() -> None:
    found = configurations(cuda=False, stage_3=True)
    more = [setup for setup in found if setup.stage == 3]
    assert [setup for setup in found if setup.stage != 3] == configurations(cuda=False, stage_3=False)
    assert set(map(str, more)) <= set(map(str, found[:ALWAYS]))
    assert {(s.model, s.accum) for s in more} == set(SUMS)
    assert {(s.offload, "offload_param" in s.zero) for s in more} == {
        (False, False),
        (True, False),
        (True, True),
        (False, True),
    }


def test_every_configuration_has_telling_windows_of_its_own() -> None:
    drawn = [telling_windows(number) for number in range(len(configurations(cuda=False, stage_3=True)))]
    assert len({str(windows) for windows in drawn}) == len(drawn)
    for windows in drawn:
        several = [window for window in windows if sum(micro.request_end for micro in window) > 1]
        assert any(len({i for micro in window for i, used in enumerate(micro.uses) if used}) < 5 for window in several)


def test_the_ranks_by_gpus() -> None:
    assert [(group.ranks, group.device, group.part, group.limit) for group in plan(0)] == [
        (2, "cpu", Part.UPDATES, None)
    ]
    parts = [(Part.UPDATES, False), (Part.GPU, False), (Part.PROBE, False)]
    assert [(g.part, g.shares_device) for g in plan(1) if g.ranks == 1] == parts
    assert [(g.part, g.shares_device) for g in plan(1) if g.ranks == 2] == [(Part.UPDATES, True)]
    assert all(group.limit is not None for gpus in (1, 8) for group in plan(gpus))
    assert [(g.ranks, g.device, g.part) for g in plan(8)] == [(8, "cuda", part) for part in Part]


def compared_until(end: float | None, now: float) -> tuple[int, list[str]]:
    from requestzero.doctor.verify import updates

    local = SimpleNamespace(monotonic=lambda: now if torch.distributed.get_rank() == 0 else 0.0)
    instant = Mock(return_value=Updates("", 1, 0))
    with patch.object(updates, "time", local), patch.object(updates, "compare", instant):
        found, left_out = updates.compare_all(lambda text: None, False, True, end)
    return len(found), left_out


def test_what_there_is_no_time_for_is_left_out_on_all_ranks(two_ranks: RankGroup) -> None:
    names = [str(setup) for setup in configurations(cuda=False, stage_3=True)]
    assert two_ranks.run(compared_until, 50.0, 49.0) == [(len(names), [])] * 2
    assert two_ranks.run(compared_until, 50.0, 51.0) == [(ALWAYS, names[ALWAYS:])] * 2
    assert two_ranks.run(compared_until, None, 51.0) == [(len(names), [])] * 2


# --- it can fail ----------------------------------------------------------------------------------------------------


def compared(stock: bool) -> Updates:
    import deepspeed

    setup = Setup(stage=2, model="bf16", accum="bf16")
    with patch("requestzero.initialize", deepspeed.initialize) if stock else nullcontext():
        return compare(setup, random_windows(3, 3, seed=0))


def test_it_finds_the_wrong_updates_of_stock(two_ranks: RankGroup) -> None:
    assert [each.wrong for each in two_ranks.run(compared, False)] == [0, 0]
    wrong = [each.wrong for each in two_ranks.run(compared, True)]
    assert wrong[0] == wrong[1] > 0


def with_one_wrong_weight() -> Updates:
    import torch.distributed as dist

    from requestzero.doctor.verify import updates

    def weights(engine: Any) -> Any:
        found = original(engine)
        found[2][0, 0] += dist.get_rank()
        return found

    original = updates.module_weights
    with patch.object(updates, "module_weights", weights):
        return compare(Setup(), random_windows(2, 2, seed=0))


def test_a_weight_that_is_wrong_on_one_rank_counts(two_ranks: RankGroup) -> None:
    assert [each.wrong for each in two_ranks.run(with_one_wrong_weight)] == [2, 2]


def test_an_option_that_deepspeed_does_not_have_is_told(two_ranks: RankGroup) -> None:
    setup = Setup(zero={"reduce_bucket_size": "large"})
    for found in two_ranks.run(compare, setup, random_windows(1, 1, seed=0)):
        assert found.wrong == found.updates == 5
        assert found.error.startswith("ValidationError: 1 validation error")


def has_stage_3() -> bool:
    package = deepspeed_folder()
    return package is not None and not differences(package, stage_3=True)


def life_cycle_of(folder: Path) -> list[Check]:
    return life_cycle.check_life_cycle(lambda text: None, folder, has_stage_3())


def unguarded_life_cycle(folder: Path) -> list[Check]:
    """The engine says that it has applied everything, and saves nothing."""
    from requestzero.zero.engine import RequestZeROEngine

    with (
        patch.object(RequestZeROEngine, "was_step_applied", lambda self: True),
        patch.object(RequestZeROEngine, "save_checkpoint", lambda self, folder: True),
    ):
        return life_cycle_of(folder)


def test_the_life_cycle_is_checked(two_ranks: RankGroup, tmp_path: Path) -> None:
    for checks in two_ranks.run(life_cycle_of, tmp_path / "good"):
        assert len(checks) == (16 if has_stage_3() else 11)
        assert [check.name for check in checks if not check.passed] == []
    for checks in two_ranks.run(unguarded_life_cycle, tmp_path / "bad"):
        failed = [check.name.split(": ")[1] for check in checks if not check.passed]
        assert {name.split()[0] + " " + name.split()[1] for name in failed} == {
            "a window",
            "a checkpoint",
            "a resumed",
            "a run",
        }


def fails_on_rank_1() -> Check:
    import torch.distributed as dist

    return life_cycle.on_all_ranks("check", lambda: dist.get_rank() == 0)


def test_a_check_has_to_hold_on_every_rank(two_ranks: RankGroup) -> None:
    assert [check.passed for check in two_ranks.run(fails_on_rank_1)] == [False, False]


def fp16_configurations() -> list[Updates]:
    found = [setup for setup in configurations(cuda=True, stage_3=False) if setup.model == "fp16"]
    with fp16_on_cpu():
        return [compare(setup, telling_windows(number)) for number, setup in enumerate(found)]


def test_the_configurations_of_gpus_alone_are_exact(two_ranks: RankGroup) -> None:
    for found in two_ranks.run(fp16_configurations):
        assert len(found) == 8
        assert [each for each in found if each.wrong or each.error] == []


# --- what only a GPU has, as far as the CPU goes ----------------------------------------------------------------------


SETUP = slow_windows.SETUP
GPU_CHECKS = {
    "streams": lambda: gpu._streams(SETUP),
    "overlap": lambda: gpu._streams(SETUP, overlap_comm=True),
    "retained": lambda: gpu._streams(replace(SETUP, retain=True)),
    "bf16": lambda: gpu._streams(replace(SETUP, accum="bf16"), overlap_comm=True),
    "stage 3": lambda: gpu._streams(slow_windows.STAGE_3),
    "prefetch": gpu._prefetches,
    "auto": gpu._keeps,
}


def gpu_check(name: str) -> bool:
    with patch.object(slow_windows, "WIDTH", 16), patch.object(torch.cuda, "_sleep", lambda cycles: None):
        return bool(GPU_CHECKS[name]())


@pytest.mark.parametrize("name", GPU_CHECKS)
def test_the_arithmetic_of_the_gpu_checks(two_ranks: RankGroup, name: str) -> None:
    assert two_ranks.run(gpu_check, name) == [True, True]


def all_gpu_checks() -> list[Check]:
    with fake_cuda(width=16):
        return gpu.check_gpu(lambda text: None, stage_3=True)


def test_all_gpu_checks_run(one_rank: RankGroup) -> None:
    """On the CPU only that they run to their end, and count as they should: nothing there can be late."""
    (checks,) = one_rank.run(all_gpu_checks)
    assert len(checks) == 12
    assert [check for check in checks[:-1] if not check.passed] == []
    assert (checks[-1].name, checks[-1].passed) == ("host waits in two backwards", None)


def test_ranks_that_cannot_share_a_gpu_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "ones", Mock(side_effect=NotImplementedError()))
    check = gpu.cannot_communicate()
    assert check is not None
    assert (check.passed, check.detail) == (None, "not possible with this backend: NotImplementedError: ")
    assert Run("two ranks that share the GPU", checks=[check]).passed


def late_gpu_check() -> bool:
    """A restored partition holds something else than the sum, as one that nobody waits for."""
    from requestzero.zero.stage_1_and_2.accumulators.offload_partition import PartitionAccumulator

    with patch.object(PartitionAccumulator, "_reload", lambda self, flat: flat.fill_(math.nan)):
        return gpu_check("streams")


def test_a_gpu_check_can_fail(two_ranks: RankGroup) -> None:
    assert two_ranks.run(late_gpu_check) == [False, False]


def test_a_late_copy_waits_on_the_device() -> None:
    """Each copy that leaves its device, with ``meta`` for the device; not a cast, nor what is as small as an input."""
    host, device = torch.zeros(2, slow_windows.WIDTH), torch.zeros(2, slow_windows.WIDTH, device="meta")
    with patch.object(torch.cuda, "_sleep") as sleep:
        with slow_windows.LateCopies():
            device.copy_(host, non_blocking=True)
            host.to("meta", non_blocking=True)
            torch._foreach_copy_([device], [host])
            assert sleep.call_count == 3
            host.to(torch.bfloat16)
            host.copy_(host.clone())
            host[0].to("meta")
        assert sleep.call_count == 3


# --- the result -------------------------------------------------------------------------------------------------------


def verification(*runs: Run, different: tuple[str, ...] = ()) -> Verification:
    return Verification(None, different, (), list(runs), 12.3)


def test_the_result_counts_what_is_wrong() -> None:
    good = Run("two ranks", [Updates("default", 15, 0)], [Check("a check", True), Check("measured", None, "7")])
    assert (verification(good).status, verification(good).lines()[-1]) == (
        0,
        "0 of 15 parameter updates are wrong, in 1 configurations (12 s): passed",
    )
    without = replace(verification(good), stage_3=False).lines()[-1]
    shortened = verification(replace(good, left_out=["stage=1", "stage=2"])).lines()[-1]
    assert shortened.endswith(
        "in 1 of 3 configurations (12 s): passed; for the others there was no time (--all runs them)"
    )
    assert without.endswith(f"passed; stage 3, refused with this DeepSpeed, was left out ({UNPROVED}=1 tests it)")
    bad = Run("others", [Updates("stage=1", 15, 2), Updates("offload=True", 15, 15, "TypeError: no")])
    text = "\n".join(verification(good, bad, different=("a:b",)).lines())
    for part in ("stage=1: 2 of 15 updates are wrong", "1 configurations: TypeError: no", "17 of 45", "FAILED"):
        assert part in text
    assert "DeepSpeed: 1 definitions of stages 1 to 3 are not those that were proved" in text
    assert verification(good, bad).status == 5
    assert verification(Run("ranks", failure="rank 1 died")).status == 5
    assert verification(Run("ranks", checks=[Check("a check", False)])).status == 5
    assert json.loads(json.dumps(verification(bad).as_json()))["runs"][0]["updates"][0]["wrong"] == 2


def test_the_command_writes_what_it_prints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = verification(Run("ranks", [Updates("default", 15, 1)]))
    monkeypatch.setattr("requestzero.doctor.verify.run.verify", lambda *given: found)
    assert main(["--verify", "--out", str(tmp_path / "result.json"), "--json"]) == 5
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "result.json").read_text())
    assert main(["--verify"]) == 5
    assert "1 of 15 parameter updates are wrong" in capsys.readouterr().out


def test_on_a_gpu_the_result_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = replace(verification(Run("ranks", failure="died")), gpus=1)
    monkeypatch.setattr("requestzero.doctor.verify.run.verify", lambda *given: found)
    assert main(["--verify"]) == 5
    assert json.loads((tmp_path / "outputs/verify.json").read_text())["runs"][0]["failure"] == "died"
    assert "wrote outputs/verify.json" in capsys.readouterr().err


def test_a_result_that_could_not_be_written_is_told_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for out, why in (
        (tmp_path, "is a directory: give a file"),
        (tmp_path / "file/result.json", "is a file"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["--verify", "--out", str(out)])
        assert why in capsys.readouterr().err


def test_a_result_that_is_not_written_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").write_text("")
    found = replace(verification(Run("ranks", [Updates("default", 15, 0)])), gpus=1)
    monkeypatch.setattr("requestzero.doctor.verify.run.verify", lambda *given: found)
    assert main(["--verify"]) == 0
    printed = capsys.readouterr()
    assert "0 of 15 parameter updates are wrong" in printed.out
    assert "could not write outputs/verify.json" in printed.err


# --- its time ---------------------------------------------------------------------------------------------------------


def test_ranks_that_hang_are_ended(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The clock is put forward when the long wait begins, however long the ranks' start has taken.

    What they print goes to the standard error: the standard output may be JSON.
    """
    ahead = 0.0

    def tell(text: str) -> None:
        nonlocal ahead
        ahead = 600.0 if text.endswith("a long wait") else 0.0

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead)
    monkeypatch.setattr("requestzero.probe.ranks.time", clock)
    monkeypatch.setattr("requestzero.doctor.verify.run.Launch", hanging)
    machine, run = run_group(Group("ranks", 1, "cpu", limit=300.0), True, time.monotonic(), tell)
    assert (machine, run.passed) == (None, False)
    assert run.failure == "at a long wait: ended, since it was not done after 300 s"
    printed = capfd.readouterr()
    assert ("from C++" in printed.out, "from C++" in printed.err) == (False, True)


def hanging(work: Any, *args: Any, **options: Any) -> Launch:
    return Launch(wait_long, *args, **options)


def wait_long(report: Callable[[str], None]) -> None:
    os.write(1, b"from C++")
    report("a long wait")
    time.sleep(600)


def test_groups_end_with_the_time_of_all() -> None:
    begun = time.monotonic() - GPU_LIMIT
    machine, run = run_group(Group("ranks", 1, "cpu", limit=60.0), True, begun, lambda text: None)
    assert (machine, run.failure) == (None, "not begun: the 480 s of the self-test are over")


@pytest.mark.parametrize("arguments", [["--verify", "ds.json"], ["--out", "result.json"], ["--device", "cpu"]])
def test_arguments_that_do_not_go_together(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "--verify" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["--verify", "--device", "cuda"]) == 4
    assert "PyTorch finds no GPU here" in capsys.readouterr().err
