"""The report of a rank that waits or cannot go on, for the other ranks to read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from requestzero.rank_check.intent import Intent


@dataclass(frozen=True)
class RankReport:
    """An intent in the form that is sent to other ranks."""

    place: list[int]
    text: str
    parameters: list[str] | None = None
    """Names of the parameters whose gradients this backward has reduced so far, in order."""
    window: int = 0
    """Micro-batches of the open update window."""
    engine: str = ""
    """Name of the engine whose check waits, the same on all ranks."""
    wait: int = 0
    """Number of the wait among those that the rank has reported in this engine: the same may come again."""
    looks: int | None = None
    """Times that the rank has looked for the others while it waited, here and before; ``None``: it waits no more."""

    @classmethod
    def of(cls, intent: Intent, parameters: list[str] | None = None) -> RankReport:
        """Return the report of ``intent``."""
        return cls(intent.place(), intent.text, parameters, intent.window)

    @classmethod
    def parse(cls, text: str) -> RankReport:
        """Return the report that :meth:`dump` has written."""
        return cls(**json.loads(text))

    def dump(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))
