"""Messages between ranks where no collective can be trusted any more, in the process group's store."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from requestzero.rank_check.rank_report import RankReport


class Mailbox:
    """Reports of ranks that wait, and the result: the text of the error that all ranks raise, set once.

    Nothing is read or written while no rank waits for more than a second.

    Args:
        name: prefix of the keys in the store, the same on all ranks of the group.
        rank: of this process in the group.
        world_size: ranks of the group.
    """

    def __init__(self, name: str, rank: int, world_size: int) -> None:
        self._store = dist.PrefixStore(name, _get_default_store())
        self._rank, self._world_size = rank, world_size
        self._published = self._acknowledged = False

    def publish(self, report: RankReport) -> None:
        """Publish what this rank waits for."""
        self._store.set(f"report/{self._rank}", report.dump())
        if not self._published:
            self._published = True
            self._store.add("waiting", 1)

    def withdraw(self) -> None:
        """Withdraw the report: this rank waits no more."""
        self._store.set(f"report/{self._rank}", "")
        if self._published:
            self._published = False
            self._store.add("waiting", -1)

    def all_wait(self) -> bool:
        """Return true if every rank has published a report."""
        return bool(self._store.add("waiting", 0) == self._world_size)

    def reports(self) -> list[RankReport | None]:
        """Return the reports of all ranks, by rank; ``None`` for those that do not wait."""
        return [self._report(rank) for rank in range(self._world_size)]

    def _report(self, rank: int) -> RankReport | None:
        key = f"report/{rank}"
        text = self._store.get(key).decode() if self._store.check([key]) else ""
        return RankReport.parse(text) if text else None

    def result(self) -> str | None:
        """Return the result, if a rank has set it."""
        return self._store.get("result").decode() if self._store.check(["result"]) else None

    def set_result(self, text: str) -> str:
        """Set the result unless another rank has set it; return the one that holds."""
        return bytes(self._store.compare_set("result", "", text)).decode()

    def wait_for_result(self, seconds: float) -> str | None:
        """Return the result once another rank has set it; ``None`` if none has within so many seconds."""
        try:
            self._store.wait(["result"], timedelta(seconds=seconds))
        except RuntimeError:
            return None
        return self.result()

    def acknowledge(self) -> None:
        """Note that this rank has the result, or needs none."""
        if not self._acknowledged:
            self._acknowledged = True
            self._store.add("acknowledged", 1)

    def all_acknowledged(self) -> bool:
        """Return true if no rank needs the store any more."""
        return bool(self._store.add("acknowledged", 0) >= self._world_size)
