"""Checks of a ``CheckpointIO`` plugin: a folder of DeepSpeed's does not go through it, a single file does.

Written for Lightning 2.6.6, whose ``DeepSpeedStrategy`` never calls the plugin, and says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from requestzero.lightning.strategy_facts import TRAINER, StrategyFacts

_WHY = "a folder in which every rank writes its part, by DeepSpeed and not by the plugin"


def check_before_fit(plugin: CheckpointIO | None, callbacks: Iterable[Checkpoint]) -> None:
    """Check a Trainer's plugin; one of the user's own may stay where all that callbacks save are single files.

    Raises:
        ValueError: see :func:`check_folder_plugin`.
    """
    if not all(getattr(callback, "save_weights_only", False) for callback in callbacks):
        check_folder_plugin(plugin, TRAINER)
    warn_of_background(plugin, TRAINER)


def check_folder_plugin(plugin: CheckpointIO | None, strategy: StrategyFacts) -> None:
    """Raise ValueError for a plugin that saves or loads in a way of its own, which a folder would not get.

    Args:
        plugin: as the user gave it, or Lightning's own.
        strategy: whose folder.
    """
    if not _is_plain(plugin) and not _is_in_background(plugin):
        raise ValueError(
            f"{type(plugin).__name__} in {strategy.owner}(plugins=...) would be left out: a checkpoint of "
            f"{strategy.name} is {_WHY}. Leave the plugin out, and do in a callback or after the save what it does "
            f"with the folder{strategy.single_files}."
        )


def warn_of_background(plugin: CheckpointIO | None, strategy: StrategyFacts) -> None:
    """Warn on the first rank that ``AsyncCheckpointIO`` does not write folders."""
    if _is_in_background(plugin):
        rank_zero_warn(
            f"AsyncCheckpointIO saves nothing in the background here: a checkpoint of {strategy.name} is {_WHY}, and "
            f"is complete before the training goes on{strategy.single_files}. Leave the plugin out to be rid of this."
        )


def _is_in_background(plugin: CheckpointIO | None) -> bool:
    return type(plugin) is AsyncCheckpointIO and _is_plain(plugin.checkpoint_io)


def _is_plain(plugin: CheckpointIO | None) -> bool:
    return plugin is None or type(plugin) is TorchCheckpointIO
