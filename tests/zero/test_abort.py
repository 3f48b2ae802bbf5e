"""Requests that are aborted: the window without them, bit for bit as if they had never come."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

from requestzero.config.engine_options import take_engine_options
from requestzero.zero.common.rollback import RequestRollback
from support.engines import build, masters, module_weights
from support.fp16 import fp16_where_needed
from support.grid import PLACES, SUMS
from support.logs import logged_by
from support.muon import batch, build_muon, momentum
from support.poison import interrupt_backward
from support.ranks import RankGroup
from support.setup import Setup
from support.stage_3 import GATHERED
from support.updates import assert_sums, difference
from support.windows import ALL, OUTS, Micro, backward, inputs_of, reference

ABORT = {"requestzero": {"abort": True}}
MOMENTS = ("announced", "between", "ended", "block", "interrupted", "forward")
"""When a request is aborted: before its first backward, before its last, after its end, by ``AbortRequest`` in its
block, by an exception in the middle of its last backward, by one in its last forward."""

CONFIGURATIONS = [
    Setup(stage=stage, offload=offload, model=model, accum=accum, retain=retain, config=ABORT)
    for (stage, offload), (model, accum) in product(PLACES, SUMS)
    for retain in ((False, True) if offload and (model, accum) == ("bf16", "fp32") else (False,))
]
STAGE_3 = [Setup(stage=3, offload=offload, model="bf16", zero=GATHERED, config=ABORT) for offload in (False, True)]
OTHERS = [
    Setup(offload=True, model="bf16", zero={"overlap_comm": True, "reduce_bucket_size": 8}, config=ABORT),
    Setup(stage=1, model="bf16", zero={"overlap_comm": True}, config=ABORT),
    Setup(model="bf16", accum="bf16", zero={"overlap_comm": True, "reduce_bucket_size": 8}, config=ABORT),
    Setup(stage=1, offload=True, model="bf16", retain="auto", groups=3, config=ABORT),
    Setup(model="bf16", checkpointing="reentrant", config=ABORT),
    Setup(offload=True, model="bf16", config={"requestzero": {"abort": True, "reduce_gradients_at": "request"}}),
    Setup(offload=True, config={"requestzero": {"abort": True, "reduce_gradients_at": "window"}}),
    Setup(model="bf16", config={"requestzero": {"abort": True, "reduce_gradients_at": "auto"}}),
    Setup(config={"requestzero": {"abort": True, "rank_dependent_parameters": True}}),
    Setup(stage=1, zero={"contiguous_gradients": False}, config=ABORT),
    Setup(model="fp16", accum="fp16", config=ABORT | {"fp16": {"enabled": True, "initial_scale_power": 4}}),
    Setup(offload=True, model="fp16", config=ABORT | {"fp16": {"enabled": True, "initial_scale_power": 4}}),
]


@dataclass(frozen=True)
class Request:
    """One request; ``moment`` is empty where it is kept."""

    micros: list[Micro]
    moment: str = ""


def drawn(seed: int, windows: int, moments: tuple[str, ...] = MOMENTS) -> list[list[Request]]:
    """Random windows with every moment in turn, in which parameters are absent, and at least one request is kept."""
    chance = random.Random(seed)
    found, position = [], 0
    for _ in range(windows):
        window = []
        for number in range(chance.randint(2, 4)):
            moment = moments[position % len(moments)] if number % 2 == seed % 2 else ""
            position += bool(moment)
            micros = [_micro(chance) for _ in range(chance.randint(1, 3))]
            window.append(Request([*micros[:-1], replace(micros[-1], request_end=True)], moment))
        found.append(window if any(not r.moment for r in window) else [*window, Request([Micro(ALL, 1)])])
    return found


def _micro(chance: random.Random) -> Micro:
    uses = tuple(chance.random() < 0.6 for _ in OUTS)
    return Micro(uses if any(uses) else ALL, chance.randrange(10**6), request_end=False)


class Interrupted(Exception):
    pass


def run_request(engine: Any, request: Request, name: str) -> None:
    if request.moment == "block":
        run_block(engine, request, name)
        return
    engine.begin_request(name, micro_batches=len(request.micros))
    if request.moment != "announced":
        *first, last = request.micros
        for micro in first:
            weighted(engine, micro)
        if request.moment == "interrupted":
            engine.add_weight(100.0)
            interrupt_backward(engine)
        elif request.moment == "forward":
            with pytest.raises(TypeError):
                engine("no micro-batch")
        elif request.moment != "between":
            weighted(engine, last)
    if request.moment:
        state = torch.get_rng_state()
        engine.abort_request(request.moment)
        assert torch.equal(torch.get_rng_state(), state)


def run_block(engine: Any, request: Request, name: str) -> None:
    from requestzero import AbortRequest

    with engine.request(name):
        for micro in request.micros:
            weighted(engine, replace(micro, request_end=False))
        raise AbortRequest("block")


def weighted(engine: Any, micro: Micro) -> None:
    engine.add_weight(1.0)
    backward(engine, micro)


@contextmanager
def undoing(undoes: bool) -> Iterator[None]:
    """As a control: leave what an aborted request has added to sums where it is."""
    if undoes:
        yield
        return
    with patch.object(RequestRollback, "_restore", lambda self, start: None):
        yield


def check_counts(engine: Any, window: list[Request], number: int, micro_batches: int) -> None:
    kept = [f"{number}.{position}" for position, request in enumerate(window) if not request.moment]
    found = engine.update_window
    assert (found.micro_batches, found.requests, found.request_ids) == (micro_batches, len(kept), kept)
    assert (found.weights.reported, found.weights.on_host) == (micro_batches, micro_batches)


def differs(engine: Any, applied: list[torch.Tensor], kept: list[Micro]) -> bool:
    import deepspeed.comm as dist

    expected = reference([kept], dist.get_world_size())[0]
    norm = math.sqrt(sum(float(total.square().sum()) for total in expected))
    same_norm = abs(float(engine.get_global_grad_norm()) - norm) <= 1e-6 * norm
    return not (same_norm and all(map(torch.equal, applied, expected)))


def wrong_windows(setup: Setup, seed: int, undoes: bool = True) -> tuple[int, int, int]:
    """Windows with aborted requests that differ from plain PyTorch, aborted requests that were counted, and copies."""
    wrong = aborted = 0
    with fp16_where_needed(setup.model), undoing(undoes):
        engine = build(setup)
        before = masters(engine)
        for number, window in enumerate(drawn(seed, 6)):
            for position, request in enumerate(window):
                run_request(engine, request, f"{number}.{position}")
            aborted += sum(bool(request.moment) for request in window)
            kept = [micro for request in window if not request.moment for micro in request.micros]
            check_counts(engine, window, number, len(kept))
            engine.step()
            after = masters(engine)
            wrong += differs(engine, difference(before, after), kept)
            before = after
        assert engine.aborted_requests == aborted
        copies = engine.optimizer.rollback.copies
        engine.destroy()
    return wrong, aborted, copies


@pytest.mark.parametrize("setup", [*CONFIGURATIONS, *STAGE_3, *OTHERS], ids=str)
def test_the_other_requests_are_applied_exactly(two_ranks: RankGroup, setup: Setup) -> None:
    for wrong, aborted, copies in two_ranks.run(wrong_windows, setup, seed=len(str(setup))):
        assert (wrong, aborted > 0) == (0, True)
        if setup in CONFIGURATIONS:
            keeps = setup.stage == 1 or (setup.offload and (setup.model, setup.accum) == ("bf16", "fp32"))
            assert (copies == 0) == keeps


@pytest.mark.parametrize("setup", [each for each in CONFIGURATIONS if each.stage == 2] + STAGE_3, ids=str)
def test_control_without_the_undo(two_ranks: RankGroup, setup: Setup) -> None:
    for wrong, aborted, _ in two_ranks.run(wrong_windows, setup, seed=1, undoes=False):
        assert wrong > 0 < aborted


def muon(setup: Setup, bad: bool) -> list[torch.Tensor]:
    """Weights and momentum after two updates, with a request that is aborted from each or without it."""
    engine = build_muon(setup.stage, setup.offload, setup.model, setup.accum, abort=True)
    for step in range(2):
        for request in range(3 if bad else 2):
            engine.begin_request(request)
            for part in range(2):
                engine.set_gradient_accumulation_boundary(part == 1)
                engine.backward(engine(batch(engine, step, 2 * request + part)))
                if request == 2 and part == step:
                    engine.abort_request("bad")
                    break
        engine.set_gradient_accumulation_boundary(True)
        engine.step(divisor=engine.update_window.micro_batches)
    assert engine.aborted_requests == (2 if bad else 0)
    result = [*module_weights(engine), *momentum(engine)]
    engine.destroy()
    return result


@pytest.mark.parametrize(
    "setup",
    [Setup(stage=1, model="bf16"), Setup(model="bf16", accum="bf16"), Setup(offload=True, model="bf16")],
    ids=str,
)
def test_muon(two_ranks: RankGroup, setup: Setup) -> None:
    with_bad, without = (two_ranks.run(muon, setup, each) for each in (True, False))
    for a, b in zip(with_bad, without, strict=True):
        assert all(map(torch.equal, a, b))


# --- without the option ---------------------------------------------------------------------------------------------


def without_the_option(setup: Setup) -> list[tuple[str, bool]]:
    """Of a window's first and third request: the moments when they could not be aborted; the others are applied."""
    found = []
    for moment, first in product(("announced", "between", "ended"), (True, False)):
        engine = build(setup)
        kept = [] if first else [Micro(ALL, 1), Micro(ALL, 2)]
        for micro in kept:
            engine.begin_request("kept")
            weighted(engine, micro)
        before = engine.update_window.micro_batches
        micros = [Micro(ALL, 3, request_end=False), Micro(ALL, 4)]
        try:
            run_request(engine, Request(micros, moment), "aborted")
        except RuntimeError as error:
            assert "set the option abort" in str(error)  # noqa: PT017
            assert engine.update_window.micro_batches == before + {"announced": 0, "between": 1, "ended": 2}[moment]
            found.append((moment, first))
        else:
            start = masters(engine)
            engine.set_gradient_accumulation_boundary(True)
            engine.step()
            assert_sums(difference(start, masters(engine)), kept)
        engine.destroy()
    return found


