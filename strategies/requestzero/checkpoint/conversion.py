"""A checkpoint in DeepSpeed's universal format, which any number of ranks loads."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from deepspeed.checkpoint.constants import BASE_OPTIMIZER_STATE, OPTIMIZER_STATE_DICT
from deepspeed.checkpoint.ds_to_universal import main as to_universal

from requestzero.checkpoint.location import Location, model_files
from requestzero.zero.checkpoint.files import WINDOW_FILES, is_universal, optimizer_files, read_states

_WRITTEN_BY_ADAM = {"exp_avg", "exp_avg_sq"}


def convert(source: Location, target: Path, workers: int = 1) -> None:
    """Write the checkpoint anew for any number of ranks, with everything that a front end keeps beside it.

    DeepSpeed's ``ds_to_universal`` converts weights and optimizer state. An open window is copied: it is stored by
    parameter name and slice.

    Args:
        source: a checkpoint of stage 1, 2 or 3.
        target: the new folder, to be loaded as ``source``'s; is complete when it is there.
        workers: processes that convert.

    Raises:
        FileExistsError: ``target`` exists.
        ValueError: ``source`` is converted already or holds ``target``, or its optimizer is not of Adam's kind.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists: name a new folder.")
    if target.resolve().is_relative_to(source.root.resolve()):
        raise ValueError(f"{target} lies in {source.root}, which is copied there: name a folder outside of it.")
    if is_universal(source.folder):
        raise ValueError(f"{source.folder} is in the universal format already: any number of ranks can load it.")
    _check_optimizer(source)
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    _copy_beside(source, unfinished)
    (unfinished / source.tag).mkdir(parents=True)
    to_universal(
        argparse.Namespace(
            input_folder=str(source.folder),
            output_folder=str(unfinished / source.tag),
            num_extract_workers=workers,
            num_merge_workers=workers,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
    for file in source.folder.glob(WINDOW_FILES):
        shutil.copy2(file, unfinished / source.tag)
    (unfinished / "latest").write_text(source.tag)
    unfinished.rename(target)


def _check_optimizer(source: Location) -> None:
    """Raise ValueError where DeepSpeed's converter would fail, or lose what it does not know."""
    saved = read_states(optimizer_files(source.folder)[0])[OPTIMIZER_STATE_DICT]
    base = saved.get(BASE_OPTIMIZER_STATE) or saved[OPTIMIZER_STATE_DICT]  # at stage 3
    found = {key for state in base["state"].values() for key in state} - {"step"}
    if found != _WRITTEN_BY_ADAM:
        raise ValueError(
            "DeepSpeed's universal format holds the states of Adam's kind, exp_avg and exp_avg_sq, and the optimizer "
            f"of {source.folder} has {', '.join(sorted(found)) or 'none'}. At stages 1 and 2 the checkpoint needs no "
            "conversion: load it as it is, with any number of ranks."
        )


def _copy_beside(source: Location, target: Path) -> None:
    """Copy what lies beside the tag's folder, other checkpoints left out."""
    others = [path.name for path in source.root.iterdir() if path.is_dir() and model_files(path)]
    others += [path.name for path in source.root.glob(".requestzero_*")]  # a save that did not come to its end
    shutil.copytree(source.root, target, ignore=lambda folder, names: others if Path(folder) == source.root else [])
