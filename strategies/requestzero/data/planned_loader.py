"""A dataset of requests as micro-batches under a token budget, the ranks balanced over each update window."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from requestzero.config.validation import check, check_count
from requestzero.data.labels import count_trained, mask_labels
from requestzero.data.micro_batch import MicroBatch
from requestzero.data.micro_batch_loader import Cursor, MicroBatchLoader
from requestzero.data.planned_dataset import PlannedDataset, count_tokens, truncate_item
from requestzero.planning import BadRequestPolicy, Budget, MicroBatchPlan, Planner, PlanStatistics, WindowRule
from requestzero.planning.bad_requests import ON_BAD_REQUEST
from requestzero.planning.unique_ids import repeated_places

_OWN = {
    "dataset",
    "sampler",
    "batch_sampler",
    "batch_size",
    "shuffle",
    "collate_fn",
    "drop_last",
    "generator",
    "persistent_workers",
}
_SAMPLES = 1000
"""Maximum number of requests that a state's fingerprint includes."""

PerRequest = Callable[[int], Sequence[int]] | Sequence[Sequence[int]]
"""Numbers of each text of a request: ``f(index)`` or ``f[index]``."""


@dataclass(frozen=True)
class _Cursor(Cursor):
    """Position: whole windows of an epoch that were yielded, and micro-batches of the window after them."""

    place: int = 0
    """Place of the window's first request in the epoch's order."""
    micro_batches: int = 0


@dataclass(frozen=True)
class _Handed:
    """A planned micro-batch, and the loader's position after it."""

    plan: MicroBatchPlan
    cursor: _Cursor
    statistics: PlanStatistics | None
    """Of the window that it ends; ``None`` where it ends none."""


