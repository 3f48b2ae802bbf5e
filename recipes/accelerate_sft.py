"""Fine-tune or pre-train a causal LM on requests of uneven length, in a plain loop with Accelerate.

``accelerate launch --config_file configs/accelerate/zero2_offload_cpu.yaml -m requestzero.recipes.accelerate_sft
[overrides]``; ``--help`` in the overrides' place lists the configuration.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from requestzero.errors import GradientOverflowError
from requestzero.recipes.config_check import config_problems
from requestzero.recipes.errors import UsageError, end_run
from requestzero.recipes.launched import launch_problems, register_launched
from requestzero.recipes.override_check import command_problems

CONFIG_NAME = "accelerate_sft"


def main() -> None:
    """Check the command line as a whole, then let Hydra run it; exit with code 2 and all problems otherwise."""
    from requestzero.recipes.accelerate_start import begin, refuse

    register_launched()
    problems = command_problems(sys.argv[1:], CONFIG_NAME)
    if problems:
        refuse(problems)
    begin()
    _start()


@hydra.main(config_path="pkg://requestzero.configs", config_name=CONFIG_NAME, version_base="1.3")
def _start(cfg: DictConfig) -> None:
    from hydra.core.hydra_config import HydraConfig

    from requestzero.recipes.accelerate_start import refuse
    from requestzero.recipes.console import make_console
    from requestzero.recipes.report import print_report

    try:
        summary = run(cfg, Path(HydraConfig.get().runtime.output_dir))
    except UsageError as error:
        refuse(error.problems)
    except GradientOverflowError as error:
        end_run(error)
    if summary is not None:
        print_report(make_console(), summary)


def run(cfg: DictConfig, output_dir: Path) -> Any:
    """Train as ``cfg`` says; return the ``RunSummary`` on the first rank, ``None`` on the others (collective).

    Raises:
        UsageError: the configuration or the data has problems; all of them are named.
    """
    problems = [*config_problems(cfg), *launch_problems(cfg)]
    if problems:
        raise UsageError(problems)
    return train(cfg, output_dir)


def train(cfg: Any, output_dir: Path) -> Any:
    """Run the loop."""
    from accelerate.utils import set_seed, tqdm

    from requestzero.environment.fp32_matmuls import run_in_fp32
    from requestzero.recipes.accelerate_start import (
        choose_matmuls_together,
        make_accelerator,
        progress_of,
        same_on_all_ranks,
        summarize,
    )
    from requestzero.recipes.build import build_data, build_loader, build_model, build_tokenizer
    from requestzero.recipes.model import micro_batch_loss, next_token_loss
    from requestzero.recipes.optimizer import compile_ahead, make_optimizer, make_warmup
    from requestzero.recipes.report import checkpoint_directory
    from requestzero.recipes.window_metrics import LoopTotals, WindowLoss

    compile_ahead(cfg.optimizer)
    set_seed(cfg.seed)
    accelerator = make_accelerator(cfg, output_dir)
    output_dir = same_on_all_ranks(output_dir)
    tokenizer = build_tokenizer(cfg.model)
    data = build_data(cfg, tokenizer, accelerator.num_processes)
    model = build_model(cfg)
    if choose_matmuls_together(cfg, accelerator):
        run_in_fp32(model)
    optimizer = make_optimizer(model, cfg.optimizer)
    scheduler = make_warmup(optimizer, cfg.optimizer)
    loader = build_loader(cfg, data, tokenizer)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    totals, losses = LoopTotals(), WindowLoss(accelerator.device)
    accelerator.register_for_checkpointing(loader, totals)
    if cfg.trainer.resume_from is not None:
        accelerator.load_state(cfg.trainer.resume_from)
    engine = accelerator.deepspeed_engine_wrapped.engine
    started, tokens_before, held = time.perf_counter(), totals.tokens, 0
    steps = cfg.trainer.max_steps
    plan = loader.state_dict()["loader"]["statistics"]
    bar = tqdm(total=steps, initial=totals.updates, desc="updates", mininterval=1.0)
    while totals.updates < steps:
        for inputs in loader:  # one micro-batch; gradients are summed until a window of requests is complete
            window = engine.update_window
            total, tokens = next_token_loss(model, inputs)
            accelerator.backward(micro_batch_loss(total, tokens, cfg.zero.normalization))
            losses.add(total, tokens)
            held = max(held, 0 if window.request_open else engine.grad_partition_bytes)
            if accelerator.sync_gradients and cfg.trainer.gradient_clip_val is not None:
                accelerator.clip_grad_norm_(model.parameters(), cfg.trainer.gradient_clip_val)
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()  # as in any loop with Accelerate: acts where sync_gradients is true
            scheduler.step()
            optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            totals.add(window, *accelerator.reduce(losses.take(), "sum").tolist())
            metrics = {"loss": totals.last_loss, "lr": rate}
            bar.set_postfix({"requests": totals.requests, **metrics, **progress_of(engine)}, refresh=False)
            bar.update()
            if totals.updates % cfg.trainer.log_every_n_steps == 0:
                accelerator.log({**metrics, **totals.counts()}, step=totals.updates)  # adds grad_norm and overflow/...
            if totals.updates % (cfg.trainer.checkpoint_every_n_steps or steps) == 0 or totals.updates == steps:
                accelerator.save_state(str(checkpoint_directory(output_dir) / f"update-{totals.updates}"))
            # The plan of trained windows, not of those that are fetched ahead.
            plan = loader.state_dict()["loader"]["statistics"]
            if totals.updates == steps:
                break
    bar.close()
    speed = (totals.tokens - tokens_before) / (time.perf_counter() - started)
    summary = summarize(accelerator, totals, plan, output_dir, speed, held, data.skipped_lines)
    accelerator.end_training()
    return summary


if __name__ == "__main__":
    main()
