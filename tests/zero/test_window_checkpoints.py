"""Checkpoints inside an update window: the resumed run has the bits of the uninterrupted one."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from requestzero.zero.window_checkpoint import replacing, sums
from requestzero.zero.window_checkpoint.record import FILE
from requestzero.zero.window_checkpoint.sums import OwnedPart
from support.engines import build, masters
from support.fp16 import fp16_where_needed
from support.models import Few, OneWeight, feed
from support.muon import batch, build_muon, momentum
from support.ranks import RankGroup
from support.setup import Setup
from support.windows import OUTS, Micro, Window, backward

WINDOWS, SAVED_IN, SAVED_AFTER = 3, 1, 2
"""Windows of a run, the one with the checkpoint, and its requests before that."""
ROUNDED = 0.37
"""Factor of losses with which sums round in every dtype."""
CLIPPED: dict[str, Any] = {"gradient_clipping": 0.5}
DTYPES = [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")]
CONFIGURATIONS = [
    *(Setup(s, o, m, a, config=CLIPPED) for s in (1, 2) for o in (False, True) for m, a in DTYPES),
    *(Setup(s, True, "bf16", "fp32", retain=True, config=CLIPPED) for s in (1, 2)),
]
OTHER_OPTIONS = [
    Setup(2, True, "bf16", "fp32", at="window", config=CLIPPED),
    Setup(1, False, "bf16", "fp32", at="request", groups=3, config=CLIPPED),
    Setup(2, True, "bf16", "bf16", groups=3, zero={"round_robin_gradients": True}, config=CLIPPED),
    Setup(2, True, "fp32", "fp32", zero={"overlap_comm": True, "reduce_bucket_size": 8}, config=CLIPPED),
    Setup(2, False, "fp16", "fp32", config=CLIPPED | {"fp16": {"enabled": True, "initial_scale_power": 3}}),
    Setup(2, True, "fp16", "fp16", config=CLIPPED | {"fp16": {"enabled": True, "initial_scale_power": 3}}),
    Setup(3, False, "bf16", "fp32", config=CLIPPED),
    Setup(3, True, "bf16", "bf16", config=CLIPPED),
]
OFFLOADED = Setup(2, True, "bf16", "fp32", config=CLIPPED)
ON_DEVICE = Setup(2, False, "fp32", "fp32", config=CLIPPED)
OTHERS = [
    (OFFLOADED, replace(OFFLOADED, retain=True)),
    (replace(OFFLOADED, retain=True), replace(OFFLOADED, stage=1)),
    (replace(OFFLOADED, stage=1), replace(OFFLOADED, offload=False)),
    (replace(OFFLOADED, offload=False), OFFLOADED),
    (ON_DEVICE, replace(ON_DEVICE, stage=1)),
    (replace(ON_DEVICE, stage=1), replace(ON_DEVICE, offload=True)),
    (replace(ON_DEVICE, offload=True), ON_DEVICE),
]


def windows_of(seed: int) -> list[Window]:
    """Three requests in every window, of up to two micro-batches; parameters are absent at random."""
    chance = random.Random(seed)

    def micro(last: bool) -> Micro:
        uses = tuple(chance.random() < 0.6 for _ in OUTS)
        return Micro(uses if any(uses) else (True, *uses[1:]), chance.randrange(10**6), last)

    return [
        [micro(k == length - 1) for length in (chance.randint(1, 2) for _ in range(3)) for k in range(length)]
        for _ in range(WINDOWS)
    ]


def train(engine: Any, factor: float, window: int = 0, requests: int = 0, folder: str | None = None) -> list[float]:
    """Train from a request of a window on; return the norms of the steps. ``folder``: save in the middle."""
    norms = []
    for number, micros in list(enumerate(windows_of(5)))[window:]:
        ended = 0
        for micro in micros:
            if number > window or ended >= requests:
                if not engine.update_window.request_open:
                    engine.begin_request(f"{number}.{ended}")
                engine.add_weight(torch.tensor(2.0) if ended == 1 else 1.0)
                backward(engine, micro, factor=factor)
            ended += micro.request_end
            if folder is not None and micro.request_end and (number, ended) == (SAVED_IN, SAVED_AFTER):
                engine.save_checkpoint(folder, tag="saved")
        assert engine.update_window.request_ids == [f"{number}.{request}" for request in range(3)]
        engine.step(normalization="token")
        norms.append(float(engine.get_global_grad_norm()))
    return norms[SAVED_IN - window :]


def state_of(engine: Any) -> list[torch.Tensor]:
    state = engine.optimizer.optimizer.state
    return [v.clone() for each in state.values() for v in each.values() if torch.is_tensor(v)]


def counters(engine: Any) -> tuple[Any, ...]:
    return engine.attempted_updates, engine.applied_updates, engine.loss_scale_history, engine.global_samples


def resumed(saved: Setup, loaded: Setup, factor: float, folder: str) -> tuple[int, int]:
    """Save in one configuration and resume in another; return how many bits of results differ, without the sums too."""
    with fp16_where_needed(saved.model):
        engine = build(saved)
        norms = train(engine, factor, folder=folder)
        wanted = [*masters(engine), torch.tensor(norms)]
        state, counts = state_of(engine), counters(engine)
        engine.destroy()
        differing = []
        for discard in (False, True):
            engine = build(loaded)
            engine.load_checkpoint(folder, tag="saved", discard_window=discard)
            if discard:
                engine.optimizer.window.requests = SAVED_AFTER
                engine.update_window.request_ids.extend(f"{SAVED_IN}.{request}" for request in range(SAVED_AFTER))
            norms = train(engine, factor, SAVED_IN, SAVED_AFTER)
            found = [*masters(engine), torch.tensor(norms)]
            pairs = list(zip(wanted, found, strict=True))
            if saved == loaded:
                pairs += zip(state, state_of(engine), strict=True)
            differing.append(sum(not torch.equal(one, other) for one, other in pairs))
            assert counters(engine) == counts
            engine.destroy()
    return differing[0], differing[1]


@pytest.mark.parametrize("setup", [*CONFIGURATIONS, *OTHER_OPTIONS], ids=str)
def test_the_same_configuration(two_ranks: RankGroup, setup: Setup, tmp_path: Path) -> None:
    setup = replace(setup, optimizer="adamw")
    for differing, without_sums in two_ranks.run(resumed, setup, setup, ROUNDED, str(tmp_path)):
        assert differing == 0
        assert without_sums > 0


MASTERS_16 = {"enabled": True, "bf16_master_weights_and_grads": True}


def resumed_with_16_bit_masters(setup: Setup, folder: str) -> tuple[int, int]:
    """With 16-bit states: DeepSpeed rounds those of its CPU Adam to the dtype of the masters when it loads them."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    make = DeepSpeedCPUAdam.__init__
    with patch.object(DeepSpeedCPUAdam, "__init__", partialmethod(make, fp32_optimizer_states=False)):
        return resumed(setup, setup, ROUNDED, folder)


