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
from requestzero.zero.window_checkpoint.sums import file_of


def damage_newest(folder: Path, fault: Fault, rank: int) -> None:
    """Damage a file of this rank in the checkpoint that was written last: sums of the window, else optimizer state."""
    files = sorted(folder.rglob(f"*zero_pp_rank_{rank}_*optim_states.pt"), key=lambda path: path.stat().st_mtime_ns)
    sums = file_of(files[-1].parent, rank)
    (cut if fault is Fault.CUT else change)(sums if sums.exists() else files[-1])


def cut(path: Path) -> None:
    """Cut a file to half its size."""
    os.truncate(path, path.stat().st_size // 2)


def change(path: Path) -> None:
    """Change a bit within the tensors of a file that ``torch.save`` or safetensors has written."""
    content = bytearray(path.read_bytes())
    content[_middle_of_sums(content) if path.suffix == ".safetensors" else _middle_of_largest(path, content)] ^= 1
    path.write_bytes(content)


def _middle_of_sums(content: bytearray) -> int:
    (header,) = struct.unpack_from("<Q", content)
    return (8 + int(header) + len(content)) // 2


def _middle_of_largest(path: Path, content: bytearray) -> int:
    """Return the offset of the middle of the largest tensor that ``torch.save`` has written."""
    with zipfile.ZipFile(path) as archive:
        tensor = max(
            (each for each in archive.infolist() if "/data/" in each.filename), key=lambda each: each.file_size
        )
    # A local header has 30 bytes, of which the last four are the lengths of a name and of padding after it.
    lengths = struct.unpack_from("<HH", content, tensor.header_offset + 26)
    return int(tensor.header_offset + 30 + sum(lengths) + tensor.file_size // 2)


def write_half(write: Callable[..., Any], saved: Any, file: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Call ``torch.save``, or that of safetensors, as it is on a full disk: half of the file, and an error."""
    write(saved, file, *args, **kwargs)
    if isinstance(file, str | os.PathLike):
        cut(Path(file))
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
