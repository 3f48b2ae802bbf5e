"""Accelerate: a rank whose loader ends early or raises, prepared by Accelerate or not."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from accelerate import DataLoaderConfiguration

from requestzero import MicroBatch
from support.accelerate_loops import Loop, make_accelerator, make_optimizer
from support.accelerate_state import fresh
from support.models import WIDTH, RowWeight
from support.polling import polling_every
from support.ranks import RankGroup

ROWS = 8


class Rows(torch.utils.data.Dataset):
    """Accelerate deals them out in turn. The last of eight raises, if it should, on the rank that gets it."""

    def __init__(self, count: int, raises: bool) -> None:
        self.count, self.raises = count, raises

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.raises and index == ROWS - 1:
            raise OSError("the disk is gone")
        return torch.ones(WIDTH)


def micro_batches(rows: Rows, rank: int) -> Iterator[MicroBatch]:
    """The rank's share of the rows, two to a request."""
    for position, index in enumerate(range(rank, len(rows), 2)):
        yield MicroBatch(rows[index][None], position % 2 == 1, request_id=position // 2)


class Marked:
    def __init__(self, rows: Rows, rank: int) -> None:
        self.rows, self.rank = rows, rank

    def __iter__(self) -> Iterator[MicroBatch]:
        return micro_batches(self.rows, self.rank)


def train(rows: Rows, marked: bool) -> str:
    """Two epochs over a loader that Accelerate has prepared, or over one of micro-batches; the error on this rank."""
    with fresh(), polling_every(0.2):
        uneven = DataLoaderConfiguration(even_batches=False)
        accelerator = make_accelerator(Loop(plugin={"rank_agreement": True}, accelerator={"dataloader_config": uneven}))
        model, optimizer, loader = RowWeight(), None, torch.utils.data.DataLoader(rows, batch_size=1)
        model, optimizer, loader = accelerator.prepare(model, make_optimizer(Loop(), model), loader)
        if marked:
            requests = accelerator.deepspeed_plugin.requests(accelerator)
            loader = requests.micro_batches(Marked(rows, accelerator.process_index))
        try:
            for _ in range(2):
                for batch in loader:
                    accelerator.backward(model(batch))
                    optimizer.step()
                    optimizer.zero_grad()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            accelerator.free_memory()
    return ""


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("raises", [False, True])
def test_one_rank_alone(two_fresh_ranks: RankGroup, raises: bool, marked: bool) -> None:
    rows = Rows(ROWS if raises else ROWS - 1, raises)
    results = two_fresh_ranks.run(train, rows, marked, timeout=60.0)
    early = "rank 1: steps after micro-batch 1 of request 1" if marked else "rank 1: has no more data"
    message = "rank 1: failed .*OSError: the disk is gone" if raises else early
    assert results[0] == results[1]
    assert results[0].startswith("RankDisagreementError: "), results
    assert re.search(message, results[0]), results


@pytest.mark.parametrize("marked", [False, True])
def test_all_ranks_together(two_ranks: RankGroup, marked: bool) -> None:
    assert two_ranks.run(train, Rows(ROWS, raises=False), marked) == ["", ""]
