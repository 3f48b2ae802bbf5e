"""What a checkpoint holds, read from its files; nothing is built, and no accelerator is needed."""

from __future__ import annotations

import contextlib
import math
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT, ZERO_STAGE

from requestzero.checkpoint.location import Location
from requestzero.checkpoint.single_file import LIGHTNING_KEY
from requestzero.zero.checkpoint.files import is_universal, read_states
from requestzero.zero.window_checkpoint.record import SavedWindow
from requestzero.zero.window_checkpoint.sums import check_file, reading


@dataclass(frozen=True)
class Contents:
    """One checkpoint."""

    folder: str
    """The tag's folder."""
    written_by: str
    """Front end: ``"engine"``, ``"Lightning"``, ``"Accelerate"`` or ``"Trainer"``."""
    format: str
    """``"of each rank"``, or ``"universal"``."""
    stage: int | None
    ranks: int
    """Data-parallel ranks that have saved."""
    parameters: int
    """Elements of all parameters."""
    applied_updates: int
    skipped_updates: int
    window: dict[str, Any] | None
    """The open update window: of every rank its counts, and the record's other fields; ``None`` without one."""
    versions: dict[str, str]
    problems: tuple[str, ...]
    """What is missing or cannot be read; empty for a whole checkpoint."""

    @property
    def is_whole(self) -> bool:
        """True if every file that a load needs is there and can be opened."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Return all fields, and ``whole``."""
        return {**asdict(self), "whole": self.is_whole}

    def lines(self) -> Iterator[str]:
        """Return the report, line by line."""
        skipped = f", {self.skipped_updates} skipped" if self.skipped_updates else ""
        yield f"folder      {self.folder}"
        yield f"written by  {self.written_by} ({', '.join(f'{name} {text}' for name, text in self.versions.items())})"
        yield f"ZeRO        stage {self.stage}, {self.ranks} data-parallel ranks, format: {self.format}"
        yield f"model       {self.parameters:,} parameters"
        yield f"updates     {self.applied_updates} applied{skipped}"
        yield f"window      {_window_line(self.window)}"
        yield "whole       " + ("yes" if self.is_whole else "NO")
        yield from (f"            {problem}" for problem in self.problems)


def read_contents(source: Location, checksums: bool = False) -> Contents:
    """Return what a checkpoint holds.

    Args:
        source: the checkpoint, of this package or of DeepSpeed's own engine.
        checksums: also read every file to its end and compare its checksums, which takes as long as a load.

    Raises:
        OSError: the file of the model's state cannot be read.
    """
    states = read_states(source.model_files()[0])
    problems = list(_problems(source, states, checksums))
    window = None
    try:
        window = _window(source.folder, checksums)
    except ValueError as error:
        problems.append(str(error))
    shapes = [*states.get("param_shapes", []), states.get("frozen_param_shapes") or {}]
    return Contents(
        folder=str(source.folder),
        written_by=_front_end(source, states),
        format="universal" if is_universal(source.folder) else "of each rank",
        stage=_stage(source.folder),
        ranks=int(states["dp_world_size"]),
        parameters=sum(math.prod(shape) for group in shapes for shape in group.values()),
        applied_updates=int(states["global_steps"]) - int(states["skipped_steps"]),
        skipped_updates=int(states["skipped_steps"]),
        window=window,
        versions=_versions(states, window),
        problems=tuple(problems),
    )


def _problems(source: Location, states: dict[str, Any], checksums: bool) -> Iterator[str]:
    files, ranks = source.model_files(), int(states["dp_world_size"])
    if any("zero_pp_rank" in file.name for file in files) and len(files) != ranks:  # at stage 3
        yield f"model states of {len(files)} ranks, where {ranks} have saved"
    if not is_universal(source.folder):
        optimizer = _optimizer_files(source.folder)
        if len(optimizer) != ranks:
            yield f"optimizer states of {len(optimizer)} ranks, where {ranks} have saved"
        files += optimizer
    for file in [*files, *sorted((source.folder / "zero").rglob("*.pt"))]:
        if (problem := _damage(file, checksums)) is not None:
            yield f"{file.name}: {problem}"


def _damage(file: Path, checksums: bool) -> str | None:
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip() if checksums else None
    except (zipfile.BadZipFile, OSError) as error:
        return str(error)
    return None if damaged is None else f"{damaged} is damaged"


def _stage(folder: Path) -> int | None:
    """Return the stage as a file says that can be read."""
    universal = folder / "zero" / "optimizer_state.pt"
    for file in [universal] if universal.is_file() else _optimizer_files(folder):
        with contextlib.suppress(OSError):
            states = read_states(file)
            stage = states.get(OPTIMIZER_STATE_DICT, states).get(ZERO_STAGE, states.get(ZERO_STAGE))
            return None if stage is None else int(stage)
    return None


def _optimizer_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*optim_states.pt"))


def _front_end(source: Location, states: dict[str, Any]) -> str:
    if LIGHTNING_KEY in states:
        return "Lightning"
    if (source.root / "trainer_state.json").is_file():
        return "Trainer"
    return "Accelerate" if list(source.root.glob("random_states_*.pkl")) else "engine"


def _window(folder: Path, checksums: bool) -> dict[str, Any] | None:
    """Return the record of the open window.

    Raises:
        ValueError: it cannot be read, or a rank's sums are missing or damaged.
    """
    saved = SavedWindow.read(folder)
    if saved is None:
        return None
    if saved.has_sums:
        with reading(folder, saved.data_parallel_ranks):
            pass
        for number, rank in enumerate(saved.ranks if checksums else ()):
            check_file(folder, number, rank.checksum)
    return asdict(saved)


def _window_line(window: dict[str, Any] | None) -> str:
    if window is None:
        return "none open"
    ranks = window["ranks"]
    counts = ", ".join(str(rank["micro_batches"]) for rank in ranks)
    return f"open: {ranks[0]['requests']} requests, micro-batches by rank: {counts}"


def _versions(states: dict[str, Any], window: dict[str, Any] | None) -> dict[str, str]:
    found = {"DeepSpeed": states.get("ds_version"), "Lightning": states.get(LIGHTNING_KEY)}
    found["requestzero"] = (window or {}).get("requestzero_version")
    return {name: str(version) for name, version in found.items() if version is not None}
