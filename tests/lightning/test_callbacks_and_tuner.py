"""What works with the optimizer: tuner, schedulers, freezing, and callbacks that Lightning refuses for DeepSpeed."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner import Tuner

from requestzero import RequestZeRO
from support.failures import assert_fails
from support.lightning_parity import (
    ManualNet,
    Net,
    Program,
    assert_as_under_ddp,
    data,
    fitted,
    trainer_of,
    weights,
)
from support.lightning_records import ListLogger
from support.ranks import RankGroup


class Tuned(Net):
    def __init__(self) -> None:
        super().__init__()
        self.learning_rate = 0.001

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


SEARCH: dict[str, Any] = {"min_lr": 1e-4, "max_lr": 0.05}


def lr_find(kind: str) -> list[float]:
    module, trainer = Tuned(), trainer_of(kind, default_root_dir=_shared_folder())
    finder = Tuner(trainer).lr_find(module, data(), num_training=12, early_stop_threshold=None, **SEARCH)
    assert finder is not None
    suggestion = finder.suggestion(skip_begin=1, skip_end=1)
    trainer.fit(module, data())
    return [*finder.results["loss"], suggestion or 0.0, module.learning_rate, *weights(module)]


def lr_finder_callback(kind: str) -> list[float]:
    finder = LearningRateFinder(num_training_steps=12, early_stop_threshold=None, **SEARCH)
    module = Tuned()
    trainer_of(kind, callbacks=[finder], default_root_dir=_shared_folder()).fit(module, data())
    return [module.learning_rate, *weights(module)]


def _shared_folder() -> str:
    """Return a folder that all ranks know: rank 0 names the checkpoint that the others load."""
    folder: list[Any] = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    return str(folder[0])


def scheduler_in_a_hook(kind: str) -> list[float]:
    """As for schedulers that need what only the Trainer knows."""

    class Module(Net):
        def on_train_start(self) -> None:
            assert isinstance(self.trainer.optimizers[0], torch.optim.Optimizer)
            self.decay = torch.optim.lr_scheduler.ExponentialLR(self.optimizers(use_pl_optimizer=False), 0.9)

        def on_train_batch_end(self, *args: Any) -> None:
            self.decay.step()

    return fitted(kind, Module())


def accumulation_scheduler(kind: str) -> list[float]:
    module = Net()
    trainer = trainer_of(kind, callbacks=[GradientAccumulationScheduler({0: 1, 1: 3, 2: 4})], max_epochs=3)
    trainer.fit(module, data())
    return [trainer.global_step, *weights(module)]


def stochastic_weight_averaging(kind: str) -> list[float]:
    averaging = StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=2)
    return fitted(kind, Net(), callbacks=[averaging], max_epochs=6)


def early_stopping(kind: str) -> list[float]:
    """After two validations, since the loss becomes smaller."""
    stopping, module = EarlyStopping("val_loss", mode="max", patience=1), Net()
    trainer = trainer_of(kind, callbacks=[stopping], max_epochs=6, accumulate_grad_batches=3)
    trainer.fit(module, data(), data(2))
    return [trainer.global_step, trainer.current_epoch, float(stopping.best_score), *weights(module)]


def learning_rate_monitor(kind: str) -> list[float]:
    """Under the name of the user's own optimizer."""

    class Module(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    logger, module = ListLogger(), Module()
    options = {"logger": logger, "log_every_n_steps": 1, "accumulate_grad_batches": 3}
    trainer_of(kind, callbacks=[LearningRateMonitor()], **options).fit(module, data())
    rates = [row["lr-SGD"] for _, row in logger.rows if "lr-SGD" in row]
    assert len({*rates}) > 4
    return [*rates, *weights(module)]


def frozen_for_an_epoch(kind: str) -> list[float]:
    class Module(Net):
        def on_train_epoch_start(self) -> None:
            self.first.requires_grad_(self.current_epoch != 1)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5, weight_decay=0.1)

    options = {"strategy": "ddp_find_unused_parameters_true"} if kind == "ddp" else {}
    return fitted(kind, Module(), max_epochs=3, **options)