REFUSED: list[tuple[Setup, list[tuple[str, bool]]]] = [
    (Setup(stage=1), [("between", False), ("ended", False)]),
    (Setup(stage=1, at="request"), [("ended", False)]),
    (Setup(offload=True, model="bf16"), [("ended", False)]),
    (Setup(model="bf16"), [("between", False), ("ended", False)]),
    (Setup(offload=True), [("between", False), ("ended", False)]),
    (Setup(stage=3, model="bf16", zero=GATHERED), [("between", False), ("ended", False)]),
]


@pytest.mark.parametrize(("setup", "refused"), REFUSED, ids=str)
def test_what_costs_nothing_needs_no_option(
    two_ranks: RankGroup, setup: Setup, refused: list[tuple[str, bool]]
) -> None:
    assert two_ranks.run(without_the_option, setup) == [refused] * 2


def refusals(setup: Setup) -> list[str]:
    engine = build(setup)
    messages = []

    def refused(reason: str) -> None:
        with pytest.raises(RuntimeError) as error:
            engine.abort_request(reason)
        messages.append(str(error.value))

    refused("nothing has begun")
    weighted(engine, Micro(ALL, 1))
    engine.step()
    refused("applied")
    engine.destroy()
    return messages


def test_what_cannot_be_aborted_says_why(two_ranks: RankGroup) -> None:
    nothing, applied = two_ranks.run(refusals, Setup(offload=True, config=ABORT))[0]
    assert nothing.startswith("abort_request('nothing has begun') is not possible: no request has begun since")
    assert "no request has begun since the last step" in applied