@pytest.mark.parametrize("accum", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [1, 2])
def test_16_bit_masters(two_ranks: RankGroup, stage: int, accum: str, tmp_path: Path) -> None:
    setup = Setup(stage, True, "bf16", accum, optimizer="cpu_adam", config=CLIPPED | {"bf16": MASTERS_16})
    for differing, without_sums in two_ranks.run(resumed_with_16_bit_masters, setup, str(tmp_path)):
        assert differing == 0
        assert without_sums > 0


@pytest.mark.parametrize(("saved", "loaded"), OTHERS, ids=str)
def test_another_configuration(two_ranks: RankGroup, saved: Setup, loaded: Setup, tmp_path: Path) -> None:
    for differing, without_sums in two_ranks.run(resumed, saved, loaded, 1.0, str(tmp_path)):
        assert differing == 0
        assert without_sums > 0


class Graded(Few):
    """The first weight's gradient is the input, the second one's twice the input, and so on."""

    def forward(self, x: float) -> torch.Tensor:
        return torch.stack([weight.sum() * (number * x) for number, weight in enumerate(self.weights, 1)]).sum()


def norm_after_another_cut(saved: Setup, loaded: Setup, folder: str) -> float:
    """The norm of a window of which this rank owned other parts when it was saved."""
    sizes = [2, 4, 4, 6]  # in order the third is on both ranks, in turn the second
    engine = build(saved, model=Graded(sizes))
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(1.0))
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = build(loaded, model=Graded(sizes))
    engine.load_checkpoint(folder, load_optimizer_states=False)
    engine.step()
    norm = float(engine.get_global_grad_norm())
    engine.destroy()
    return norm


