"""Start and end of ``accelerate_sft`` on a rank: its ``Accelerator``, and the summary."""

from __future__ import annotations

import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from requestzero.config.option_record import FrontEnd, values_in
from requestzero.config.precision import PRECISIONS
from requestzero.recipes.config_check import zero_settings

if TYPE_CHECKING:
    from accelerate import Accelerator

    from requestzero.recipes.report import RunSummary

# Accelerate by itself has DeepSpeed compile its own Adam for offload; PyTorch's works as well.
DEEPSPEED_CONFIG = {"zero_force_ds_cpu_optimizer": False}

_MIXED_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def is_first_rank() -> bool:
    """Return true on the rank that reports, by the launcher's environment: ranks are not joined yet."""
    return os.environ.get("RANK", "0") == "0"


def begin() -> None:
    """Make the run's directory on one rank, and silence libraries about what cannot be changed. For a command only."""
    if not is_first_rank():
        sys.argv += ["hydra.run.dir=.", "hydra.output_subdir=null"]
        sys.argv += ["hydra.job_logging.handlers.file.filename=/dev/null"]
    if not find_gpus():
        # Otherwise DeepSpeed warns that it has found no GPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", message=r".*all_gather_into_tensor.*", category=FutureWarning)


def find_gpus() -> int:
    from requestzero.recipes.devices import count_gpus

    return count_gpus()


def refuse(problems: list[str]) -> NoReturn:
    """Print the problems once, and exit with code 2."""
    if is_first_rank():
        print("Nothing was started:", *(f"  {problem}" for problem in problems), sep="\n", file=sys.stderr)
    sys.exit(2)


def make_accelerator(cfg: Any, output_dir: Path) -> Accelerator:
    """Build the ``Accelerator`` for ``zero``, ``overflow`` and ``precision``, with trackers. Joins the ranks."""
    from accelerate import Accelerator, DataLoaderConfiguration

    from requestzero import RequestZeROPlugin
    from requestzero.recipes.csv_tracker import CsvTracker

    settings = zero_settings(cfg)
    options = values_in(settings, FrontEnd.ACCELERATE)
    plugin = RequestZeROPlugin(DEEPSPEED_CONFIG, options={**options, "overflow": settings.overflow.given()})
    accelerator = Accelerator(
        deepspeed_plugin=plugin,
        mixed_precision=_MIXED_PRECISION[PRECISIONS[cfg.precision.mode]],
        # A request has the same items however many ranks share them: one scheduler step is one update.
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        project_dir=output_dir,
        log_with=["tensorboard"] if find_spec("tensorboard") else [],
    )
    accelerator.log_with.append(CsvTracker(output_dir / "csv"))
    accelerator.init_trackers("tensorboard")
    return accelerator


def choose_matmuls_together(cfg: Any, accelerator: Accelerator) -> bool:
    """Return true where matrix products are computed in fp32, as the first rank finds; it says so (collective)."""
    from accelerate.utils import broadcast_object_list

    from requestzero.recipes.matmuls import choose_matmuls

    fp32, line = False, ""
    if accelerator.is_main_process:
        fp32, line = choose_matmuls(cfg.precision, "cpu" if accelerator.device.type == "cpu" else "gpu")
    if line:
        print(line, flush=True)
    return bool(broadcast_object_list([fp32])[0])


def same_on_all_ranks(path: Path) -> Path:
    """Return the first rank's path (collective)."""
    from accelerate.utils import broadcast_object_list

    return Path(broadcast_object_list([str(path)])[0])


def progress_of(engine: Any) -> dict[str, float]:
    """Return the engine's values for the progress bar."""
    return {
        "grad norm": float(engine.get_global_grad_norm()),
        "skipped": engine.skipped_updates,
        "dropped": engine.dropped_requests,
    }


def summarize(
    accelerator: Any, totals: Any, plan: Any, output_dir: Path, speed: float, held: int, skipped_lines: list[str]
) -> RunSummary | None:
    """Return the summary on the first rank, ``None`` on the others (collective).

    Args:
        accelerator: the one that has trained.
        totals: :class:`~requestzero.recipes.window_metrics.LoopTotals`.
        plan: state of the loader's :class:`~requestzero.planning.PlanStatistics`.
        output_dir: the run's directory.
        speed: trained tokens per second, over all ranks.
        held: bytes of the gradient partition after a request within a window, the largest on this rank.
        skipped_lines: of the data file.
    """
    import torch

    from requestzero.planning import PlanStatistics
    from requestzero.recipes.report import RunSummary, checkpoint_directory

    engine = accelerator.deepspeed_engine_wrapped.engine
    sizes = torch.tensor([[held, engine.peak_grad_partition_bytes]], device=accelerator.device)
    between, peak = accelerator.gather(sizes).amax(0).tolist()
    if not accelerator.is_main_process:
        return None
    return RunSummary(
        first_loss=totals.first_loss,
        last_loss=totals.last_loss,
        updates_applied=engine.applied_updates,
        updates_skipped=engine.skipped_updates,
        requests_dropped=engine.dropped_requests,
        requests=totals.requests,
        micro_batches=totals.micro_batches,
        tokens_per_second=speed,
        bytes_between_requests=between,
        bytes_at_peak=peak,
        checkpoint=checkpoint_directory(output_dir) / f"update-{totals.updates}",
        logs=output_dir,
        plan=PlanStatistics.from_state(plan),
        skipped_lines=skipped_lines,
    )