def after_an_edit(setup: Setup, folder: str) -> list[str]:
    """Abort after a user has set a gradient that one rank owns, and after a save; what the second request was."""
    from deepspeed.utils import safe_set_full_grad

    engine = build(setup)
    start = masters(engine)
    for name, seed in (("a", 1), ("b", 2)):
        engine.begin_request(name)
        weighted(engine, Micro(ALL, seed))
    param = next(engine.module.parameters())
    safe_set_full_grad(param, torch.ones(getattr(param, "ds_shape", param.shape), device=engine.device))
    messages = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            engine.abort_request("late")
        messages.append(str(error.value))
        engine.save_checkpoint(folder, tag="t")
    engine(*inputs_of(engine, 4), ALL)  # of a request that nobody has announced
    engine.abort_request("the next one")
    weighted(engine, Micro(ALL, 3))
    engine.abort_request("and the one after it")
    resumed = build(setup)
    resumed.load_checkpoint(folder, tag="t")
    for each in (engine, resumed):
        assert each.update_window.request_ids == ["a", "b"]
        each.step()
    for ours, theirs in zip(masters(engine), masters(resumed), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(difference(start, masters(engine))[0], torch.ones_like(start[0]))
    engine.destroy()
    resumed.destroy()
    return messages


@pytest.mark.parametrize(
    "setup",
    [
        Setup(stage=1, config=ABORT),
        Setup(config=ABORT),
        Setup(offload=True, config=ABORT),
        Setup(offload=True, model="bf16", config=ABORT),
        STAGE_3[0],
    ],
    ids=str,
)
def test_a_late_abort_is_refused_on_all_ranks_alike(two_ranks: RankGroup, setup: Setup, tmp_path: Path) -> None:
    """After ``safe_set_full_grad``, which sets a gradient of the whole window, and after a save of the request."""
    for edited, saved in two_ranks.run(after_an_edit, setup, str(tmp_path)):
        assert "safe_set_local_grad() has set a gradient of the window since it began" in edited
        assert "no request has begun since the last step, abort, zero_grad() or checkpoint" in saved


def moved_states(setup: Setup) -> None:
    """The copy of the sums moves with the states, in a request that is then aborted."""
    engine: Any = build(setup)
    start, kept, devices = masters(engine), [Micro(ALL, 1), Micro(ALL, 3)], []
    weighted(engine, kept[0])
    weighted(engine, Micro(ALL, 2, request_end=False))
    move = RequestRollback.move

    def noted(self: RequestRollback, device: str) -> None:
        """Also give up the memory that is moved from, which on the CPU is that which is moved to."""
        before = [copy for copies in self._backups for copy in copies]
        self._backups = [[copy.clone() for copy in copies] for copies in self._backups]
        for copy in before:
            copy.fill_(math.nan)
        move(self, device)
        devices.append(device)
        assert all(copy.device.type == torch.device(device).type for copies in self._backups for copy in copies)

    with patch.object(RequestRollback, "move", noted):
        engine.offload_states(include=[OffloadStateTypeEnum.lp_grads], pin_memory=False)
        assert engine.request_backup_bytes > 0
        engine.reload_states()
    engine.abort_request("after a pause")
    weighted(engine, kept[1])
    engine.step()
    assert_sums(difference(start, masters(engine)), kept)
    assert [torch.device(device).type for device in devices] == ["cpu", engine.device.type]
    engine.destroy()


@pytest.mark.parametrize("setup", [Setup(config=ABORT), STAGE_3[0]], ids=str)
def test_a_copy_is_moved_with_the_states(two_ranks: RankGroup, setup: Setup) -> None:
    two_ranks.run(moved_states, setup)


# --- counters, names ------------------------------------------------------------------------------------------------


def names_and_counters(setup: Setup, folder: str) -> tuple[list[str], int]:
    from requestzero import AbortRequest, DuplicateRequestError

    engine = build(setup)
    with logged_by("requestzero") as messages:
        for name, aborted in (("a", False), ("b", True), ("a", None), ("b", False)):
            if aborted is None:
                with pytest.raises(DuplicateRequestError, match=r"'a', once=True\): it is in the open window"):
                    engine.begin_request(name, once=True)
                continue
            with engine.request(name, once=True):
                weighted(engine, Micro(ALL, 1, request_end=False))
                if aborted:
                    raise AbortRequest("not needed")
        with pytest.raises(KeyError), engine.request("c"):
            raise KeyError("c")
    engine.step()
    for known in ("a", "b"):
        with pytest.raises(DuplicateRequestError, match="it was applied before"):
            engine.begin_request(known, once=True)
    engine.begin_request("c", once=True)
    engine.abort_request("only a look")
    with pytest.raises(ValueError, match="needs the name"):
        engine.begin_request(once=True)
    engine.save_checkpoint(folder, tag="t")
    engine.destroy()
    resumed = build(setup)
    resumed.load_checkpoint(folder, tag="t")
    with pytest.raises(DuplicateRequestError, match="it was applied before"):
        resumed.begin_request("b", once=True)
    resumed.begin_request("c", once=True)
    counted = resumed.aborted_requests
    resumed.destroy()
    return messages, counted


def test_an_abort_is_told_and_counted_once_and_no_request_comes_twice(two_ranks: RankGroup, tmp_path: Path) -> None:
    (messages, counted), (silent, same) = two_ranks.run(names_and_counters, Setup(config=ABORT), str(tmp_path))
    assert messages == [
        "Aborted request 'b': left out of update 1 (all ranks: not needed).",
        "Aborted request 'c': left out of update 1 (all ranks: KeyError: 'c').",
    ]
    assert (silent, counted, same) == ([], 3, 3)


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_without_common_requests_cannot_abort_one(stage: int) -> None:
    own = {"abort": True, "rank_dependent_micro_batches": True}
    with pytest.raises(ValueError, match=r"requestzero\.abort=true and .*rank_dependent_micro_batches=true disagree"):
        take_engine_options({"zero_optimization": {"stage": stage}, "requestzero": own})