def test_norms_are_those_of_the_parts_that_a_rank_owns(two_ranks: RankGroup, tmp_path: Path) -> None:
    in_order = Setup(2, True)
    in_turn = replace(in_order, zero={"round_robin_gradients": True})
    for norm in two_ranks.run(norm_after_another_cut, in_order, in_turn, str(tmp_path)):
        assert norm == pytest.approx(math.sqrt(2 * 1 + 4 * 4 + 4 * 9 + 6 * 16))


# --- what else belongs to a window ----------------------------------------------------------------------------------


def muon_resumed(stage: int, offload: bool, folder: str) -> None:
    engine = build_muon(stage, offload, "bf16", "fp32")

    def run(requests: range) -> None:
        for request in requests:
            engine.set_gradient_accumulation_boundary(True)
            engine.backward(engine(batch(engine, 0, request), request != 1))

    def finish() -> list[torch.Tensor]:
        run(range(2, 4))
        engine.step(divisor=2.0)
        return [*masters(engine), *momentum(engine)]

    run(range(2))
    engine.save_checkpoint(folder)
    wanted = finish()
    engine.destroy()
    engine = build_muon(stage, offload, "bf16", "fp32")
    engine.load_checkpoint(folder)
    assert all(map(torch.equal, wanted, finish()))
    engine.destroy()


@pytest.mark.parametrize(("stage", "offload"), [(1, False), (2, False), (2, True)])
def test_muon(two_ranks: RankGroup, stage: int, offload: bool, tmp_path: Path) -> None:
    two_ranks.run(muon_resumed, stage, offload, str(tmp_path))


def dropped_after_a_load(setup: Setup, folder: str) -> None:
    engine = build(setup, model=OneWeight())
    feed(engine, math.inf)  # dropped at once
    feed(engine, 2.0)
    engine.save_checkpoint(folder)
    other = build(setup, model=OneWeight())
    other.load_checkpoint(folder)
    assert other.update_window.dropped == engine.update_window.dropped
    for each in (engine, other):
        feed(each, math.inf)
        feed(each, 4.0)
        assert [dropped.cause for dropped in each.update_window.dropped] == ["inf", "inf"]
        each.step()
    assert torch.equal(masters(engine)[0], masters(other)[0])
    assert engine.dropped_requests == other.dropped_requests == 2
    feed(engine, math.nan)
    engine.save_checkpoint(folder)  # all that is left of this window is the record of the drop
    other.load_checkpoint(folder)
    for each in (engine, other):
        assert each.update_window.is_open
        each.step()
        assert each.skipped_updates == 1
        each.destroy()


@pytest.mark.parametrize(("stage", "offload"), [(1, False), (2, False), (2, True)])
def test_the_loaded_state_is_the_good_end(two_ranks: RankGroup, stage: int, offload: bool, tmp_path: Path) -> None:
    overflow = {"overflow": {"on_overflow": "drop_request"}, "bf16": {"enabled": True, "check_grad_overflow": True}}
    two_ranks.run(dropped_after_a_load, Setup(stage, offload, "bf16", "fp32", config=overflow), str(tmp_path))


def origin_after_a_load(setup: Setup, folder: str) -> list[str]:
    engine = build(setup, model=OneWeight())
    for value in (1.0, math.inf, 1.0):
        engine.begin_request(f"request of {value}")
        feed(engine, value)
    engine.save_checkpoint(folder)
    other = build(setup, model=OneWeight())
    other.load_checkpoint(folder)
    messages = []
    for each in (engine, other):
        feed(each, 3.0)
        with pytest.raises(Exception, match="not finite") as error:
            each.step()
        messages.append(str(error.value))
        each.destroy()
    return messages


def test_the_origin_of_an_overflow_before_the_save(two_ranks: RankGroup, tmp_path: Path) -> None:
    setup = Setup(config={"overflow": {"on_overflow": "raise", "check_grad_overflow": True}})
    for uninterrupted, resumed_one in two_ranks.run(origin_after_a_load, setup, str(tmp_path)):
        assert "request of inf" in uninterrupted
        assert resumed_one == uninterrupted


