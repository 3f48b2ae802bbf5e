"""What ranks tell each other where no collective can be trusted any more, in the process group's store."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from requestzero.rank_check.statement import Account


class Board:
    """Accounts of ranks that wait, and the verdict, which is the first that any rank gives.

    Nothing is read or written while all goes well.
    """

    def __init__(self, name: str, rank: int, world_size: int) -> None:
        self._store = dist.PrefixStore(name, _get_default_store())
        self._rank, self._world_size = rank, world_size
        self._published = self._acknowledged = False

    def publish(self, account: Account) -> None:
        """Say what this rank waits for."""
        self._store.set(f"account/{self._rank}", account.dump())
        if not self._published:
            self._published = True
            self._store.add("waiting", 1)

    def withdraw(self) -> None:
        """This rank waits no more."""
        self._store.set(f"account/{self._rank}", "")
        if self._published:
            self._published = False
            self._store.add("waiting", -1)

    def all_wait(self) -> bool:
        """Whether every rank has published an account."""
        return bool(self._store.add("waiting", 0) == self._world_size)

    def accounts(self) -> list[Account | None]:
        """Of all ranks, by rank; ``None`` for those that do not wait."""
        return [self._account(rank) for rank in range(self._world_size)]

    def _account(self, rank: int) -> Account | None:
        key = f"account/{rank}"
        text = self._store.get(key).decode() if self._store.check([key]) else ""
        return Account.parse(text) if text else None

    def verdict(self) -> str | None:
        """What a rank has decided, if one has."""
        return self._store.get("verdict").decode() if self._store.check(["verdict"]) else None

    def decide(self, text: str) -> str:
        """Give a verdict; returns the one that holds, which is the first."""
        return bytes(self._store.compare_set("verdict", "", text)).decode()

    def wait_for_verdict(self, seconds: float) -> str | None:
        """The verdict, once another rank has given it within so many seconds."""
        try:
            self._store.wait(["verdict"], timedelta(seconds=seconds))
        except RuntimeError:
            return None
        return self.verdict()

    def acknowledge(self) -> None:
        """This rank knows the verdict, or needs to know none."""
        if not self._acknowledged:
            self._acknowledged = True
            self._store.add("know", 1)

    def all_know(self) -> bool:
        """Whether every rank has acknowledged the verdict."""
        return bool(self._store.add("know", 0) >= self._world_size)
