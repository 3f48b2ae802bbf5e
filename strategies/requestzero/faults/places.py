"""Places in a run, as the number of requests that have come until then; and the names of checkpoints by them."""

from __future__ import annotations

import re
from pathlib import Path

from requestzero.faults.setup import Setup

_NAME = re.compile(r"(?:global_step|step=|checkpoint_)(\d+)(?:\.(\d+))?(?:\.ckpt)?")


def name_at(place: int, setup: Setup) -> str:
    """Return the number in a checkpoint's name: that of the updates, and of the requests of the window after them."""
    updates, requests = divmod(place, setup.requests_per_update)
    return f"{updates}.{requests}" if requests else f"{updates}"


def place_of(checkpoint: Path | None, setup: Setup) -> int:
    """Return the place at which a checkpoint was saved; 0 for the start of a run."""
    match = None if checkpoint is None else _NAME.fullmatch(checkpoint.name)
    return 0 if match is None else int(match[1]) * setup.requests_per_update + int(match[2] or 0)


def describe(place: int, setup: Setup) -> str:
    """Return a place in words."""
    updates, requests = divmod(place, setup.requests_per_update)
    within = f", request {requests} of the next" if requests else ""
    return f"update {updates}{within}" if place else "the start"


def checkpoints(folder: Path, setup: Setup) -> list[Path]:
    """Return the checkpoints of a folder, the newest first; those of an engine begin with what ``latest`` names."""
    found = [(place_of(path, setup), path) for path in folder.glob("*") if _NAME.fullmatch(path.name)]
    newest_first = [path for _, path in sorted(found, reverse=True)]
    latest = folder / "latest"
    if latest.exists():
        named = folder / latest.read_text().strip()
        newest_first = [named, *newest_first[newest_first.index(named) + 1 :]] if named in newest_first else [named]
    return newest_first
