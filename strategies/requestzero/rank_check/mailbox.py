"""Messages between ranks where no collective can be trusted any more, in the process group's store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from requestzero.rank_check.rank_report import RankReport


class Mailbox:
    """Reports of ranks that wait, and the result: the text of the error that all ranks raise, set once.

    Nothing is read or written while no rank waits for more than a second. Reports are shared by all engines of the same
    ranks: a rank waits in one of them at a time. Every engine has a result of its own.

    Args:
        name: of the engine, the same on all ranks of the group: prefix of its keys in the store.
        ranks: name of the group's ranks, the same for all their engines: prefix of what these share.
        rank: of this process in the group.
        world_size: ranks of the group.
    """

    def __init__(self, name: str, ranks: str, rank: int, world_size: int) -> None:
        self._name, self._rank, self._world_size = name, rank, world_size
        self._store, self._shared = _prefixed(name), _prefixed(ranks)
        self._published: RankReport | None = None
        self._waits = 0
        self._acknowledged = self._left = False

    def publish(self, report: RankReport) -> None:
        """Publish what this rank waits for."""
        self._waits += 1
        report = replace(report, engine=self._name, wait=self._waits)
        self._shared.set(f"report/{self._rank}", report.dump())
        if self._published is None:
            self._shared.add("waiting", 1)
        self._published = report

    def confirm(self) -> None:
        """Let the others know that this rank still waits where it has published."""
        self._shared.add(f"looks/{self._rank}", 1)

    def withdraw(self) -> None:
        """Withdraw the report: this rank waits no more."""
        if self._published is not None:
            self._published = None
            self._shared.set(f"report/{self._rank}", "")
            self._shared.add("waiting", -1)

    def retire(self) -> None:
        """Keep the report for this engine alone, and for good: it has ended in an error, and others go on."""
        if self._published is not None:
            self._keep(self._published)
            self.withdraw()

    def leave(self, report: RankReport) -> None:
        """Publish for good why this rank will wait in this engine no more, nor for its result."""
        self._keep(replace(report, engine=self._name))
        if not self._acknowledged:
            self._acknowledged = True
            self._store.add("needs no result", 1)

    def _keep(self, report: RankReport) -> None:
        self._store.set(f"left/{self._rank}", report.dump())
        if not self._left:
            self._left = True
            self._store.add("left", 1)

    def all_wait(self) -> bool:
        """Return true if every rank may have published a report, here or in another engine; :meth:`reports` says it."""
        return bool(self._shared.add("waiting", 0) + self._store.add("left", 0) >= self._world_size)

    def reports(self) -> list[RankReport | None]:
        """Return the reports of all ranks, by rank; ``None`` for those that do not wait."""
        return [self._report(rank) for rank in range(self._world_size)]

    def _report(self, rank: int) -> RankReport | None:
        waiting = _read(self._shared, f"report/{rank}")
        if waiting:
            return replace(RankReport.parse(waiting), looks=int(self._shared.add(f"looks/{rank}", 0)))
        left = _read(self._store, f"left/{rank}")
        return RankReport.parse(left) if left else None

    def result(self) -> str | None:
        """Return the result, if a rank has set it."""
        return _read(self._store, "result") or None

    def set_result(self, text: str, engines: Iterable[str] = ()) -> str:
        """Set the result, of other ``engines`` too, unless a rank has set it; return the one that holds here."""
        for name in set(engines) - {self._name}:
            _prefixed(name).compare_set("result", "", text)
        return bytes(self._store.compare_set("result", "", text)).decode()

    def wait_for_result(self, seconds: float) -> str | None:
        """Return the result once another rank has set it; ``None`` if none has within so many seconds."""
        try:
            self._store.wait(["result"], timedelta(seconds=seconds))
        except RuntimeError:
            return None
        return self.result()

    def acknowledge(self, result: str) -> None:
        """Note that this rank has the result."""
        if not self._acknowledged:
            self._acknowledged = True
            self._shared.add(_acknowledgements(result), 1)

    def all_acknowledged(self, result: str) -> bool:
        """Return true if no rank needs the store any more."""
        others = self._store.add("needs no result", 0)
        return bool(self._shared.add(_acknowledgements(result), 0) + others >= self._world_size)


def _prefixed(name: str) -> dist.Store:
    return dist.PrefixStore(name, _get_default_store())


def _read(store: dist.Store, key: str) -> str:
    """Return the value of ``key``, empty where nobody has set it."""
    return store.get(key).decode() if store.check([key]) else ""


def _acknowledgements(result: str) -> str:
    return f"acknowledged/{hashlib.blake2b(result.encode(), digest_size=8).hexdigest()}"
