"""Fine-tune or pre-train a causal LM on requests of uneven length, with Lightning.

``python -m requestzero.recipes.lightning_sft [overrides]``; ``--help`` lists the configuration. Lightning
starts the other local ranks itself, by running the same command again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from requestzero.errors import GradientOverflowError
from requestzero.recipes.config_check import config_problems
from requestzero.recipes.devices import choose_devices
from requestzero.recipes.errors import UsageError, end_run
from requestzero.recipes.override_check import command_problems

CONFIG_NAME = "lightning_sft"


def main() -> None:
    """Check the command line as a whole, then let Hydra run it; exit with code 2 and all problems otherwise."""
    problems = command_problems(sys.argv[1:], CONFIG_NAME)
    if problems:
        _refuse(problems)
    _start()


@hydra.main(config_path="pkg://requestzero.configs", config_name=CONFIG_NAME, version_base="1.3")
def _start(cfg: DictConfig) -> None:
    from hydra.core.hydra_config import HydraConfig

    from requestzero.recipes.console import is_first_process, make_console, quiet_libraries
    from requestzero.recipes.report import print_report

    console = make_console()
    if is_first_process():
        console.print("Loading PyTorch, Lightning and DeepSpeed.")
    quiet_libraries(choose_devices(cfg.trainer).accelerator)
    try:
        summary = run(cfg, Path(HydraConfig.get().runtime.output_dir), console)
    except UsageError as error:
        _refuse(error.problems)
    except GradientOverflowError as error:
        end_run(error)
    if summary is not None:
        print_report(console, summary)


def _refuse(problems: list[str]) -> None:
    print("Nothing was started:", *(f"  {problem}" for problem in problems), sep="\n", file=sys.stderr)
    sys.exit(2)


def run(cfg: DictConfig, output_dir: Path, console: Any) -> Any:
    """Train as ``cfg`` says; return the ``RunSummary`` on the first rank, ``None`` on the others (collective).

    Args:
        cfg: The composed configuration, see :class:`~requestzero.recipes.config_schema.RecipeConfig`.
        output_dir: Where checkpoints and logs go; an absolute path.
        console: A rich console for progress.

    Raises:
        UsageError: the configuration or the data has problems; all of them are named.
    """
    # Training's imports take seconds; a wrong command line is reported at once.
    from requestzero.recipes.lightning_run import train

    problems = config_problems(cfg)
    if problems:
        raise UsageError(problems)
    return train(cfg, output_dir, console)


if __name__ == "__main__":
    main()
