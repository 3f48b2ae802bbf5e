"""The result as JSON and CSV."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from requestzero.probe.result import Result


def write_json(result: Result, path: Path) -> None:
    """Write ``options``, ``machine`` and ``rows``, with everything that was measured."""
    document = {
        "options": result.options,
        "machine": asdict(result.machine),
        "rows": [row.record() for row in result.rows],
    }
    path.write_text(json.dumps(document, indent=2, allow_nan=True) + "\n", encoding="utf-8")


def write_csv(result: Result, path: Path) -> None:
    """Write one line a row, with the values of ``write_json`` by the same names; lists are left out."""
    records = [{k: v for k, v in row.record().items() if not isinstance(v, list)} for row in result.rows]
    names: dict[str, Any] = {}
    for record in records:
        names |= record
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(names))
        writer.writeheader()
        writer.writerows(records)
