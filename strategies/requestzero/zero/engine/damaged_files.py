"""Damaged files of a checkpoint, found before anything of it is used."""

from __future__ import annotations

from pathlib import Path
from zipfile import BadZipFile, ZipFile, is_zipfile

from requestzero.zero.window_checkpoint.record import SavedWindow
from requestzero.zero.window_checkpoint.sums import check_file


def check_files(folder: Path, rank: int, ranks: int, with_window: bool) -> None:
    """Compare the checksums in this rank's share of a checkpoint's files.

    PyTorch writes checksums and does not read them, so that a changed bit would be a changed weight. Files of another
    format than that of ``torch.save``, without an end, or without checksums
    (``torch.serialization.set_crc32_options(False)`` writes zeros) are left to what reads them.

    Args:
        folder: of the checkpoint.
        rank: of this process among those that share the folder.
        ranks: their number.
        with_window: also look at the files with the sums of the open window.

    Raises:
        ValueError: a file is damaged.
    """
    for file in sorted(folder.glob("*.pt"))[rank::ranks]:
        _check_archive(file)
    if with_window:
        _check_window(folder, rank, ranks)


def _check_archive(file: Path) -> None:
    part = _damaged_part(file) if is_zipfile(file) else None
    if part is not None:
        raise ValueError(
            f"{file} is damaged (the checksum of {part} differs): load an older checkpoint, as "
            "load_checkpoint(folder, tag=...) does, or delete this one."
        )


def _check_window(folder: Path, rank: int, ranks: int) -> None:
    saved = SavedWindow.read(folder)
    if saved is not None:
        for number in range(rank, saved.data_parallel_ranks, ranks):
            check_file(folder, number, saved.ranks[number].checksum)


def _damaged_part(file: Path) -> str | None:
    try:
        with ZipFile(file) as archive:
            has_checksums = any(member.CRC for member in archive.infolist())
            return archive.testzip() if has_checksums else None
    except (BadZipFile, NotImplementedError, RuntimeError) as error:  # a changed bit may ask for another format
        return str(error)
