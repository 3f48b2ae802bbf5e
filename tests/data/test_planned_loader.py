"""The loader: plans become micro-batches, with workers or without, and a pass can be continued anywhere."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from requestzero import MicroBatch, PlannedLoader, RequestLoader
from requestzero.data.collate import PackedCollate, PaddedCollate
from support.ranks import RankGroup

RNG = random.Random(0)
REQUESTS: list[list[list[int]]] = []
for number in range(9):
    texts = [RNG.choice([2, 3, 5, 8, 13]) for _ in range(1 + number * 3 % 8)]
    REQUESTS.append([[100 * number + place] * length for place, length in enumerate(texts)])


def first_tokens(texts: list[list[int]]) -> dict[str, Any]:
    return {"texts": [text[0] for text in texts], "labels": torch.ones(sum(map(len, texts)))}


def make_loader(rank: int = 0, world_size: int = 2, **options: Any) -> PlannedLoader:
    options = {"tokens_per_micro_batch": 26, "requests_per_update": 2, **options}
    return PlannedLoader(REQUESTS, first_tokens, rank=rank, world_size=world_size, **options)


def facts(batches: list[MicroBatch]) -> list[Any]:
    return [(b.inputs["texts"], b.weight, b.request_id, b.request_end, b.window_end, b.micro_batches) for b in batches]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_ranks_agree_on_everything_but_the_texts(world_size: int, layout: str) -> None:
    passes = [list(make_loader(rank, world_size, layout=layout)) for rank in range(world_size)]
    marks = [[entry[2:] for entry in facts(one)] for one in passes]
    assert all(other == marks[0] for other in marks)
    assert {len(one) for one in passes} == {len(make_loader(0, world_size, layout=layout))}
    real = [b for one in passes for b in one if b.weight]
    assert Counter(t for b in real for t in b.inputs["texts"]) == Counter(t[0] for r in REQUESTS for t in r)
    assert sum(b.weight or 0 for b in real) == sum(len(text) for request in REQUESTS for text in request)
    assert [b.window_end for b in passes[0] if b.request_end] == [False, True] * 4 + [False]


def test_a_filler_is_the_shortest_text_without_labels() -> None:
    fillers = [b for rank in range(3) for b in make_loader(rank, 3) if b.weight == 0]
    assert fillers
    for batch in fillers:
        (text,) = batch.inputs["texts"]
        assert min(map(len, REQUESTS[batch.request_id])) == len(REQUESTS[batch.request_id][text % 100])
        assert set(batch.inputs["labels"].tolist()) == {-100.0}


def test_the_order_follows_from_seed_and_epoch() -> None:
    def order(loader: PlannedLoader) -> list[Any]:
        return [b.request_id for b in loader if b.request_end]

    loader, same = make_loader(), make_loader()
    epochs = [order(loader) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    same.set_epoch(2)
    assert order(same) == epochs[2]
    assert order(make_loader(seed=1)) != epochs[0]
    assert order(make_loader(shuffle=False)) == list(range(9))


@pytest.mark.parametrize(
    "windows", [{}, {"requests_per_update": None}, {"requests_per_update": None, "tokens_per_update": 60}]
)
def test_a_state_continues_where_it_was_taken(windows: dict[str, Any]) -> None:
    whole = make_loader(**windows)
    expected = facts([batch for _ in range(2) for batch in whole])
    assert whole.statistics.requests == 18
    for taken in range(1, len(whole) + 1):
        interrupted = make_loader(**windows)
        done = [batch for _, batch in zip(range(taken), interrupted, strict=False)]
        resumed = make_loader(**windows)
        resumed.load_state_dict(interrupted.state_dict())
        resumed.set_epoch(0)  # as Lightning does when it resumes within an epoch
        rest = facts([batch for _ in range(2) for batch in resumed])
        assert facts(done) + rest == expected, f"after {taken}"
        assert resumed.statistics == whole.statistics


def test_worker_processes_change_nothing_and_may_change_in_a_pass() -> None:
    expected = facts(list(make_loader()))
    before = torch.get_rng_state()
    loader = make_loader(num_workers=2)
    taken = [batch for _, batch in zip(range(5), loader, strict=False)]
    state = loader.state_dict()
    assert facts(taken) == expected[:5]
    for workers in ({}, {"num_workers": 1, "prefetch_factor": 4}):
        resumed = make_loader(**workers)
        resumed.load_state_dict(state)
        assert facts(list(resumed)) == expected[5:]
    assert torch.equal(torch.get_rng_state(), before), "no random number of the training is used"


def at(micro_batches: int, **options: Any) -> dict[str, Any]:
    loader = make_loader(**options)
    for _ in zip(range(micro_batches), loader, strict=False):
        pass
    return loader.state_dict()


def test_another_number_of_ranks_can_go_on_at_a_windows_end_only() -> None:
    batches = list(make_loader())
    ends = [number for number, batch in enumerate(batches, start=1) if batch.window_end]
    within = next(number for number in range(1, len(batches)) if number not in ends)
    done = Counter(t for r in (0, 1) for b in list(make_loader(r))[: ends[1]] if b.weight for t in b.inputs["texts"])
    rest: Counter[int] = Counter()
    for rank in range(3):
        resumed = make_loader(rank, 3)
        resumed.load_state_dict(at(ends[1]))
        rest += Counter(t for b in resumed if b.weight for t in b.inputs["texts"])
    assert done + rest == Counter(text[0] for request in REQUESTS for text in request)
    with pytest.raises(
        ValueError, match=r"saved after 1 micro-batches of a window .*'world_size': 2.*trained on twice"
    ):
        make_loader(0, 3).load_state_dict(at(within))
    with pytest.raises(ValueError, match="other requests, another seed or another value of shuffle"):
        make_loader(seed=1).load_state_dict(at(within))
    other = RequestLoader(REQUESTS, first_tokens, micro_batch_size=1, rank=0, world_size=2)
    for loader, saved in ((make_loader(), other.state_dict()), (other, make_loader().state_dict())):
        with pytest.raises(ValueError, match="saved by another kind of loader"):
            loader.load_state_dict(saved)


def test_long_texts_are_truncated() -> None:
    loader = PlannedLoader(
        [[{"input_ids": list(range(9))}, {"input_ids": [7]}]],
        PaddedCollate(),
        tokens_per_micro_batch=4,
        on_long_text="truncate",
        rank=0,
        world_size=1,
    )
    rows = [batch.inputs["input_ids"].tolist() for batch in loader]
    assert sorted(rows) == [[[0, 1, 2, 3]], [[7]]]
    assert loader.statistics.truncated_texts == 1


def test_lengths_may_be_given() -> None:
    class Unread:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            raise AssertionError("planning looks at lengths only")

    for lengths in ([[3, 2], [1]], lambda index: [[3, 2], [1]][index]):
        loader = PlannedLoader(Unread(), list, tokens_per_micro_batch=4, lengths=lengths, rank=0, world_size=1)
        assert len(loader) == 3


def test_later_requests_with_a_known_id_are_skipped_and_counted() -> None:
    loader = make_loader(ids=[0, 1, 2, 3, 0, 5, 6, 1, 8], on_duplicate_id="skip")
    names = [batch.request_id for batch in loader if batch.request_end]
    assert sorted(names) == [0, 1, 2, 3, 5, 6, 8]
    assert loader.statistics.skipped_requests == 2


def test_what_is_skipped_at_an_epochs_end_is_counted_once() -> None:
    """Nothing else is left for the last window, and the state is saved behind it."""
    options: dict[str, Any] = {"on_long_text": "skip", "requests_per_update": 1, "shuffle": False, "world_size": 1}
    loader, resumed = (
        PlannedLoader([[[0] * 3], [[1] * 9]], first_tokens, tokens_per_micro_batch=8, rank=0, **options) for _ in "ab"
    )
    assert len(list(loader)) == 1
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == []
    assert resumed.statistics.skipped_requests == loader.statistics.skipped_requests == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"requests": []}, "PlannedLoader got no requests"),
        ({"ids": ["a"]}, "PlannedLoader got 1 ids for 2 requests"),
        ({"ids": ["a", "a"]}, "Request id 'a' is given twice, at positions 0 and 1: make ids unique"),
        ({"on_duplicate_id": "rename"}, "on_duplicate_id='rename' is not allowed: use one of error, skip"),
        ({"tokens_per_micro_batch": 0}, "tokens_per_micro_batch=0 is not allowed"),
        ({"naive_sequences": 0}, "naive_sequences=0 is not allowed"),
        (
            {"collate": PackedCollate(), "layout": "padded"},
            r"layout='padded'\) is not allowed with PackedCollate, whose",
        ),
        ({"rank": 1}, r"PlannedLoader\(rank=1, world_size=None\) is not allowed: give both"),
        ({"batch_size": 3}, r"PlannedLoader\(batch_size=\.\.\.\) is not allowed: the loader itself decides that"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlannedLoader(**{"requests": [[1], [2]], "collate": list, "tokens_per_micro_batch": 4, **arguments})


def test_an_error_of_a_worker_reaches_the_loop() -> None:
    def fail(texts: Any) -> Any:
        raise KeyError("no such text")

    loader = PlannedLoader([[[1]]], fail, tokens_per_micro_batch=4, num_workers=1, rank=0, world_size=1)
    with pytest.raises(KeyError, match="no such text"):
        list(loader)


def packed_texts_of_this_rank() -> tuple[int, list[int], Any]:
    requests = [[{"input_ids": text} for text in request] for request in REQUESTS]
    loader = PlannedLoader(requests, PackedCollate(), tokens_per_micro_batch=26, layout="packed", tokens_per_update=50)
    batches = list(loader)
    starts = [
        token for b in batches if b.weight for token in b.inputs["input_ids"][b.inputs["position_ids"] == 0].tolist()
    ]
    return len(loader), starts, loader.statistics


def test_ranks_are_asked_of_torch_distributed(two_ranks: RankGroup) -> None:
    (length, starts, statistics), (other_length, other_starts, other_statistics) = two_ranks.run(
        packed_texts_of_this_rank
    )
    assert length == other_length
    assert statistics == other_statistics
    assert sorted(starts + other_starts) == sorted(text[0] for request in REQUESTS for text in request)
    assert statistics.planned.padding(statistics.tokens) == 0
    assert statistics.naive.padding(statistics.tokens) > 0.2
