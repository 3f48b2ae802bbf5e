"""One small training run per call, on the ranks that call it, with everything a test wants to compare recorded.

The model's gradient is the batch itself, so that every sum, mean and weight is exact in fp32 as long as the
data are small binary fractions; the ranks get different data.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from requestzero import MicroBatch
from requestzero.lightning import RequestZeRO

WIDTH = 8


@dataclasses.dataclass
class Run:
    """What to train, in picklable terms."""

    strategy: str = "requestzero"
    """``"requestzero"``, ``"ddp"`` or ``"stock"`` (DeepSpeed's own, made to start on the CPU)."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """For the strategy."""
    trainer: dict[str, Any] = dataclasses.field(default_factory=dict)
    """For the Trainer; ``accumulate`` is short for ``accumulate_grad_batches``."""
    batches: int = 12
    marks: list[tuple[bool, bool | None]] | None = None
    """``(request_end, window_end)`` of each batch of an epoch; ``None``: plain batches."""
    manual: str | None = None
    """Manual optimization: a name of one of the ``manual_...`` methods of the model."""
    schedule: bool = True
    validate: bool = False
    weighted: bool = False
    """Whether the loader gives each micro-batch the weight ``batch_weight``."""
    adds_weight: int = 0
    """How often ``training_step`` reports the weight itself."""
    empty_batches: tuple[int, ...] = ()
    """Batch indices whose weight is zero on both ranks."""
    nan_batches: tuple[int, ...] = ()
    """Batch indices (over all epochs) at which rank 0 gets a NaN."""
    callbacks: list[Any] = dataclasses.field(default_factory=list)
    """Classes of callbacks, or callbacks."""
    stateful: bool = False
    ckpt_path: str | None = None
    root: str | None = None
    optimizer: str = "sgd"
    model: str = "linear"
    dropout: float = 0.0
    requests_at_step: list[int] = dataclasses.field(default_factory=list)
    """Filled by ``manual_two_requests``: ended requests of the window when the step comes."""


def rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def batch_value(index: int, rank: int) -> torch.Tensor:
    """The batch number ``index`` of one rank: small multiples of 1/4, different everywhere."""
    generator = torch.Generator().manual_seed(1000 * index + rank)
    return torch.randint(-8, 9, (WIDTH,), generator=generator) / 4


def batch_weight(index: int, rank: int, empty: tuple[int, ...] = ()) -> int:
    """Its weight: now and then none on one of the ranks, and on no rank where it is ``empty``."""
    return 0 if index in empty else (3 * index + 2 * rank) % 7


class Stream:
    """A loader that numbers its batches over all epochs: epoch 0 has 0 to n - 1, epoch 1 has n to 2n - 1, ..."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.position = 0
        self.placed = True

    def __len__(self) -> int:
        return self.run.batches

    def __iter__(self) -> Iterator[Any]:
        if not self.placed:
            self.position = -(-self.position // self.run.batches) * self.run.batches
        self.placed = False
        while True:
            index, self.position = self.position, self.position + 1
            yield self._batch(index)
            if self.position % self.run.batches == 0:
                return

    def _batch(self, index: int) -> Any:
        value = batch_value(index, rank())
        if index in self.run.nan_batches and rank() == 0:
            value[0] = float("nan")
        inputs = {"x": value, "index": index}
        weight = batch_weight(index, rank(), self.run.empty_batches) if self.run.weighted else None
        if self.run.marks is None:
            return MicroBatch(inputs, weight=weight) if self.run.weighted else inputs
        request_end, window_end = self.run.marks[index % self.run.batches]
        return MicroBatch(inputs, request_end=request_end, window_end=window_end, weight=weight, request_id=f"r{index}")


class StatefulStream(Stream):
    """Also resumes: within an epoch from its state, at an epoch's start from ``set_epoch``, as Lightning wants it."""

    @property
    def sampler(self) -> StatefulStream:
        return self

    def set_epoch(self, epoch: int) -> None:
        if self.position // self.run.batches != epoch:
            self.position = epoch * self.run.batches

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.placed = state["position"], True


class Model(LightningModule):
    """Two parameters, one of which lies on both ranks; the gradient of the loss is the batch."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run_spec = run
        self.first = torch.nn.Parameter(torch.arange(3.0))
        self.second = torch.nn.Parameter(torch.arange(5.0) - 2)
        self.automatic_optimization = run.manual is None
        self.seen: list[tuple[str, int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first * x[:3]).sum() + (self.second * x[3:]).sum()

    def loss(self, batch: Any) -> torch.Tensor:
        return self(batch["x"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert isinstance(batch, dict)
        self.seen.append(("train", int(batch["index"])))
        loss = self.loss(batch)
        for _ in range(self.run_spec.adds_weight):
            weight = batch_weight(int(batch["index"]), rank(), self.run_spec.empty_batches)
            self.trainer.strategy.add_weight(torch.tensor(weight))
        self.log("loss", loss.detach())
        if self.run_spec.manual is None:
            return loss
        getattr(self, f"manual_{self.run_spec.manual}")(batch, batch_idx, loss)
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert isinstance(batch, dict)
        self.seen.append(("validate", int(batch["index"])))
        self.log("val_loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer: torch.optim.Optimizer
        if self.run_spec.optimizer == "sgd":
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=2e-2)
        if not self.run_spec.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.5 ** (update // 2))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # Ways of manual optimization.

    def manual_every_third(self, batch: Any, batch_idx: int, loss: torch.Tensor) -> None:
        optimizer = self.optimizers()
        self.manual_backward(loss)
        if batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    def manual_twice_each(self, batch: Any, batch_idx: int, loss: torch.Tensor) -> None:
        self.manual_backward(loss)
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            self.optimizers().step()

    def manual_discard(self, batch: Any, batch_idx: int, loss: torch.Tensor) -> None:
        if batch_idx % 3 == 1:
            self.optimizers().zero_grad()
        self.manual_backward(loss)
        if batch_idx % 3 == 2:
            self.optimizers().step()

    def manual_marked(self, batch: Any, batch_idx: int, loss: torch.Tensor) -> None:
        self.manual_backward(loss)
        if self.trainer.strategy.window_end:
            self.optimizers().step()

    def manual_weighted(self, batch: Any, batch_idx: int, loss: torch.Tensor) -> None:
        self.trainer.strategy.add_weight(self.trainer.strategy.batch_weight)
        self.manual_backward(loss)
        if batch_idx % 3 == 2:
            self.optimizers().step()

    def manual_two_requests(self, batch: Any, batch_idx: int, loss: torch.Tensor) -> None:
        self.manual_backward(loss)
        self.trainer.strategy.end_request()
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            self.run_spec.requests_at_step.append(self.trainer.strategy.engine.update_window.requests)
            self.optimizers().step()


class CurvedModel(Model):
    """A loss whose gradient depends on the weights, and on random numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(torch.nn.functional.dropout(x, self.dropout)) - 1) ** 2 / 16

    @property
    def dropout(self) -> float:
        return self.run_spec.dropout if self.training else 0.0