def edited(setup: Setup, folder: str) -> None:
    from deepspeed.utils import safe_set_full_grad

    engine = build(setup, model=OneWeight())
    feed(engine, 2.0)
    safe_set_full_grad(engine.module.weight, torch.full((8,), 1 / 3))
    engine.save_checkpoint(folder)
    other = build(setup, model=OneWeight())
    other.load_checkpoint(folder)
    for each in (engine, other):
        feed(each, 4.0)
        each.step()
    assert torch.equal(masters(engine)[0], masters(other)[0])
    assert float(engine.get_global_grad_norm()) == float(other.get_global_grad_norm())
    engine.destroy()
    other.destroy()


@pytest.mark.parametrize("accum", ["bf16", "fp32"])
def test_a_gradient_that_a_user_has_set(two_ranks: RankGroup, accum: str, tmp_path: Path) -> None:
    two_ranks.run(edited, Setup(2, True, "bf16", accum, config=CLIPPED), str(tmp_path))


# --- errors ---------------------------------------------------------------------------------------------------------


def refused(folder: str) -> None:
    engine = build(Setup(), model=OneWeight())
    feed(engine, 1.0, request_end=False)
    with pytest.raises(RuntimeError, match=r"save_checkpoint\(\) inside a request \(1 micro-batches since"):
        engine.save_checkpoint(folder)
    assert engine.inside_request
    engine.end_request()
    engine.has_moe_layers = True
    with pytest.raises(RuntimeError, match="is not possible with mixture-of-experts layers"):
        engine.save_checkpoint(folder)
    engine.has_moe_layers = False
    engine.save_checkpoint(folder, tag="saved")
    failing = patch.object(replacing, "commit", side_effect=OSError("no space"))
    with failing, pytest.raises(RuntimeError, match="The checkpoint could not be written: OSError: no space"):
        engine.save_checkpoint(folder, tag="saved")
    assert engine.load_checkpoint(folder, load_module_only=True)[0] is not None
    assert not engine.update_window.is_open
    engine.destroy()


def loaded_with(folder: str, error: str) -> None:
    engine = build(Setup(), model=OneWeight())
    with pytest.raises(ValueError, match=error):
        engine.load_checkpoint(folder)
    engine.destroy()
    engine = build(Setup(), model=OneWeight())
    engine.load_checkpoint(folder, discard_window=True)
    assert not engine.update_window.is_open
    engine.destroy()


def test_what_cannot_be_saved_or_loaded(two_ranks: RankGroup, tmp_path: Path) -> None:
    two_ranks.run(refused, str(tmp_path))
    folder = tmp_path / "saved"
    record, sums_file = folder / FILE, sums.file_of(folder, 0)
    original, content = record.read_text(), json.loads(record.read_text())
    damaged = {
        r"rank_00002\.safetensors, a part of .*, cannot be read": {
            "data_parallel_ranks": 3,
            "ranks": [*content["ranks"], content["ranks"][0]],
        },
        "format 2, and this version reads format 1": {"format": 2},
        "loss scale 8": {"loss_scale": 8.0},
    }
    for error, change in damaged.items():
        record.write_text(json.dumps(content | change))
        two_ranks.run(loaded_with, str(tmp_path), error)
    other = OwnedPart("another", 0, 4, torch.zeros(4))
    original_sums = sums_file.read_bytes()
    content["ranks"][0]["checksum"] = sums.write(sums_file.parent, 0, [other], torch.float32)
    record.write_text(json.dumps(content))
    two_ranks.run(loaded_with, str(tmp_path), "lacks 4 of the elements 0 to 4 of 'weight'")
    sums_file.write_bytes(original_sums[:-1] + bytes([original_sums[-1] ^ 1]))
    record.write_text(original)
    two_ranks.run(loaded_with, str(tmp_path), "a part of .* cannot be read .its checksum differs")
    sums_file.write_bytes(original_sums)
    record.write_text(original[:-20])
    two_ranks.run(loaded_with, str(tmp_path), "cannot be read")
    record.write_text(original)
    sums_file.write_bytes(original_sums[:-3])
    two_ranks.run(loaded_with, str(tmp_path), "a part of the checkpoint's open window, cannot be read")
