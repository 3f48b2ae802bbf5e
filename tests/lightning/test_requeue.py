"""SLURM's signal to requeue: a checkpoint at the request's end and one requeue, as under DDP."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment

from requestzero.zero.window_checkpoint.record import SavedWindow
from support.lightning_parity import Net, data, trainer_of, weights
from support.lightning_runs import train
from support.lightning_spec import Run
from support.ranks import RankGroup


class Node(LightningEnvironment, SLURMEnvironment):
    """SLURM to the Trainer's signals, and otherwise what the ranks of the tests are in."""

    def __init__(self) -> None:
        LightningEnvironment.__init__(self)
        self.auto_requeue, self.requeue_signal = True, signal.SIGUSR2

    def validate_settings(self, *args: Any, **kwargs: Any) -> None:
        pass


class Signalled(Net):
    signal_after = 0

    def on_train_batch_end(self, *args: Any) -> None:
        if args[2] == self.signal_after:
            os.kill(os.getpid(), signal.SIGUSR2)


def requeued(kind: str, batch: int, folder: str) -> tuple[list[str], int, list[float]]:
    """Checkpoints, calls of scontrol and final weights of a fit in windows of 4 that is signalled after a batch."""
    module = Signalled()
    module.signal_after = batch
    folder = f"{folder}/{kind}-{batch}"
    os.makedirs(folder, exist_ok=True)
    calls: list[Any] = []
    patches = {"SLURM_JOB_ID": "77"}
    handler = signal.getsignal(signal.SIGUSR2)
    module_of_call = "lightning.pytorch.trainer.connectors.signal_connector.call"
    with mock.patch.dict(os.environ, patches), mock.patch(module_of_call, lambda cmd, **_: calls.append(cmd) or 0):
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        trainer = trainer_of(kind, plugins=[Node()], accumulate_grad_batches=4, max_epochs=1, default_root_dir=folder)
        trainer.fit(module, data())
    signal.signal(signal.SIGUSR2, handler)
    return sorted(os.listdir(folder)), len(calls), weights(module)


@pytest.mark.parametrize("batch", [3, 5])
def test_one_rank(one_rank: RankGroup, tmp_path: Path, batch: int) -> None:
    reference = one_rank.run(requeued, "ddp", batch, str(tmp_path))[0]
    assert reference[:2] == (["hpc_ckpt_1.ckpt"], 1)
    files, calls, ours = one_rank.run(requeued, "stage2", batch, str(tmp_path))[0]
    assert (files, calls) == reference[:2]
    assert ours == pytest.approx(reference[2], rel=1e-5)


@pytest.mark.parametrize("batch", [5, 11])
def test_two_ranks_save_together(two_ranks: RankGroup, tmp_path: Path, batch: int) -> None:
    """Inside a window, and after the last batch."""
    for number, (files, calls, _) in enumerate(two_ranks.run(requeued, "stage2", batch, str(tmp_path))):
        assert files == ["hpc_ckpt_1.ckpt"]
        assert calls == (number == 0)


class SignalInWindow(Callback):
    """Sends the signal in the second window, after a batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            os.kill(os.getpid(), signal.SIGUSR2)


IN_A_REQUEST: dict[str, Any] = {"marks": [(number % 3 == 2, number % 6 == 5) for number in range(12)]}


def job(folder: str, batch: int | None, spec: dict[str, Any]) -> dict[str, Any]:
    handler = signal.getsignal(signal.SIGUSR2)
    module_of_call = "lightning.pytorch.trainer.connectors.signal_connector.call"
    with mock.patch.dict(os.environ, {"SLURM_JOB_ID": "77"}), mock.patch(module_of_call, return_value=0):
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        trainer = {"max_epochs": 2, "plugins": [Node()], **spec.get("trainer", {})}
        spec = {**spec, "trainer": trainer, "root": folder}
        run = Run(stateful=True, optimizer="adamw", model="curved", dropout=0.25, **spec)
        run.callbacks, run.ckpt_path = ([], "hpc") if batch is None else ([SignalInWindow(batch)], None)
        result = train(run)
    signal.signal(signal.SIGUSR2, handler)
    return result


@pytest.mark.parametrize(
    ("batch", "spec", "saved"),
    [(5, {"trainer": {"accumulate": 4}}, (2, 2)), (7, IN_A_REQUEST, (1, 3))],
    ids=["between requests", "in a request"],
)
def test_the_requeued_job_goes_on_in_the_window(
    two_ranks: RankGroup, batch: int, spec: dict[str, Any], saved: tuple[int, int], tmp_path: Path
) -> None:
    """Here the job that was signalled goes on to its end, which the requeued one has to come to as well.

    A signal inside a request, of three batches, waits for its end.
    """
    signalled = two_ranks.run(job, str(tmp_path), batch, spec)
    record = SavedWindow.read(tmp_path / "hpc_ckpt_1.ckpt" / "checkpoint")
    assert record is not None
    assert (record.ranks[0].requests, record.ranks[0].micro_batches) == saved
    for want, got in zip(signalled, two_ranks.run(job, str(tmp_path), None, spec), strict=True):
        assert len(got["updates"]) == len(want["updates"]) - 1
        assert got["updates"] == want["updates"][1:]
        assert [got[key] for key in ("weights", "optimizer", "global_step")] == [
            want[key] for key in ("weights", "optimizer", "global_step")
        ]


class SignalledAlone(Net):
    """Only one rank gets the signal, in the middle of a window, and the other a little later."""

    def on_train_batch_end(self, *args: Any) -> None:
        if args[2] == 3 + 2 * self.global_rank:
            os.kill(os.getpid(), signal.SIGUSR2)


def requeued_without_agreement(folder: str) -> list[int]:
    """Numbers of the batches after which a rank has saved."""
    from requestzero.lightning import RequestZeRO

    saves: list[int] = []
    handler = signal.getsignal(signal.SIGUSR2)
    module_of_call = "lightning.pytorch.trainer.connectors.signal_connector.call"
    with mock.patch.dict(os.environ, {"SLURM_JOB_ID": "77"}), mock.patch(module_of_call, return_value=0):
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        strategy = RequestZeRO(rank_agreement=False)
        trainer = trainer_of("stage2", strategy=strategy, plugins=[Node()], max_epochs=1, default_root_dir=folder)
        trainer.save_checkpoint = lambda *_, **__: saves.append(trainer.global_step)  # type: ignore[method-assign]
        trainer.fit(SignalledAlone(), data())
    signal.signal(signal.SIGUSR2, handler)
    return saves


def test_rank_0_decides_without_agreement(two_ranks: RankGroup, tmp_path: Path) -> None:
    assert two_ranks.run(requeued_without_agreement, str(tmp_path)) == [[4], [4]]
