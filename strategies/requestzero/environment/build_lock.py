"""PyTorch's lock of a folder in which an extension is built: whether its builder is alive, by who has it open.

Processes of another container are not seen: containers must not share the folder (``TORCH_EXTENSIONS_DIR``).
"""

from __future__ import annotations

import os
from contextlib import suppress
from enum import Enum
from pathlib import Path

_SHARED_FILE_SYSTEMS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "fuse", "glusterfs", "wekafs", "afs")
"""Beginnings of the types of file systems that other machines may write to."""


class LockState(Enum):
    """State of a lock file."""

    FREE = "free"
    BUILDING = "held by a process that is compiling"
    ABANDONED = "left behind by a process that has ended"
    UNKNOWN = "held by a process that cannot be seen from here, if any"


def lock_state(lock: Path) -> LockState:
    """Return the state of a lock: PyTorch's builder keeps the file open while it works. Its age says nothing."""
    try:
        owner = lock.stat().st_uid
    except FileNotFoundError:
        return LockState.FREE
    if _is_open(lock):
        return LockState.BUILDING
    if owner != os.getuid() or _file_system(lock).startswith(_SHARED_FILE_SYSTEMS):
        return LockState.UNKNOWN
    # Looked at again: it may have been released between the two looks.
    return LockState.ABANDONED if lock.exists() else LockState.FREE


def remove_abandoned_lock(lock: Path) -> None:
    """Remove the lock of a builder that has ended; leave any other."""
    if lock_state(lock) is LockState.ABANDONED:
        lock.unlink(missing_ok=True)


def _is_open(path: Path) -> bool:
    """Return true if a process that may be looked at has the file open."""
    real = path.resolve()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if link.readlink() == real:
                return True
    return False


def _file_system(path: Path) -> str:
    """Return the type of the file system that holds a path, such as ``"ext4"`` or ``"nfs4"``; empty if not known."""
    real = str(path.resolve())
    best, kind = "", ""
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
            _, mount, type_, *_ = line.split()
            if len(mount) > len(best) and (real == mount or real.startswith(mount.rstrip("/") + "/")):
                best, kind = mount, type_
    return kind
