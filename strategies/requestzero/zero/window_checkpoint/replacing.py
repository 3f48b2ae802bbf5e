"""A folder that is written beside its place and moved there as a whole.

Whoever reads the place finds what was there before or all of the new, also when the writer is killed. The folder is
written in ``.requestzero_writing`` beside it, which a killed writer leaves behind for the next one to replace.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from requestzero.zero.window_checkpoint.together import on_one_rank, true_on_all

_WRITING = ".requestzero_writing"
_REPLACED = ".requestzero_replaced"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux


def staging_of(path: Path) -> Path:
    """Return where a folder is written that is to be moved to ``path``."""
    return path.parent / _WRITING / path.name


def begin(path: Path) -> Path:
    """Return the empty folder in which to write. What a killed writer has left there, of any name, is removed."""
    recover(path)
    staging = staging_of(path)
    _remove(staging.parent)
    staging.mkdir(parents=True)
    return staging


def commit(path: Path, ours: Callable[[str], bool] = lambda name: True) -> None:
    """Move what was written to ``path``; what was there before is removed.

    Args:
        path: the folder's place.
        ours: tells by its name whether an entry of what was there may go; others are taken along.
    """
    staging = staging_of(path)
    _flush(staging)
    _take_along(path, staging, ours)
    if not path.exists():
        os.rename(staging, path)
    elif not _exchange(staging, path):
        replaced = _replaced(path)
        _remove(replaced)
        replaced.parent.mkdir(exist_ok=True)
        os.rename(path, replaced)
        os.rename(staging, path)
        with suppress(OSError):  # the new folder is in its place; the next writer tries again
            _remove(replaced)
            _remove_empty(replaced.parent)
    with suppress(OSError):
        _remove(staging)
        _remove_empty(staging.parent)


def _take_along(path: Path, staging: Path, ours: Callable[[str], bool]) -> None:
    """Link what others have put into a folder into the one that replaces it."""
    for entry in path.iterdir() if path.is_dir() else ():
        target = staging / entry.name
        if ours(entry.name) or target.exists():
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, target, symlinks=True, copy_function=_link)
        else:
            _link(entry, target)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(source, target, follow_symlinks=False)


def drop(path: Path) -> None:
    """Remove the folder that :func:`begin` has made."""
    staging = staging_of(path)
    _remove(staging)
    _remove_empty(staging.parent)


def recover(path: Path) -> None:
    """Put back what :func:`commit` had moved away when it was killed, where the file system cannot exchange folders."""
    replaced = _replaced(path)
    if not path.exists() and replaced.exists():
        os.rename(replaced, path)
        _remove_empty(replaced.parent)


@contextmanager
def appearing(path: Path, moves: bool, ours: Callable[[str], bool] = lambda name: False) -> Iterator[Path]:
    """Write a folder as a whole: the block gets another one, which is moved to ``path`` at its end. Collective.

    Where ``path`` exists and holds something else, which must not be lost, the block gets ``path`` itself. So it does
    where the ranks do not share the folder's disk.

    Args:
        path: the same on all ranks.
        moves: this rank moves the folder.
        ours: tells by its name whether an entry of ``path`` may be replaced.
    """
    path = Path(os.path.realpath(path))
    on_one_rank(moves, lambda: recover(path))
    if not true_on_all(_may_be_replaced(path, ours)):
        yield path
        return
    on_one_rank(moves, lambda: begin(path))
    if not true_on_all(staging_of(path).is_dir()):
        on_one_rank(moves, lambda: drop(path))
        yield path
        return
    yield staging_of(path)
    on_one_rank(moves, lambda: commit(path))


def _may_be_replaced(path: Path, ours: Callable[[str], bool]) -> bool:
    if not path.exists():
        return True
    return path.is_dir() and all(ours(each.name) for each in path.iterdir()) and not Path.cwd().is_relative_to(path)


def write_file(file: Path, text: str) -> None:
    """Write a small file as a whole."""
    new = file.with_name(f"{file.name}.requestzero_writing")
    with new.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, file)


def _replaced(path: Path) -> Path:
    return path.parent / _REPLACED / path.name


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; return false where the system or the file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    return int(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)) == 0


def _flush(folder: Path) -> None:
    """Wait until the files are on the disk, so that a machine that loses power has them too."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
