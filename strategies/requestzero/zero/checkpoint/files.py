"""The files of DeepSpeed's checkpoints: which ranks have saved, and in which format."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

WINDOW_FILES = "requestzero_window*"
"""Files of an open window, beside DeepSpeed's."""

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_?optim_states\.pt")


def optimizer_files(folder: Path) -> list[Path]:
    """Return the files of optimizer state in a checkpoint's own folder, one a data-parallel rank, in rank order.

    Raises:
        FileNotFoundError: the file of a rank is missing between others.
    """
    found = {
        int(match.group(1)): path
        for path in folder.glob("*optim_states.pt")
        if (match := _OPTIMIZER_FILE.fullmatch(path.name))
    }
    missing = sorted(set(range(max(found, default=-1) + 1)) - set(found))
    if missing:
        raise FileNotFoundError(f"{folder} has the optimizer states of {len(found)} ranks, and not those of {missing}.")
    return [found[rank] for rank in sorted(found)]


def is_universal(folder: Path) -> bool:
    """Return whether a checkpoint's own folder is in DeepSpeed's universal format."""
    return (folder / "zero" / "optimizer_state.pt").is_file()


def find_tag(load_dir: Path, universal: bool = False) -> str | None:
    """Return the tag that DeepSpeed would load where none is given, or ``None`` without one."""
    latest = load_dir / ("latest_universal" if universal else "latest")
    return latest.read_text().strip() if latest.is_file() else None


def read_states(file: Path) -> dict[str, Any]:
    """Return what DeepSpeed has saved in a file, on the CPU; tensors are read from the disk when they are used.

    Raises:
        OSError: it cannot be read.
    """
    try:
        states: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    except (RuntimeError, EOFError) as error:
        raise OSError(f"{file} cannot be read: {error}") from error
    return states