def direct_backward(kind: str) -> list[float]:
    class Module(ManualNet):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.loss(batch).backward()
            _average(self, kind)
            optimizer.step()

    return fitted(kind, Module())


def _average(module: torch.nn.Module, kind: str) -> None:
    """Average by hand: DDP's own reduction does not see a loss that is not of its forward."""
    if kind == "ddp":
        for parameter in module.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= torch.distributed.get_world_size()


def auxiliary_backward(kind: str) -> list[float]:
    """Before the batch's own, of the same forward."""

    class Module(ManualNet):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            (0.1 * self.first(batch).square().mean() + self.loss(batch)).backward()
            _average(self, kind)
            optimizer.step()
            optimizer.zero_grad()

    return fitted(kind, Module())


PROGRAMS: list[Program] = [
    lr_find,
    lr_finder_callback,
    scheduler_in_a_hook,
    accumulation_scheduler,
    stochastic_weight_averaging,
    early_stopping,
    learning_rate_monitor,
    frozen_for_an_epoch,
    direct_backward,
    auxiliary_backward,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_as_under_ddp(two_ranks: RankGroup, program: Program) -> None:
    assert_as_under_ddp(two_ranks, program, ("stage1", "stage2 offload"))


def fit_with(module: type[Net], callbacks: list[Any]) -> None:
    trainer_of("stage2", callbacks=callbacks, max_epochs=2).fit(module(), data())


class WithBackbone(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.first


class UnfrozenLate(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.first.requires_grad_(self.current_epoch == 1)


class AddsParameters(Net):
    def on_train_start(self) -> None:
        self.trainer.optimizers[0].add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})


@pytest.mark.parametrize(
    ("module", "callbacks", "message"),
    [
        (
            WithBackbone,
            [BackboneFinetuning(1)],
            "^ValueError: BackboneFinetuning adds parameters to the optimizer in the",
        ),
        (UnfrozenLate, [], "^RuntimeError: Parameter 'first.*' was frozen when the engine was built"),
        (AddsParameters, [], r"^NotImplementedError: add_param_group\(\) is not possible with ZeRO"),
    ],
)
def test_refused(two_ranks: RankGroup, module: type[Net], callbacks: list[Any], message: str) -> None:
    assert_fails(two_ranks, message, fit_with, module, callbacks)


class WithMethods(torch.optim.SGD):
    """As schedule-free optimizers, which exchange weights for an evaluation."""

    def eval(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(1.0)

    def own(self) -> str:
        return "own"


def methods_of_the_own_optimizer() -> list[Any]:
    seen: list[Any] = []

    class Module(Net):
        def on_train_start(self) -> None:
            optimizer, before = self.trainer.optimizers[0], self.first.bias.clone()
            seen.append(self.optimizers().own())
            optimizer.eval()
            seen.append(torch.equal(self.first.bias, before + 1.0))
            seen.append(hasattr(optimizer, "no_such_method"))

        def configure_optimizers(self) -> Any:
            return WithMethods(self.parameters(), lr=0.05)

    trainer_of("stage2", max_epochs=1).fit(Module(), data(2))
    return seen


def test_methods_of_the_own_optimizer(two_ranks: RankGroup) -> None:
    assert two_ranks.run(methods_of_the_own_optimizer) == [["own", True, False]] * 2


def test_other_trainers_say_what_to_import() -> None:
    with pytest.raises(ValueError, match=r"invalid strategy.*import lightning\.pytorch as pl"):
        Fabric(strategy=RequestZeRO(), accelerator="cpu")
    other = pytest.importorskip("pytorch_lightning")
    with pytest.raises(Exception, match=r"invalid strategy.*import lightning\.pytorch as pl"):
        other.Trainer(strategy=RequestZeRO(), accelerator="cpu")
