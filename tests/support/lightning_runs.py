"""One small training run per call, on the ranks that call it, with everything a test wants to compare recorded.

The model's gradient is the batch itself, so that every sum, mean and weight is exact in fp32 as long as the
data are small binary fractions; the ranks get different data.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from requestzero.lightning import RequestZeRO
from support.lightning_data import StatefulStream, Stream, rank
from support.lightning_model import CurvedModel, Model
from support.lightning_records import ListLogger, Updates, optimizer_state, recording, weights
from support.lightning_spec import Run


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
        "aborted": getattr(trainer.strategy, "aborted_requests", None),
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
