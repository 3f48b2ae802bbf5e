"""Damage to the newest checkpoint of a folder, and disks that are full."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from requestzero.faults.combination import Fault


def damage_newest(folder: Path, fault: Fault, rank: int) -> None:
    """Damage the file with this rank's optimizer state, in the checkpoint that was written last."""
    files = sorted(folder.rglob(f"*dp_rank_{rank}_*optim_states.pt"), key=lambda path: path.stat().st_mtime_ns)
    (cut if fault is Fault.CUT else change)(files[-1])


def cut(path: Path) -> None:
    """Cut a file to half its size."""
    os.truncate(path, path.stat().st_size // 2)


def change(path: Path) -> None:
    """Change a bit within the longest run of bytes of a file that look like numbers: a tensor's."""
    content = bytearray(path.read_bytes())
    marker = content.rfind(b"/data/")  # the last tensor of the archive
    place = marker + 200 + random.Random(path.name).randrange(16) if marker >= 0 else len(content) // 2
    content[min(place, len(content) - 1)] ^= 1
    path.write_bytes(content)


def fill_disk(write: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.save`` as it is on a full disk: half of the file, and an error."""

    def save(saved: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        write(saved, file, *args, **kwargs)
        if isinstance(file, str | os.PathLike):
            cut(Path(file))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    return save
