"""Errors and warnings once the model and its loaders are known; one process."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from support.failures import failure
from support.lightning_data import Stream, batch_value
from support.lightning_model import START, Model
from support.lightning_records import ListLogger
from support.lightning_runs import build_trainer, train
from support.lightning_spec import Run
from support.ranks import RankGroup


class WithScheduler(Model):
    frequency = 2

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": self.frequency}]


class WithLBFGS(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class WithTwoOptimizers(Model):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=0.5) for parameter in self.parameters()]


class WithTwoSchedulers(Model):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(2)]


class TakesIterator(Model):
    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:  # type: ignore[override]
        raise AssertionError("must not be called")


class ReturnsNone(Model):
    """Leaves the second and the last micro-batch of its windows of four out."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 4 in (1, 3) else loss


class WithoutLength(Stream):
    __len__ = None  # type: ignore[assignment]

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class LeavesOneOut(Stream):
    def _batch(self, index: int) -> Any:
        return None if index == 1 else super()._batch(index)


class LeavesLastOut(Stream):
    def _batch(self, index: int) -> Any:
        return None if index % self.run.batches == self.run.batches - 1 else super()._batch(index)


class WithoutOptimizer(Model):
    def configure_optimizers(self) -> None:
        return None


def fit(model: type[Model], run: Run, stream: type[Stream] = Stream, loop: bool = False) -> dict[str, Any]:
    """Train; the error, the warnings, and the updates."""
    trainer = build_trainer(run, ListLogger(), [])
    if loop:
        own = type("OwnLoop", (type(trainer.fit_loop.epoch_loop),), {})
        trainer.fit_loop.epoch_loop.__class__ = own
    module = model(run)
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, stream(run), Stream(Run(batches=2)) if run.validate else None)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return {
        "error": error,
        "warnings": [str(item.message) for item in caught],
        "global_step": trainer.global_step,
        "applied": getattr(trainer.strategy, "applied_updates", None),
        "skipped": getattr(trainer.strategy, "skipped_updates", None),
        "seen": [name for name, _ in module.seen],
        "weights": torch.cat([module.first.detach(), module.second.detach()]).tolist(),
    }


MARKS: list[tuple[bool, bool | None]] = [(True, None)] * 4


