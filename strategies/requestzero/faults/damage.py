"""Damage to the newest checkpoint of a folder, and disks that are full."""

from __future__ import annotations

import errno
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from requestzero.faults.combination import Fault


def damage_newest(folder: Path, fault: Fault, rank: int) -> None:
    """Damage the file with this rank's optimizer state, in the checkpoint that was written last."""
    files = sorted(folder.rglob(f"*zero_pp_rank_{rank}_*optim_states.pt"), key=lambda path: path.stat().st_mtime_ns)
    (cut if fault is Fault.CUT else change)(files[-1])


def cut(path: Path) -> None:
    """Cut a file to half its size."""
    os.truncate(path, path.stat().st_size // 2)


def change(path: Path) -> None:
    """Change a bit of the largest tensor in a file that ``torch.save`` has written."""
    with zipfile.ZipFile(path) as archive:
        tensor = max(
            (each for each in archive.infolist() if "/data/" in each.filename), key=lambda each: each.file_size
        )
    content = bytearray(path.read_bytes())
    # A local header has 30 bytes, of which the last four are the lengths of a name and of padding after it.
    lengths = struct.unpack_from("<HH", content, tensor.header_offset + 26)
    content[tensor.header_offset + 30 + sum(lengths) + tensor.file_size // 2] ^= 1
    path.write_bytes(content)


def write_half(write: Callable[..., Any], saved: Any, file: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Call ``torch.save`` as it is on a full disk: half of the file, and an error."""
    write(saved, file, *args, **kwargs)
    if isinstance(file, str | os.PathLike):
        cut(Path(file))
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
