"""One run of the Lightning recipe: from a checked configuration to the summary of its results."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console

from requestzero import RequestZeRO
from requestzero.config.option_record import FrontEnd, values_in
from requestzero.planning import PlanStatistics
from requestzero.recipes.build import build_data, build_loader, build_model, build_tokenizer
from requestzero.recipes.config_check import zero_settings
from requestzero.recipes.console import is_first_process
from requestzero.recipes.data import RequestData
from requestzero.recipes.devices import choose_devices
from requestzero.recipes.errors import end_by_sigterm
from requestzero.recipes.lightning_module import LanguageModeling
from requestzero.recipes.matmuls import choose_matmuls
from requestzero.recipes.optimizer import compile_ahead
from requestzero.recipes.progress import UpdateProgress
from requestzero.recipes.report import RunSummary, checkpoint_directory
from requestzero.recipes.update_metrics import UpdateMetrics

# DeepSpeed by itself insists on its own Adam for offload; PyTorch's works as well and needs no compiler.
DEEPSPEED_CONFIG = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}


def train(cfg: Any, output_dir: Path, console: Console) -> RunSummary | None:
    """Train; return the summary on the first rank, ``None`` on the others (collective).

    Raises:
        UsageError: the data has problems; all of them are named, before another rank is started.
        SystemExit: SIGTERM has come to a rank.
    """
    seed_everything(cfg.seed, verbose=False)
    tokenizer = build_tokenizer(cfg.model)
    data = build_data(cfg, tokenizer, choose_devices(cfg.trainer).world_size)
    compile_ahead(cfg.optimizer)
    fp32_matmuls = _choose_matmuls(cfg, console)
    module = LanguageModeling(build_model(cfg), cfg.optimizer, cfg.zero.normalization, fp32_matmuls)
    loader = build_loader(cfg, data, tokenizer)
    metrics = UpdateMetrics()
    trainer = make_trainer(cfg, output_dir, console, metrics)
    try:
        trainer.fit(module, loader, ckpt_path=cfg.trainer.resume_from)
    except SIGTERMException:
        end_by_sigterm(trainer.global_step)
    return _summary(trainer, metrics, loader.statistics, data, output_dir) if trainer.is_global_zero else None


def _choose_matmuls(cfg: Any, console: Console) -> bool:
    """Measure and say so in one process; the other ranks follow it."""
    if not is_first_process():
        return False
    fp32, line = choose_matmuls(cfg.precision, choose_devices(cfg.trainer).accelerator)
    if line:
        console.print(line, markup=False, highlight=False)
    return fp32


def make_strategy(cfg: Any) -> RequestZeRO:
    """Build the strategy of the sections ``zero`` and ``overflow``."""
    return RequestZeRO(**values_in(zero_settings(cfg), FrontEnd.LIGHTNING), config=DEEPSPEED_CONFIG)


def make_trainer(cfg: Any, output_dir: Path, console: Console, metrics: UpdateMetrics) -> Trainer:
    """Build the Trainer; its loader marks the ends of update windows."""
    devices = choose_devices(cfg.trainer)
    return Trainer(
        strategy=make_strategy(cfg),
        accelerator=devices.accelerator,
        devices=devices.devices,
        num_nodes=devices.num_nodes,
        precision=cfg.precision.mode,
        max_steps=cfg.trainer.max_steps,
        gradient_clip_val=cfg.trainer.gradient_clip_val,
        log_every_n_steps=cfg.trainer.log_every_n_steps,
        default_root_dir=output_dir,
        logger=_loggers(output_dir),
        callbacks=[metrics, UpdateProgress(console), *_checkpoints(cfg, output_dir)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _loggers(output_dir: Path) -> list[Logger]:
    loggers: list[Logger] = [CSVLogger(output_dir, name="csv", version="")]
    if find_spec("tensorboard"):
        loggers.append(TensorBoardLogger(output_dir, name="tensorboard", version=""))
    return loggers


def _checkpoints(cfg: Any, output_dir: Path) -> list[ModelCheckpoint]:
    """Return callbacks that save at intervals, and after the last update within the fit, for a longer run to resume."""
    intervals = {cfg.trainer.checkpoint_every_n_steps or cfg.trainer.max_steps, cfg.trainer.max_steps}
    return [
        ModelCheckpoint(
            checkpoint_directory(output_dir),
            filename="update-{step}",
            auto_insert_metric_name=False,
            every_n_train_steps=interval,
            save_top_k=-1,
        )
        for interval in sorted(intervals)
    ]


def _summary(
    trainer: Trainer, metrics: UpdateMetrics, plan: PlanStatistics, data: RequestData, output_dir: Path
) -> RunSummary:
    totals, figures = metrics.totals, metrics.figures
    return RunSummary(
        first_loss=totals.first_loss,
        last_loss=totals.last_loss,
        updates_applied=figures.updates_applied,
        updates_skipped=figures.updates_skipped,
        requests_dropped=figures.requests_dropped,
        requests=totals.requests,
        micro_batches=totals.micro_batches,
        tokens_per_second=figures.tokens / max(figures.seconds, 1e-9),
        bytes_between_requests=figures.bytes_between_requests,
        bytes_at_peak=figures.bytes_at_peak,
        checkpoint=checkpoint_directory(output_dir) / f"update-{trainer.global_step}.ckpt",
        logs=output_dir,
        plan=plan,
        skipped_lines=data.skipped_lines,
    )