class PlannedLoader(MicroBatchLoader[_Cursor]):
    """Loader that cuts requests into micro-batches under a token budget, balanced over the ranks in each update window.

    It yields :class:`~requestzero.MicroBatch`. Every request is shared by all data-parallel ranks in as few
    micro-batches as the token budget allows, the same number on every rank, and the ranks' loads over an update window
    are as even as its texts allow (see :mod:`requestzero.planning`). Where a request has fewer texts than there are
    micro-batches, the others are fillers: its shortest text, made to have a loss of exactly zero (see ``filler``), with
    ``weight=0.0``.

    Order and plan follow from ``(seed, epoch)`` and the number of ranks, so all ranks plan the same; there is no
    communication. One window is planned at a time: the memory does not grow with the dataset.

    Args:
        requests: the dataset. ``requests[i]`` is a sequence of texts; a text is whatever ``collate`` takes.
        collate: turns a list of texts into the model's inputs, such as
            :class:`~requestzero.data.collate.PaddedCollate` or :class:`~requestzero.data.collate.PackedCollate`.
        tokens_per_micro_batch: tokens that a micro-batch may make the model compute: with ``layout="padded"`` its
            rows times the longest, with ``"packed"`` their sum.
        max_sequences: maximum number of texts per rank and micro-batch, in addition to the token budget.
        layout: layout of what ``collate`` returns: ``"padded"`` or ``"packed"``. By default ``collate.layout``, or
            padded where there is none, which never makes a packed micro-batch too large.
        cost: cost of a text of so many tokens, above 0 and rising, by which the ranks are balanced; by default its
            tokens.
        lengths: tokens of each text of request ``i``: ``lengths(i)`` or ``lengths[i]``. By default
            ``len(text["input_ids"])`` where a text is a mapping, else ``len(text)``.
        trainable: tokens of each text that are trained on, in the same form, so that requests without any are found.
        ids: a unique name (``str`` or ``int``) for each request; by default its index. Given names are compared once,
            when the loader is made, which takes 8 bytes for each meanwhile.
        requests_per_update: a window is so many requests, and its end is marked.
        tokens_per_update: a window ends with the request that completes so many tokens, over all ranks. Without
            either, the training loop counts requests, and each is balanced by itself. Requests left over at an
            epoch's end stay an open window, which the training loop steps or drops.
        on_long_text: a text beyond ``tokens_per_micro_batch``: ``"error"``, ``"truncate"`` (its first tokens),
            ``"own_micro_batch"`` (alone, beyond the budget) or ``"skip"`` (the text).
        on_empty_request: a request without texts, or a text without tokens: ``"error"`` or ``"skip"``.
        on_untrainable_request: a request without a token to train on: ``"error"`` or ``"skip"``.
        on_duplicate_id: a name for the second time: ``"error"`` or ``"skip"`` (the later request).
        filler: turns ``collate([text])`` into inputs with a loss of exactly zero.
        weight: of a micro-batch, from its inputs; by default the number of labels that are trained on.
        truncate: ``truncate(text, tokens)`` returns the first ``tokens`` tokens of a text; by default it slices the
            text, or each value of a mapping.
        equal_micro_batches: false: a rank runs no fillers, and no request of which it has no text, except for one
            filler where it would have nothing in a whole window. For windows that are marked, and an engine with
            ``rank_dependent_micro_batches``, whose ranks need not run equally many.
        naive_sequences: fixed number of texts per rank and micro-batch with which :attr:`statistics` compare the plan;
            by default ``max_sequences``, or as many as make the planned number of micro-batches.
        shuffle: shuffle the requests in each epoch.
        seed: chooses the order.
        rank: data-parallel rank. Without ``rank`` and ``world_size``, ``torch.distributed`` is asked when they are
            needed (rank 0 of 1 where it is not initialized).
        world_size: number of data-parallel ranks.
        **data_loader_options: of a torch ``DataLoader`` that collates, such as ``num_workers``, ``prefetch_factor``
            or ``pin_memory``. Planning stays in this process, so order and state do not depend on them.

    Raises:
        ValueError: no requests, ids that are not unique or not as many as requests, an argument out of its range.
            A bad request is an error when it is planned, on all ranks; ``len(loader)`` plans all of them.
    """

    def __init__(
        self,
        requests: Sequence[Sequence[Any]],
        collate: Callable[[list[Any]], Any],
        *,
        tokens_per_micro_batch: int,
        max_sequences: int | None = None,
        layout: str | None = None,
        cost: Callable[[int], float] | None = None,
        lengths: PerRequest | None = None,
        trainable: PerRequest | None = None,
        ids: Sequence[str | int] | None = None,
        requests_per_update: int | None = None,
        tokens_per_update: int | None = None,
        on_long_text: str = "error",
        on_empty_request: str = "error",
        on_untrainable_request: str = "error",
        on_duplicate_id: str = "error",
        filler: Callable[[Any], Any] = mask_labels,
        weight: Callable[[Any], float] = count_trained,
        truncate: Callable[[Any, int], Any] = truncate_item,
        equal_micro_batches: bool = True,
        naive_sequences: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        **data_loader_options: Any,
    ) -> None:
        super().__init__(_Cursor(), rank, world_size)
        check_count("naive_sequences", naive_sequences)
        _check_options(data_loader_options)
        self.requests = requests
        self.ids = range(len(requests)) if ids is None else ids
        self.planner = Planner(
            size=len(requests),
            lengths=self._lengths_of_texts if lengths is None else _function(lengths),
            budget=Budget(tokens_per_micro_batch, max_sequences, _layout_of(collate, layout), cost),
            windows=WindowRule(requests_per_update, tokens_per_update),
            trainable=None if trainable is None else _function(trainable),
            name=self.ids.__getitem__,
            policy=BadRequestPolicy(on_long_text, on_empty_request, on_untrainable_request),
            left_out=_check_ids(self.ids, len(requests), on_duplicate_id),
            naive_sequences=naive_sequences,
            shuffle=shuffle,
            seed=seed,
        )
        self.dataset = PlannedDataset(requests, collate, filler, weight, truncate, tokens_per_micro_batch)
        self.data_loader_options = data_loader_options
        self.equal_micro_batches = equal_micro_batches
        if not equal_micro_batches and not self.planner.windows.marks:
            raise ValueError(
                "PlannedLoader(equal_micro_batches=False) needs windows whose ends it marks, since ranks that run "
                "different requests cannot count them: give requests_per_update or tokens_per_update."
            )
        self.statistics = PlanStatistics()
        """Sums over the windows that were yielded completely, in the run that a state was loaded from too."""
        self._length: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the micro-batches per epoch and rank; the same on every rank and in every epoch.

        The first call for a number of ranks plans every request once, which takes as long as planning an epoch.

        Raises:
            ValueError: a bad request.
            TypeError: with ``equal_micro_batches=False``, where every rank and epoch has a number of its own.
        """
        if not self.equal_micro_batches:
            raise TypeError("PlannedLoader(equal_micro_batches=False) has no length: it differs by rank and epoch.")
        _, world_size = self._ranks()
        if world_size not in self._length:
            self._length[world_size] = self.planner.count_micro_batches(world_size)
        return self._length[world_size]

    def _rest_of_epoch(self) -> Iterator[MicroBatch]:
        handed: deque[_Handed] = deque()
        left_over: list[tuple[_Cursor, PlanStatistics]] = []
        for inputs, weight in self._loaded(self._plans(handed, left_over)):
            now = handed.popleft()
            self._cursor = now.cursor
            if now.statistics is not None:
                self.statistics += now.statistics
            plan = now.plan
            name = self.ids[plan.request]
            yield MicroBatch(inputs, plan.request_end, plan.window_end, weight, name, plan.micro_batches)
        if left_over:
            self._cursor, statistics = left_over.pop()
            self.statistics += statistics

    def _plans(
        self, handed: deque[_Handed], left_over: list[tuple[_Cursor, PlanStatistics]]
    ) -> Iterator[MicroBatchPlan]:
        """Yield this rank's plans from the cursor on.

        Args:
            handed: gets each plan with the position after it, since worker processes run ahead of the loader.
            left_over: gets the epoch's end and the last window's statistics where that window has skipped requests
                only.
        """
        rank, world_size = self._ranks()
        epoch, place, done = self._cursor.epoch, self._cursor.place, self._cursor.micro_batches
        for window in self.planner.epoch(epoch, world_size, place):
            plans = list(window.plan.micro_batches(rank, self.equal_micro_batches))
            count = len(plans)
            if count == 0:
                left_over.append((_Cursor(epoch, window.next_place), window.statistics))
            for number, plan in enumerate(plans, start=1):
                if number > done:
                    last = number == count
                    cursor = _Cursor(epoch, window.next_place) if last else _Cursor(epoch, place, number)
                    handed.append(_Handed(plan, cursor, window.statistics if last else None))
                    yield plan
            place, done = window.next_place, 0

    def _loaded(self, plans: Iterator[MicroBatchPlan]) -> Iterator[tuple[Any, float]]:
        """Yield inputs and weights of ``plans``, in their order."""
        if not self.data_loader_options:
            yield from map(self.dataset.__getitem__, plans)
            return
        import torch
        from torch.utils.data import DataLoader

        # A generator of its own: drawing the workers' seeds would change the training's random numbers.
        generator = torch.Generator().manual_seed(self.epoch)
        options = {**self.data_loader_options, "generator": generator}
        yield from DataLoader(self.dataset, sampler=plans, batch_size=None, **options)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the pass and its statistics, with the micro-batch last yielded counted as done.

        Plain values, the same on every rank; within a window not with ``equal_micro_batches=False``. Not collective.
        """
        return {**super().state_dict(), "statistics": self.statistics.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass continue where ``state_dict`` was taken, with any number of worker processes.

        At a window's end (without marked windows, a request's) also with another number of ranks or other limits:
        order and windows do not depend on them.

        Raises:
            ValueError: the state is of other requests, another seed or order; or it was taken within a window that
                was planned with other numbers.
        """
        self._check_data(state_dict)
        cursor = _Cursor(state_dict["epoch"], state_dict["place"], state_dict["micro_batches"])
        if cursor.micro_batches and state_dict["split"] != self._split():
            raise ValueError(
                f"The loader's state was saved after {cursor.micro_batches} micro-batches of a window that was planned "
                f"for {state_dict['split']}; with {self._split()} the rest of that window has other texts, so some "
                "would be trained on twice and some never. Resume with the same numbers, or from a state saved at a "
                "window's end."
            )
        self._place(cursor)
        self.statistics = PlanStatistics.from_state(state_dict["statistics"])

    def _split(self) -> dict[str, Any]:
        """Return everything beside its requests that a window's plan depends on."""
        budget, windows, policy = self.planner.budget, self.planner.windows, self.planner.policy
        return {
            "world_size": self._ranks()[1],
            "tokens_per_micro_batch": budget.tokens,
            "max_sequences": budget.sequences,
            "layout": budget.layout,
            "cost": None if budget.cost is None else getattr(budget.cost, "__qualname__", type(budget.cost).__name__),
            "requests_per_update": windows.requests,
            "tokens_per_update": windows.tokens,
            **({} if self.equal_micro_batches else {"equal_micro_batches": False}),
            **vars(policy),
        }

    @cached_property
    def _fingerprint(self) -> str:
        """Digest that differs where the order of requests would; it samples names and lengths of up to 1,000."""
        size = len(self.requests)
        digest = hashlib.sha256(repr((size, self.planner.seed if self.planner.shuffle else "in order")).encode())
        for index in range(0, size, -(-size // _SAMPLES)):
            digest.update(f"{self.ids[index]!r} {list(self.planner.lengths(index))}\n".encode())
        return digest.hexdigest()

    def _lengths_of_texts(self, index: int) -> list[int]:
        return [count_tokens(item) for item in self.requests[index]]


def _function(given: PerRequest) -> Callable[[int], Sequence[int]]:
    return given if callable(given) else given.__getitem__


def _layout_of(collate: Any, given: str | None) -> str:
    made = getattr(collate, "layout", None)
    if made is not None and given is not None and made != given:
        raise ValueError(
            f"PlannedLoader(layout={given!r}) is not allowed with {type(collate).__name__}, whose layout is {made!r}: "
            "leave layout out, or give the other collate."
        )
    return made or given or "padded"


def _check_options(options: dict[str, Any]) -> None:
    refused = sorted(_OWN & options.keys())
    if refused:
        raise ValueError(
            f"PlannedLoader({refused[0]}=...) is not allowed: the loader itself decides that. Of a DataLoader, give "
            "options such as num_workers, prefetch_factor or pin_memory."
        )


def _check_ids(ids: Sequence[str | int], size: int, on_duplicate_id: str) -> frozenset[int]:
    """Return the indices of requests that are left out since an earlier one has their id."""
    check("on_duplicate_id", on_duplicate_id, ON_BAD_REQUEST)
    if size == 0:
        raise ValueError("PlannedLoader got no requests: give a dataset with at least one.")
    if len(ids) != size:
        raise ValueError(f"PlannedLoader got {len(ids)} ids for {size} requests: give one for each.")
    repeated = repeated_places(ids)
    if repeated and on_duplicate_id == "error":
        place, first = next(iter(repeated.items()))
        raise ValueError(
            f"Request id {ids[place]!r} is given twice, at positions {first} and {place}: make ids unique, or use "
            "on_duplicate_id='skip' to leave the later request out."
        )
    return frozenset(repeated)
