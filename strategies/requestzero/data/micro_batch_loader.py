"""The base class of loaders of micro-batches: ranks, passes that are epochs, and positions to resume from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from requestzero.data.micro_batch import MicroBatch
from requestzero.data.ranks import check_ranks, distributed_ranks


@dataclass(frozen=True)
class Cursor:
    """Position in an epoch; loaders add fields for what they have yielded of it, with defaults for its start."""

    epoch: int = 0


C = TypeVar("C", bound=Cursor)


class MicroBatchLoader(ABC, Generic[C]):
    """Base class of loaders that yield :class:`~requestzero.MicroBatch`, equally many on every rank.

    Each pass over the loader is an epoch: passes count up from epoch 0, or :meth:`set_epoch` chooses. One pass at a
    time. Lightning saves and restores the loader with its checkpoints through :meth:`state_dict`, and leaves it as
    it is, whereas it puts a ``DistributedSampler`` into a torch ``DataLoader``; ``accelerator.prepare`` does what
    ``requests.micro_batches`` does.
    """

    def __init__(self, start: C, rank: int | None, world_size: int | None) -> None:
        self._given_ranks = check_ranks(type(self).__name__, rank, world_size)
        self._cursor: C = start
        # True while the next pass starts at the cursor, and not at the start of the epoch after it.
        self._placed = True

    @property
    def epoch(self) -> int:
        """The epoch of the current pass, or of the next one where that was chosen."""
        return self._cursor.epoch

    @property
    def sampler(self) -> MicroBatchLoader[C]:
        """The loader itself: Lightning calls ``loader.sampler.set_epoch(epoch)`` before every epoch."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass at the start of ``epoch``, or at the position of :meth:`load_state_dict` in it."""
        if not self._placed or epoch != self._cursor.epoch:
            self._place(type(self._cursor)(epoch))

    @abstractmethod
    def __len__(self) -> int:
        """Return the micro-batches per epoch and rank; the same on every rank and in every epoch."""

    def __iter__(self) -> Iterator[MicroBatch]:
        # A generator, so that the cursor is read after Lightning's set_epoch, which follows its iter().
        if not self._placed:
            self._cursor = type(self._cursor)(self._cursor.epoch + 1)
        self._placed = False
        yield from self._rest_of_epoch()

    @abstractmethod
    def _rest_of_epoch(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches after the cursor, which is moved before each of them is yielded."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the pass, with the micro-batch last yielded counted as done.

        Plain values, the same on every rank. Not collective.
        """
        return {**asdict(self._cursor), "split": self._split(), "data": self._fingerprint}

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass continue where ``state_dict`` was taken."""

    @abstractmethod
    def _split(self) -> dict[str, Any]:
        """Return everything beside the requests that decides which rank runs what."""

    @property
    @abstractmethod
    def _fingerprint(self) -> str:
        """Digest that differs where the order of requests would, and between kinds of loaders."""

    def _check_data(self, state_dict: dict[str, Any]) -> None:
        """Raise ValueError where the order of requests is another one than that of ``state_dict``."""
        if state_dict.get("data") != self._fingerprint:
            raise ValueError(
                "The loader's state was saved by another kind of loader, or with other requests, another seed or "
                "another value of shuffle, so its order of requests cannot be continued. Resume with the data and "
                "settings of that run."
            )

    def _place(self, cursor: C) -> None:
        self._cursor = cursor
        self._placed = True

    def _ranks(self) -> tuple[int, int]:
        return self._given_ranks or distributed_ranks()