HOOKS = (
    "on_train_batch_start",
    "optimizer_step",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_train_batch_end",
    "on_validation_model_zero_grad",
    "on_validation_start",
    "on_validation_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_start",
    "on_train_end",
)


def recording(model: Model) -> list[str]:
    """Let the model's hooks note their names, beside doing what they do."""
    calls: list[str] = []

    def wrap(name: str) -> Any:
        original = getattr(model, name)

        def hook(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        return hook

    for name in HOOKS:
        # An instance attribute: what Lightning calls, without being an override in a class that it would warn of.
        object.__setattr__(model, name, wrap(name))
    return calls


class Updates(Callback):
    """Weights, learning rate and gradient norm after every update, and what the counters say."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.norm: float | None = None
        self.steps = 0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.steps = trainer.global_step

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        if isinstance(trainer.strategy, DDPStrategy) and not isinstance(trainer.strategy, DeepSpeedStrategy):
            grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
            self.norm = float(torch.cat([grad.flatten() for grad in grads]).norm())

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if trainer.global_step == self.steps:
            return
        self.steps = trainer.global_step
        strategy = trainer.strategy
        if isinstance(strategy, RequestZeRO):
            self.norm = strategy.grad_norm
        self.rows.append(
            {
                "step": trainer.global_step,
                "batch": args[2],
                "weights": weights(module),
                "lr": trainer.optimizers[0].param_groups[0]["lr"],
                "norm": self.norm,
                "applied": getattr(strategy, "applied_updates", None),
                "skipped": getattr(strategy, "skipped_updates", None),
            }
        )


class ListLogger(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "list"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step or 0, {k: float(v) for k, v in metrics.items() if k != "epoch"}))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def weights(module: LightningModule) -> list[float]:
    return torch.cat([parameter.detach().float().flatten() for parameter in module.parameters()]).tolist()


class StockOnCPU(DeepSpeedStrategy):
    """Lightning's strategy with the least change that lets it start on the CPU."""

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(self, model: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        import deepspeed

        engine, wrapped, _, _ = deepspeed.initialize(
            config=self.config, model=model, model_parameters=list(model.parameters()), optimizer=optimizer,
            lr_scheduler=lr_scheduler, dist_init_required=False,
        )  # fmt: skip
        return engine, wrapped


def build_strategy(run: Run) -> Any:
    if run.strategy == "requestzero":
        return RequestZeRO(**run.options)
    if run.strategy == "stock":
        return StockOnCPU(**run.options)
    return "ddp" if int(os.environ.get("RANKS", 2)) > 1 else "auto"


def build_trainer(run: Run, logger: Logger, callbacks: list[Any]) -> Trainer:
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        "max_epochs": 1,
        "logger": logger,
        "log_every_n_steps": 1,
        "enable_checkpointing": any("Checkpoint" in type(item).__name__ for item in run.callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": run.root or tempfile.mkdtemp(),
        **run.trainer,
    }
    options["accumulate_grad_batches"] = options.pop("accumulate", 1)
    return Trainer(strategy=build_strategy(run), callbacks=callbacks, **options)


def train(run: Run) -> dict[str, Any]:
    """Train as ``run`` says; what happened, as plain values."""
    torch.manual_seed(7)
    updates, logger = Updates(), ListLogger()
    extra = [item() if isinstance(item, type) else item for item in run.callbacks]
    trainer = build_trainer(run, logger, [updates, *extra])
    model = (CurvedModel if run.model == "curved" else Model)(run)
    calls = recording(model)
    stream = (StatefulStream if run.stateful else Stream)(run)
    validation = Stream(Run(batches=2)) if run.validate else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, stream, validation, ckpt_path=run.ckpt_path)
    return {
        "updates": updates.rows,
        "weights": weights(model),
        "global_step": trainer.global_step,
        "applied": getattr(trainer.strategy, "applied_updates", None),
        "skipped": getattr(trainer.strategy, "skipped_updates", None),
        "dropped": getattr(trainer.strategy, "dropped_requests", None),
        "attempted": getattr(trainer.strategy, "attempted_updates", None),
        "consecutive": getattr(trainer.strategy, "consecutive_skips", None),
        "empty": getattr(trainer.strategy, "empty_updates", None),
        "traffic": getattr(trainer.strategy, "partition_traffic", None),
        "calls": calls,
        "seen": model.seen,
        "logged": logger.rows,
        "warnings": [str(item.message) for item in caught],
        "open": getattr(trainer.strategy, "window_open", None),
        "requests": run.requests_at_step,
        "optimizer": optimizer_state(trainer),
        "rank": rank(),
    }


def error_of(run: Run) -> str:
    """The error that training as ``run`` says ends with; the ranks stay usable, since all of them raise it."""
    try:
        train(run)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error was raised")


def optimizer_state(trainer: Trainer) -> dict[str, Any]:
    """This rank's master weights and optimizer state."""
    if not isinstance(trainer.strategy, RequestZeRO):
        return {}
    zero = trainer.strategy.engine.optimizer
    state: dict[str, Any] = {"masters": [part.tolist() for part in zero.single_partition_of_fp32_groups]}
    for index, part in enumerate(zero.single_partition_of_fp32_groups):
        for key, value in zero.optimizer.state[part].items():
            state[f"{index}.{key}"] = value.tolist() if isinstance(value, torch.Tensor) else value
    return state
