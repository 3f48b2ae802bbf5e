"""The record of an open window in a checkpoint: ``requestzero_window.json``, which is written last.

A checkpoint without it was saved between windows, or by DeepSpeed itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from requestzero.data.micro_batch import RequestId

FILE = "requestzero_window.json"
FORMAT = 1


@dataclass(frozen=True)
class SavedRank:
    """What one data-parallel rank knows of its window."""

    micro_batches: int
    requests: int
    request_ids: list[RequestId]
    reported_weights: int
    weight_on_host: float
    weight_on_device: float | None
    checked: int
    dropped: list[dict[str, Any]]
    """Fields of every ``DroppedRequest``."""
    edited: bool
    """A user has set a gradient in the window."""
    unused: list[str]
    """Names of owned parameters without a gradient, where that is known."""
    norms: dict[str, float]
    """Norms of owned parts of parameters that were computed in backwards, by the parameter's name."""
    origin: dict[str, Any] | None
    """What is known of a gradient that is not finite (``overflow.on_overflow="raise"``)."""
    shared_out: bool = False
    """See ``UpdateWindow.shared_out``."""
    checksum: int | None = None
    """CRC-32 of the file with the rank's sums, where there is one."""


@dataclass(frozen=True)
class SavedWindow:
    """An open window, of all ranks."""

    stage: int
    offload: bool
    accumulation_dtype: str
    loss_scale: float
    """The factor that the sums contain."""
    has_sums: bool
    """False where every request was dropped."""
    requestzero_version: str
    deepspeed_version: str
    ranks: list[SavedRank] = field(default_factory=list)
    """By data-parallel rank."""

    @property
    def data_parallel_ranks(self) -> int:
        """Number of ranks that have saved."""
        return len(self.ranks)

    def write(self, folder: Path) -> None:
        """Write the file into the folder of a checkpoint."""
        content = {"format": FORMAT, "data_parallel_ranks": self.data_parallel_ranks, **asdict(self)}
        (folder / FILE).write_text(json.dumps(content, indent=1))

    @classmethod
    def read(cls, folder: Path) -> SavedWindow | None:
        """Return the record of a checkpoint; ``None`` where no window was open.

        Raises:
            ValueError: the file is not one that this version can read.
        """
        file = folder / FILE
        if not file.is_file():
            return None
        try:
            return cls._of(json.loads(file.read_text()))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{file} cannot be read ({error}): it is damaged, or a later version of requestzero has written it. "
                "Update requestzero, load another checkpoint, or load this one without its open window: "
                "load_checkpoint(..., discard_window=True)."
            ) from error

    @classmethod
    def _of(cls, content: Mapping[str, Any]) -> SavedWindow:
        content = dict(content)
        found = content.pop("format")
        if found != FORMAT:
            raise ValueError(f"format {found!r}, and this version reads format {FORMAT}")
        ranks = [SavedRank(**each) for each in content.pop("ranks")]
        if content.pop("data_parallel_ranks") != len(ranks):
            raise ValueError("the number of ranks is not that of their records")
        return cls(**content, ranks=ranks)
