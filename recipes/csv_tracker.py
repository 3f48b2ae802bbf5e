"""A tracker for Accelerate that writes a CSV file: one line for each ``accelerator.log``."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, on_main_process


class CsvTracker(GeneralTracker):
    """Writes ``metrics.csv``; the first line logged decides its columns. A resumed run goes on in its own file."""

    name = "csv"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, directory: Path) -> None:
        super().__init__()
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / "metrics.csv").open("w", newline="")
        self._writer: Any = None

    @property
    def tracker(self) -> Any:
        """The open file, which ``accelerator.get_tracker("csv", unwrap=True)`` returns."""
        return self._file

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Do nothing: the configuration lies beside the file already."""

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write one line."""
        row = {"step": step, **values}
        if self._writer is None:
            self._writer = csv.DictWriter(self._file, list(row))
            self._writer.writeheader()
        self._writer.writerow(row)
        self._file.flush()

    @on_main_process
    def finish(self) -> None:
        """Close the file."""
        self._file.close()
