"""A loader that deals out the items of each request to the data-parallel ranks, equally many micro-batches on each."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from requestzero.config.validation import check_count
from requestzero.data.labels import mask_labels
from requestzero.data.micro_batch import MicroBatch
from requestzero.data.micro_batch_loader import Cursor, MicroBatchLoader
from requestzero.data.request_split import count_micro_batches, split_request


@dataclass(frozen=True)
class _Cursor(Cursor):
    """Position: whole requests of an epoch that were yielded, and micro-batches of the request after them."""

    requests: int = 0
    micro_batches: int = 0


class RequestLoader(MicroBatchLoader[_Cursor]):
    """Loader that yields requests as :class:`~requestzero.MicroBatch`, with the ends of requests marked.

    The items of a request are shared by all data-parallel ranks: in each micro-batch up to
    ``micro_batch_size`` of them go to each rank, in the request's order, dealt out one by one. Every rank
    yields the same number of micro-batches, which ZeRO-2 needs, since it reduces in every backward. A rank
    for which a request's last round has no item runs a *filler*: the request's first item, made to have a
    loss of exactly zero (see ``filler``), with ``weight=0.0``.

    The order of the requests follows from ``(seed, epoch)`` alone, so it is the same on all ranks. There is no
    communication, and there are no worker processes: ``collate`` runs when a micro-batch is asked for. Passes
    and checkpoints: see :class:`~requestzero.data.micro_batch_loader.MicroBatchLoader`. Where texts differ much in
    length, :class:`~requestzero.PlannedLoader` balances the ranks by tokens.

    Args:
        requests: The dataset. ``requests[i]`` is a sequence of one or more items; an item is whatever
            ``collate`` takes, such as a tokenized sequence.
        collate: Turns a list of 1 to ``micro_batch_size`` items into the model's inputs.
        micro_batch_size: Maximum number of items per rank and micro-batch.
        ids: A unique name (``str`` or ``int``) for each request; by default its position.
        filler: Turns ``collate([item])`` into inputs with a loss of exactly zero; by default
            :func:`~requestzero.data.labels.mask_labels` sets all labels to -100.
        weight: Weight of a micro-batch, from its inputs, for normalizations that use it; by default its
            number of items. :func:`~requestzero.data.labels.count_trained` counts trained tokens.
        requests_per_update: Also mark the end of every update window, of so many requests. ``None`` leaves
            that to the training loop. Requests left over at an epoch's end stay an open window, which the
            training loop steps or drops.
        shuffle: Shuffle the requests in each epoch; items never are.
        seed: Chooses the order.
        rank: Data-parallel rank. Without ``rank`` and ``world_size``, ``torch.distributed`` is asked when
            they are needed (rank 0 of 1 where it is not initialized).
        world_size: Number of data-parallel ranks.

    Raises:
        ValueError: no requests, an empty request, ids that are not unique or not as many as requests, a
            number out of its range.
    """

    def __init__(
        self,
        requests: Sequence[Sequence[Any]],
        collate: Callable[[list[Any]], Any],
        *,
        micro_batch_size: int = 1,
        ids: Sequence[str | int] | None = None,
        filler: Callable[[Any], Any] = mask_labels,
        weight: Callable[[Any], float] | None = None,
        requests_per_update: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        check_count("micro_batch_size", micro_batch_size, owner="RequestLoader")
        check_count("requests_per_update", requests_per_update, owner="RequestLoader")
        super().__init__(_Cursor(), rank, world_size)
        self.requests = requests
        self.ids = range(len(requests)) if ids is None else ids
        self.collate = collate
        self.filler = filler
        self.weight = weight
        self.micro_batch_size = micro_batch_size
        self.requests_per_update = requests_per_update
        self.shuffle = shuffle
        self.seed = seed
        self._lengths = [len(request) for request in requests]
        _check_requests(self._lengths, self.ids)

    def __len__(self) -> int:
        """Return the micro-batches per epoch and rank; the same on every rank and in every epoch."""
        _, world_size = self._ranks()
        return sum(count_micro_batches(items, world_size, self.micro_batch_size) for items in self._lengths)

    def _rest_of_epoch(self) -> Iterator[MicroBatch]:
        order = self._order()
        for place in range(self._cursor.requests, len(order)):
            yield from self._request(order[place], place)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass continue where ``state_dict`` was taken.

        Raises:
            ValueError: the state is of other requests, another seed or order, or was taken within a request
                that was split for another number of ranks or another ``micro_batch_size``.
        """
        self._check_data(state_dict)
        cursor = _Cursor(state_dict["epoch"], state_dict["requests"], state_dict["micro_batches"])
        if cursor.micro_batches and state_dict["split"] != self._split():
            raise ValueError(
                f"The loader's state was saved within a request that was split for {state_dict['split']}; it "
                f"cannot be continued with {self._split()}. Resume with the same numbers, or from a state "
                "saved at a request's end."
            )
        self._place(cursor)

    def _request(self, index: int, place: int) -> Iterator[MicroBatch]:
        """Yield the rest of request ``index``, the ``place``-th of the epoch."""
        items = self.requests[index]
        if len(items) != self._lengths[index]:
            raise ValueError(
                f"Request {self.ids[index]!r} at position {index} has {len(items)} items now and had "
                f"{self._lengths[index]} when the loader was made: a request must keep its length."
            )
        shares = split_request(len(items), *self._ranks(), self.micro_batch_size)
        for position in range(self._cursor.micro_batches, len(shares)):
            last = position == len(shares) - 1
            inputs, weight = self._inputs([items[item] for item in shares[position]], items[0])
            self._cursor = _Cursor(self.epoch, *((place + 1, 0) if last else (place, position + 1)))
            yield MicroBatch(inputs, last, self._ends_window(place, last), weight, self.ids[index], len(shares))

    def _inputs(self, items: list[Any], first: Any) -> tuple[Any, float]:
        if not items:
            return self.filler(self.collate([first])), 0.0
        inputs = self.collate(items)
        return inputs, float(len(items)) if self.weight is None else self.weight(inputs)

    def _ends_window(self, place: int, request_end: bool) -> bool | None:
        if self.requests_per_update is None:
            return None
        return request_end and (place + 1) % self.requests_per_update == 0

    def _order(self) -> list[int]:
        order = list(range(len(self.requests)))
        if self.shuffle:
            random.Random(f"{self.seed}-{self.epoch}").shuffle(order)
        return order

    def _split(self) -> dict[str, int]:
        return {"world_size": self._ranks()[1], "micro_batch_size": self.micro_batch_size}

    @cached_property
    def _fingerprint(self) -> str:
        """Digest that differs where the order of requests, their names or their lengths do."""
        digest = hashlib.sha256(repr(self.seed if self.shuffle else "in order").encode())
        for name, items in zip(self.ids, self._lengths, strict=True):
            digest.update(f"{name!r} {items}\n".encode())
        return digest.hexdigest()


def _check_requests(lengths: list[int], ids: Sequence[str | int]) -> None:
    if not lengths:
        raise ValueError("RequestLoader got no requests: give a dataset with at least one.")
    if len(ids) != len(lengths):
        raise ValueError(f"RequestLoader got {len(ids)} ids for {len(lengths)} requests: give one for each.")
    seen: dict[str | int, int] = {}
    for position, (name, items) in enumerate(zip(ids, lengths, strict=True)):
        if items == 0:
            raise ValueError(f"Request {name!r} at position {position} is empty: leave it out.")
        first = seen.setdefault(name, position)
        if first != position:
            raise ValueError(
                f"Request id {name!r} is given twice, at positions {first} and {position}: make ids unique."
            )
