"""The loader: the same micro-batches for every rank, in an order that can be repeated and continued."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from requestzero import MicroBatch, RequestLoader
from requestzero.data.labels import count_trained, mask_labels
from requestzero.data.request_split import count_micro_batches, split_request
from support.ranks import RankGroup
from support.scripts import run_code

LENGTHS = [1, 5, 2, 9, 3, 4, 1]
REQUESTS = [[(request, item) for item in range(length)] for request, length in enumerate(LENGTHS)]


def make_loader(rank: int = 0, world_size: int = 2, **options: Any) -> RequestLoader:
    options = {"micro_batch_size": 2, "filler": lambda inputs: ("filler", inputs), **options}
    return RequestLoader(REQUESTS, list, rank=rank, world_size=world_size, **options)


def marks(micro_batches: list[MicroBatch]) -> list[tuple[Any, ...]]:
    return [(batch.request_id, batch.request_end, batch.window_end) for batch in micro_batches]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_a_request_is_split_evenly_and_in_order(world_size: int, micro_batch_size: int) -> None:
    for items in range(1, 40):
        shares = [split_request(items, rank, world_size, micro_batch_size) for rank in range(world_size)]
        assert {len(share) for share in shares} == {count_micro_batches(items, world_size, micro_batch_size)}
        flat = [[item for micro_batch in share for item in micro_batch] for share in shares]
        assert sorted(item for share in flat for item in share) == list(range(items))
        assert all(share == sorted(share) for share in flat)
        for round_ in zip(*shares, strict=True):
            sizes = list(map(len, round_))
            assert max(sizes) <= micro_batch_size
            assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_agree_on_everything_but_the_items(world_size: int) -> None:
    passes = [list(make_loader(rank, world_size)) for rank in range(world_size)]
    assert all(marks(other) == marks(passes[0]) for other in passes)
    assert {len(one) for one in passes} == {len(make_loader(0, world_size))}
    assert sum(batch.request_end for batch in passes[0]) == len(REQUESTS)
    real = [batch.inputs for one in passes for batch in one if batch.weight]
    assert sorted(item for inputs in real for item in inputs) == sorted(item for items in REQUESTS for item in items)


def test_a_rank_without_items_runs_a_filler_of_weight_zero() -> None:
    first, second = ({b.request_id: b for b in make_loader(rank, 2)} for rank in range(2))
    assert first[0].inputs == [(0, 0)]
    assert first[0].weight == 1.0
    assert second[0].inputs == ("filler", [(0, 0)])
    assert second[0].weight == 0.0


def test_the_default_filler_trains_nothing_and_reaches_every_parameter() -> None:
    from requestzero.recipes.model import ByteDecoder, next_token_loss

    model = ByteDecoder(258, 16, 1, 2, longest=8)
    inputs = {"input_ids": torch.ones(1, 4, dtype=torch.int64), "attention_mask": torch.ones(1, 4)}
    inputs["labels"] = inputs["input_ids"]
    filler = mask_labels(inputs)
    assert count_trained(inputs) == 4
    assert count_trained(filler) == 0
    assert filler["labels"] is not inputs["labels"]
    loss, tokens = next_token_loss(model, filler)
    loss.backward()
    assert (float(loss.detach()), int(tokens)) == (0.0, 0)
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_inputs_of_an_unknown_form_need_a_filler_of_their_own() -> None:
    loader = RequestLoader([["a"]], list, rank=1, world_size=2)
    with pytest.raises(TypeError, match=r"a list without 'labels'.*Give RequestLoader\(filler=\.\.\.\)"):
        list(loader)


def test_weights_count_items_or_what_the_user_says() -> None:
    assert [b.weight for b in make_loader(0, 1, shuffle=False)][:3] == [1.0, 2.0, 2.0]
    tenfold = make_loader(0, 1, shuffle=False, weight=lambda items: 10.0 * len(items))
    assert [b.weight for b in tenfold][:3] == [10.0, 20.0, 20.0]


def test_the_order_follows_from_seed_and_epoch() -> None:
    def orders(**options: Any) -> list[list[Any]]:
        loader = make_loader(**options)
        return [[b.request_id for b in loader if b.request_end] for _ in range(3)]

    assert orders() == orders()
    assert orders()[0] != orders()[1]
    assert orders() != orders(seed=1)
    assert orders(shuffle=False) == [list(range(len(REQUESTS)))] * 3


def test_every_pass_is_an_epoch_and_set_epoch_chooses() -> None:
    loader = make_loader()
    epochs = [(loader.epoch, marks(list(loader)), loader.epoch) for _ in range(2)]
    assert [epoch for _, _, epoch in epochs] == [0, 1]
    chosen = make_loader()
    chosen.set_epoch(1)
    assert marks(list(chosen)) == epochs[1][1]
    chosen.set_epoch(0)
    assert marks(list(chosen)) == epochs[0][1]
    left_early = make_loader()
    next(iter(left_early))
    left_early.set_epoch(0)
    assert marks(list(left_early)) == epochs[0][1], "choosing an epoch that was left early starts it again"


def test_a_state_continues_where_it_was_taken() -> None:
    whole = make_loader()
    expected = marks([batch for _ in range(2) for batch in whole])
    for taken in range(1, len(whole) + 1):
        interrupted = make_loader()
        done = [batch for _, batch in zip(range(taken), interrupted, strict=False)]
        resumed = make_loader()
        resumed.load_state_dict(interrupted.state_dict())
        resumed.set_epoch(0)  # as Lightning does when it resumes within an epoch
        rest = marks([batch for _ in range(2) for batch in resumed])
        assert marks(done) + rest == expected, f"after {taken}"


def test_iter_before_set_epoch_reads_the_epoch_when_it_starts() -> None:
    loader = make_loader()
    loader.load_state_dict({**loader.state_dict(), "epoch": 2, "requests": 7})
    iterator = iter(loader)
    loader.set_epoch(3)
    other = make_loader()
    other.set_epoch(3)
    assert marks(list(iterator)) == marks(list(other))


def test_a_state_is_refused_where_it_cannot_be_continued() -> None:
    loader = make_loader(shuffle=False)
    iterator = iter(loader)
    at_end = [next(iterator), loader.state_dict()][1]
    next(iterator)
    within = loader.state_dict()
    assert (at_end["requests"], at_end["micro_batches"]) == (1, 0)
    assert (within["requests"], within["micro_batches"]) == (1, 1)
    other_size = make_loader(0, 3, shuffle=False)
    with pytest.raises(ValueError, match=r"split for .*'world_size': 2.*cannot be continued with .*'world_size': 3"):
        other_size.load_state_dict(within)
    other_size.load_state_dict(at_end)
    assert next(iter(other_size)).request_id == 1
    for other in (make_loader(), make_loader(shuffle=False, ids=list("abcdefg"))):
        with pytest.raises(ValueError, match="other requests, another seed or another value of shuffle"):
            other.load_state_dict(at_end)


def test_window_ends_are_marked_where_asked() -> None:
    assert {b.window_end for b in make_loader()} == {None}
    ends = [b.window_end for b in make_loader(requests_per_update=3) if b.request_end]
    assert ends == [False, False, True, False, False, True, False]
    assert all(b.window_end is b.request_end for b in make_loader(requests_per_update=1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"requests": []}, "got no requests"),
        ({"requests": [[1], []]}, "Request 1 at position 1 is empty"),
        ({"requests": [[1], []], "ids": ["a", "b"]}, "Request 'b' at position 1 is empty"),
        ({"ids": ["a"]}, "got 1 ids for 2 requests"),
        ({"ids": ["a", "a"]}, "Request id 'a' is given twice, at positions 0 and 1"),
        ({"micro_batch_size": 0}, r"micro_batch_size=0\) is not allowed"),
        ({"micro_batch_size": True}, r"micro_batch_size=True\) is not allowed"),
        ({"requests_per_update": 0}, r"requests_per_update=0\) is not allowed"),
        ({"rank": 0}, "give both, or neither"),
        ({"rank": 2, "world_size": 2}, "ranks go from 0 to 1"),
        ({"rank": 0, "world_size": 0}, r"world_size=0\) is not allowed"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RequestLoader(**{"requests": [[1], [2]], "collate": list, **arguments})


def test_a_request_that_changes_its_length_is_refused() -> None:
    requests = [[1], [2]]
    loader = RequestLoader(requests, list, shuffle=False)
    requests[1].append(3)
    with pytest.raises(ValueError, match="Request 1 at position 1 has 2 items now and had 1"):
        list(loader)


def ids_on_this_rank() -> tuple[int, list[Any]]:
    loader = RequestLoader(REQUESTS, list, filler=list)
    return len(loader), [item for batch in loader if batch.weight for item in batch.inputs]


def test_ranks_are_asked_of_torch_distributed(two_ranks: RankGroup) -> None:
    (length, items), (other_length, other_items) = two_ranks.run(ids_on_this_rank)
    assert length == other_length == len(make_loader(0, 2, micro_batch_size=1))
    assert sorted(items + other_items) == sorted(item for request in REQUESTS for item in request)


def test_the_module_does_not_import_torch() -> None:
    code = "import sys, requestzero; requestzero.RequestLoader; assert 'torch' not in sys.modules"
    run_code(code)
