"""The sums of an open window in a checkpoint: one safetensors file per data-parallel rank.

Each holds what the rank owns, by the parameters' names, flat. The file's metadata says which part of the parameter that
is: ``starts`` (its first element) and ``numels`` (elements of the whole parameter), both as JSON by name.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file


class OwnedPart(NamedTuple):
    """What a rank owns of a parameter's sum."""

    name: str
    """Of the parameter."""
    start: int
    """The part's first element within the flat parameter."""
    whole: int
    """Elements of the parameter."""
    values: torch.Tensor
    """Flat, on any device."""


class _Stretch(NamedTuple):
    file: Any
    start: int
    end: int


def file_of(folder: Path, rank: int) -> Path:
    """Return the path of a data-parallel rank's file."""
    return folder / f"requestzero_window_rank_{rank:05d}.safetensors"


def write(folder: Path, rank: int, parts: Iterable[OwnedPart], dtype: torch.dtype) -> int:
    """Write a rank's file; return its checksum, which safetensors has none of.

    Args:
        folder: of the checkpoint.
        rank: data-parallel rank.
        parts: of the rank.
        dtype: of the accumulation, in which parts are written that it holds exactly; others as they are.
    """
    starts, numels, tensors = {}, {}, {}
    for part in parts:
        starts[part.name], numels[part.name] = part.start, part.whole
        tensors[part.name] = _exactly(part.values.detach(), dtype).cpu().contiguous().clone()
    file = file_of(folder, rank)
    save_file(tensors, file, {"starts": json.dumps(starts), "numels": json.dumps(numels)})
    return checksum_of(file)


def check_file(folder: Path, rank: int, checksum: int | None) -> None:
    """Compare a rank's file with the checksum in the record; ``None``: there is none.

    Raises:
        ValueError: the file is missing or damaged.
    """
    file = file_of(folder, rank)
    try:
        if checksum is not None and checksum_of(file) != checksum:
            raise _unreadable(file, "its checksum differs")
    except OSError as error:
        raise _unreadable(file, error) from error


def checksum_of(file: Path) -> int:
    """Return the CRC-32 of a file."""
    checksum = 0
    with file.open("rb") as content:
        while chunk := content.read(1 << 20):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _exactly(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = values.to(dtype)
    return cast if torch.equal(cast.to(values.dtype), values) else values


class SavedSums:
    """The sums in the open files of all ranks; see :func:`reading`."""

    def __init__(self, files: Sequence[Any], factor: float, own: int | None) -> None:
        self._own, self._factor = None if own is None else files[own], factor
        self._stretches: dict[str, list[_Stretch]] = {}
        for file in files:
            for name, start in json.loads(file.metadata()["starts"]).items():
                end = start + file.get_slice(name).get_shape()[0]
                self._stretches.setdefault(name, []).append(_Stretch(file, start, end))

    def is_own_part(self, name: str, start: int, numel: int) -> bool:
        """Return whether this rank has saved exactly this part of a parameter's sum."""
        own = [(each.start, each.end) for each in self._stretches.get(name, []) if each.file is self._own]
        return own == [(start, start + numel)]

    def read_into(self, target: torch.Tensor, name: str, start: int = 0) -> None:
        """Fill a flat tensor of any dtype and device with a part of a parameter's sum.

        Args:
            target: changed in place; its size says how many elements are read.
            name: of the parameter.
            start: first element within the flat parameter.

        Raises:
            ValueError: the files do not hold the whole part.
        """
        end, missing = start + target.numel(), target.numel()
        for each in self._stretches.get(name, []):
            first, last = max(start, each.start), min(end, each.end)
            if first < last:
                values = each.file.get_slice(name)[first - each.start : last - each.start]
                target[first - start : last - start].copy_(values if self._factor == 1.0 else values * self._factor)
                missing -= last - first
        if missing:
            raise ValueError(
                f"The checkpoint's open window lacks {missing} of the elements {start} to {end} of {name!r}: it was "
                "saved with other parameters. Load it without its window: load_checkpoint(..., discard_window=True)."
            )


@contextmanager
def reading(folder: Path, ranks: int, factor: float = 1.0, own: int | None = None) -> Iterator[SavedSums]:
    """Open the files of all ranks of a checkpoint; their sums are read when they are asked for.

    Args:
        folder: of the checkpoint.
        ranks: number of data-parallel ranks that have saved.
        factor: by which the sums are multiplied.
        own: number of the data-parallel rank that reads, where as many ranks have saved.

    Raises:
        ValueError: a file is missing or damaged.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(_open(file_of(folder, rank))) for rank in range(ranks)]
        yield SavedSums(files, factor, own)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, cause: object) -> ValueError:
    return ValueError(
        f"{file}, a part of the checkpoint's open window, cannot be read ({cause}): load another checkpoint, or this "
        "one without its window: load_checkpoint(..., discard_window=True)."
    )