@pytest.mark.parametrize(
    ("model", "run", "message"),
    [
        (
            WithScheduler,
            Run(options={"config": {"scheduler": {"type": "WarmupLR", "params": {}}}}),
            "configure_optimizers returns a learning-rate scheduler and config has one under 'scheduler'",
        ),
        (WithScheduler, Run(batches=4, marks=MARKS), "frequency=2, which Lightning counts in batches"),
        (
            Model,
            Run(options={"config": {"optimizer": {"type": "Adam"}}}),
            "config has an 'optimizer', and configure_optimizers returns one that would never be used",
        ),
        (
            WithTwoOptimizers,
            Run(manual="every_third"),
            "ValueError: configure_optimizers returns several optimizers or learning-rate sched",
        ),
        (WithTwoSchedulers, Run(), "give one optimizer all parameters, in parameter groups, and one scheduler"),
        (WithLBFGS, Run(), "LBFGS calls its closure several times a step"),
        (TakesIterator, Run(), "training_step(dataloader_iter) takes its batches itself"),
        (
            Model,
            Run(options={"config": {"gradient_clipping": 1.0}}, trainer={"gradient_clip_val": 0.5}),
            "gradient_clipping is 0.5 in Trainer(gradient_clip_val=...) and 1.0 in config",
        ),
        (
            Model,
            Run(trainer={"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}),
            "Trainer(gradient_clip_algorithm='value') is not possible with DeepSpeed",
        ),
    ],
)
def test_refused(one_rank: RankGroup, model: type[Model], run: Run, message: str) -> None:
    assert message in one_rank.run(fit, model, run)[0]["error"]


def test_another_loop_in_the_trainer(one_rank: RankGroup) -> None:
    error = one_rank.run(fit, Model, Run(), loop=True)[0]["error"]
    assert "OwnLoop is not Lightning's own _TrainingEpochLoop, which RequestZeRO extends" in error


def test_clipping_in_one_place_or_both(one_rank: RankGroup) -> None:
    want = one_rank.run(train, Run(trainer={"gradient_clip_val": 0.5}))[0]["weights"]
    config = {"gradient_clipping": 0.5}
    assert one_rank.run(train, Run(options={"config": config}))[0]["weights"] == want
    both = Run(options={"config": config}, trainer={"gradient_clip_val": 0.5})
    assert one_rank.run(train, both)[0]["weights"] == want
    assert one_rank.run(train, Run())[0]["weights"] != want


def test_training_step_that_returns_none(one_rank: RankGroup) -> None:
    """Possible in one process, as under Lightning's other strategies: the rest of the window is applied."""
    some = one_rank.run(fit, ReturnsNone, Run(batches=4, trainer={"accumulate": 4}, schedule=False))[0]
    assert some["error"] == ""
    assert some["global_step"] == 1
    mean = (batch_value(0, 0) + batch_value(2, 0)) / 2
    start = torch.tensor(START)
    assert some["weights"] == (start - 0.5 * mean).tolist()


def test_loader_that_yields_none(one_rank: RankGroup) -> None:
    result = one_rank.run(fit, Model, Run(batches=5, trainer={"accumulate": 2}, schedule=False), LeavesOneOut)[0]
    assert result["error"] == ""
    assert result["global_step"] == 2
    mean = (batch_value(0, 0) + batch_value(2, 0)) / 2
    second = (batch_value(3, 0) + batch_value(4, 0)) / 2
    start = torch.tensor(START)
    assert result["weights"] == (start - 0.5 * mean - 0.5 * (second + 0.5 * mean)).tolist()


def test_epoch_whose_last_batch_is_none_is_validated(one_rank: RankGroup) -> None:
    run = Run(batches=4, trainer={"accumulate": 2, "max_epochs": 2}, schedule=False, validate=True)
    result = one_rank.run(fit, Model, run, LeavesLastOut)[0]
    assert result["error"] == ""
    assert result["seen"] == (["train"] * 3 + ["validate"] * 2) * 2
    assert result["global_step"] == 2
    assert sum("the epoch ends inside it" in text for text in result["warnings"]) == 2


class AlwaysNone(Model):
    """Leaves both micro-batches of the first of two windows out."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx < 2 else loss


def test_window_without_gradients_is_counted_as_attempted_only(one_rank: RankGroup) -> None:
    result = one_rank.run(fit, AlwaysNone, Run(batches=4, trainer={"accumulate": 2}, schedule=False))[0]
    assert [result[key] for key in ("error", "global_step", "applied", "skipped")] == ["", 2, 1, 0]


def test_optimizer_in_config_alone(one_rank: RankGroup) -> None:
    optimizer = {"type": "Adam", "params": {"lr": 0.25, "weight_decay": 0.0, "torch_adam": True}}
    run = Run(batches=1, options={"config": {"optimizer": optimizer}})
    result = one_rank.run(fit, WithoutOptimizer, run)[0]
    assert (result["error"], result["global_step"]) == ("", 1)
    # Adam's first step moves every weight by the learning rate.
    start = torch.tensor(START)
    moved = (torch.tensor(result["weights"]) - start).abs()
    assert moved[moved > 0].tolist() == pytest.approx([0.25] * int((moved > 0).sum()), rel=1e-5)
    assert (moved > 0).any()


def test_stateful_loader_without_length_warns(one_rank: RankGroup) -> None:
    result = one_rank.run(fit, Model, Run(batches=4), WithoutLength)[0]
    assert result["global_step"] == 4
    assert any("state_dict() but no length" in text for text in result["warnings"])


def test_iterator_that_ends_before_its_length(one_rank: RankGroup) -> None:
    """The loop did not know the last batch when it came: the window is discarded, with a warning."""

    result = one_rank.run(fit, Model, Run(batches=6, trainer={"accumulate": 4}), TooShort)[0]
    assert result["global_step"] == 1
    assert any("discards an open update window of 1 micro-batches" in text for text in result["warnings"])


class TooShort(Stream):
    def __iter__(self) -> Iterator[Any]:
        return iter([next(iter_) for iter_ in [super().__iter__()] for _ in range(5)])


def test_data_loader_without_batch_size(one_rank: RankGroup) -> None:
    """Lightning's own strategy fails on it, when it looks for the batch size."""
    assert one_rank.run(with_data_loader) == [2]


def with_data_loader() -> int:
    run = Run(trainer={"accumulate": 2})
    items = [{"x": torch.ones(8), "index": 0}] * 4
    trainer = build_trainer(run, ListLogger(), [])
    trainer.fit(Model(run), torch.utils.data.DataLoader(items, batch_size=None))  # type: ignore[arg-type]
    return trainer.global_step


def test_refit_and_manual_info(one_rank: RankGroup) -> None:
    """A Trainer can train again; its loops are taken over once."""
    assert one_rank.run(fit_twice) == [(3, 3, 6, 3)]


def fit_twice() -> tuple[int, ...]:
    run = Run(options={"stage": 1}, trainer={"accumulate": 4}, schedule=False)
    trainer: Trainer = build_trainer(run, ListLogger(), [])
    strategy: Any = trainer.strategy
    trainer.fit(Model(run), Stream(run))
    first = (trainer.global_step, strategy.applied_updates)
    trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_progress.current.processed + 1
    trainer.fit(Model(run), Stream(run))
    return (*first, trainer.global_step, strategy.applied_updates)


def test_clipping_may_change_between_two_fits(one_rank: RankGroup) -> None:
    """The clipping that the first fit has put into the config is not the user's."""
    assert one_rank.run(fit_with_other_clipping) == [(0.5, 0.25, 0.0, 4, 1)]


def fit_with_other_clipping() -> tuple[Any, ...]:
    run = Run(trainer={"gradient_clip_val": 0.5}, batches=2, schedule=False)
    trainer: Trainer = build_trainer(run, ListLogger(), [])
    strategy: Any = trainer.strategy
    clipping = []
    for value in (0.5, 0.25, None):
        trainer.gradient_clip_val = value
        trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_progress.current.processed + 1
        trainer.fit(Model(run), Stream(run))
        clipping.append(strategy.engine.gradient_clipping())
    items = [{"x": torch.ones(4, 8), "index": 0}]
    loader: Any = torch.utils.data.DataLoader(items, batch_size=4)
    sizes = []
    for source in (loader, Stream(run)):
        trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_progress.current.processed + 1
        trainer.fit(Unbatched(run), source)
        sizes.append(strategy.engine.train_micro_batch_size_per_gpu())
    return (*clipping, *sizes)


class Unbatched(Model):
    def loss(self, batch: Any) -> torch.Tensor:
        return self(batch["x"].flatten()[:8])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


def test_error_in_training_step_is_the_error(one_rank: RankGroup) -> None:
    run = Run(root=tempfile.mkdtemp(), marks=[(True, True)] * 12, trainer={"accumulate": 3})
    assert "accumulate_grad_batches=3" in one_rank.run(failure, train, run)[0]


class WithBatchNorm(Model):
    """Has a layer that it does not use: only its type matters."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.norm = torch.nn.BatchNorm1d(2)

    def on_train_start(self) -> None:
        raise RuntimeError(type(self.norm).__name__)


def test_sync_batchnorm_reaches_the_model(one_rank: RankGroup) -> None:
    assert one_rank.run(fit, WithBatchNorm, Run())[0]["error"] == "RuntimeError: BatchNorm1d"
    synced = one_rank.run(fit, WithBatchNorm, Run(trainer={"sync_batchnorm": True}))
    assert synced[0]["error"] == "RuntimeError: SyncBatchNorm"


def switch_device() -> list[str]:
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    from requestzero.lightning.deepspeed_device import use_deepspeed_device

    names = []
    for before in (CUDA_Accelerator, CPU_Accelerator):
        for device in ("cpu", "cuda"):
            set_accelerator(before())
            use_deepspeed_device(torch.device(device))
            names.append(get_accelerator().device_name())
    set_accelerator(CPU_Accelerator())
    return names


def test_deepspeed_follows_the_device_of_the_trainer(one_rank: RankGroup) -> None:
    """On a machine with GPUs, where DeepSpeed would take one, and back."""
    assert one_rank.run(switch_device) == [["cpu", "cuda"] * 2]
