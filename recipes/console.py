"""Terminal output of a recipe's command."""

from __future__ import annotations

import logging
import os
import warnings

from rich.console import Console

LAUNCHED_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
"""Variables by which launchers number processes; none of them is set in a command that starts ranks itself."""
PLAIN_WIDTH = 160
"""Columns where the output is not a terminal: enough for paths on one line."""


def is_first_process() -> bool:
    """Return true in the process that speaks for all; known before the ranks are joined."""
    return all(os.environ.get(name, "0") == "0" for name in LAUNCHED_RANKS)


def make_console() -> Console:
    """Return a console as wide as the terminal, or wide enough for a file."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def quiet_libraries(accelerator: str) -> None:
    """Silence information and progress output of libraries. Warnings and errors stay.

    For a command only: it changes this process's environment and loggers.

    Args:
        accelerator: ``"cpu"`` or ``"gpu"``, the one that the run will use.
    """
    if accelerator == "cpu":
        # Otherwise DeepSpeed warns that it has found no GPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import lightning

    for name in (lightning.__name__, "lightning.pytorch"):
        for handler in logging.getLogger(name).handlers:
            handler.setLevel(logging.WARNING)
    # Deprecations between libraries, which a user of the recipe cannot act on.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
    warnings.filterwarnings("ignore", message=r".*all_gather_into_tensor.*", category=FutureWarning)
