"""What a rank leaves behind for the process that has started it: lines of JSON, written at once."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Journal:
    """The record that one rank writes.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self.updates = 0
        """Updates that are done."""
        self.place = 0
        """Requests that have come."""
        self.has_started = False
        self.engine: Any = None
        """The engine that trains, once it is built."""

    def started(self, place: int, updates: int) -> None:
        """Note that the training starts after so many requests, and updates."""
        self.place, self.updates, self.has_started = place, updates, True
        self._write("started", place)

    def request_ended(self) -> None:
        """Note that one more request has come, applied or not."""
        self.place += 1

    def updated(self, engine: Any) -> None:
        """Note the state after every update that the engine has applied since the last call."""
        if engine.applied_updates > self.updates:
            self.updates = engine.applied_updates
            self._write("updated", [self.updates, digest(engine)])

    def saved(self) -> None:
        """Note that a checkpoint is complete."""
        self._write("saved", self.place)

    def injected(self) -> None:
        """Note that the fault is about to happen."""
        self._write("injected", self.place)

    def failed(self, error: BaseException, refuses: bool) -> None:
        """Note the error that has ended the training, and if the engine refuses to go on."""
        self._write("failed", [type(error).__name__, str(error), refuses])

    def ended(self) -> None:
        """Note that the training has come to its end."""
        self._write("ended", self.place)

    def _write(self, event: str, value: Any) -> None:
        self._file.write(json.dumps([event, value]) + "\n")


@dataclass
class Record:
    """The record of one rank, read."""

    started: int | None = None
    updates: dict[int, str] = field(default_factory=dict)
    saved: int = 0
    injected: bool = False
    error: str | None = None
    text: str = ""
    refuses: bool = False
    ended: bool = False

    @classmethod
    def read(cls, path: Path) -> Record:
        """Return the record in a file; an empty one without it."""
        record = cls()
        for line in path.read_text().splitlines() if path.exists() else ():
            event, value = json.loads(line)
            if event == "started":
                record.started = value
            elif event == "updated":
                record.updates[value[0]] = value[1]
            elif event == "saved":
                record.saved = value
            elif event == "failed":
                record.error, record.text, record.refuses = value
            else:
                setattr(record, event, True)
        return record


def digest(engine: Any) -> str:
    """Return a digest of this rank's weights, master weights and optimizer state."""
    import torch

    optimizer = engine.optimizer
    masters = getattr(optimizer, "fp32_partitioned_groups_flat", None) or optimizer.single_partition_of_fp32_groups
    states = [value for master in masters for value in optimizer.optimizer.state[master].values()]
    found = hashlib.sha256()
    weights = [getattr(param, "ds_tensor", param) for param in engine.module.parameters()]  # at stage 3 a part
    for tensor in [*weights, *masters, *filter(torch.is_tensor, states)]:
        found.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
