"""Model, data and optimizer of the trainings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from requestzero.data.request_loader import RequestLoader
from requestzero.errors import AbortRequest
from requestzero.faults.combination import RANKS, UPDATES, Point
from requestzero.faults.injection import Injector
from requestzero.faults.setup import REQUESTS, Setup
from requestzero.zero.window_checkpoint import sums

WIDTH = 6


class Probe(torch.autograd.Function):
    """The identity, with a function that is called in the backward; no gradient where that returns ``None``."""

    @staticmethod
    @override
    def forward(ctx: Any, x: torch.Tensor, reach: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.reach = reach
        return x.view_as(x)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.reach(gradients[0]), None


class Model(torch.nn.Module):
    """Two layers, with a point between them in the backward; the loss is how far they are from the identity."""

    def __init__(self, injector: Injector) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first, self.second = torch.nn.Linear(WIDTH, 8), torch.nn.Linear(8, WIDTH)
        self._reach = injector.at(Point.BACKWARD, lambda gradient: gradient)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.first.weight.dtype)
        hidden = Probe.apply(torch.tanh(self.first(x)), self._reach)
        return (self.second(hidden) - x).square().mean()


def make_optimizer(model: torch.nn.Module, injector: Injector) -> torch.optim.Optimizer:
    """Return an optimizer with a point before it changes anything."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    injector.wrap(Point.STEP, optimizer, "step", leave_out=False)
    return optimizer


def requests(setup: Setup) -> list[torch.Tensor]:
    """Return the items of every request of the run, of shape ``(items, WIDTH)``: one for each rank and micro-batch.

    With aborts every window has one request more, at another place in each, whose last item is NaN on one rank.
    """
    generator = torch.Generator().manual_seed(5)
    windows = [[torch.randn(RANKS * count, WIDTH, generator=generator) for count in REQUESTS] for _ in range(UPDATES)]
    for number, window in enumerate(windows):
        aborted = setup.aborted_request(number)
        if aborted is None:
            continue
        bad = torch.ones(RANKS * 2, WIDTH)
        bad[RANKS + number // 2 % RANKS] = torch.nan
        window.insert(aborted, bad)
    return [request for window in windows for request in window]


def refuse_bad(inputs: torch.Tensor) -> None:
    """Abort the request whose inputs are NaN; the other rank learns of it at its next vote."""
    if inputs.isnan().any():
        raise AbortRequest("an item is NaN")


def make_loader(injector: Injector, setup: Setup) -> RequestLoader:
    """Return a loader of this rank's micro-batches, which marks where windows end."""
    collate, items = injector.at(Point.LOADER, torch.stack), requests(setup)
    of_any_type: Any = items
    return RequestLoader(
        of_any_type, collate, ids=range(len(items)), requests_per_update=setup.requests_per_update, shuffle=False
    )


def watch_files(injector: Injector) -> None:
    """Put a point before every file of a checkpoint that this process writes or reads."""
    injector.wrap(Point.SAVE, torch, "save", leave_out=False, begins=not injector.saves_window)
    injector.wrap(Point.SAVE, sums, "save_file", leave_out=False, begins=injector.saves_window)
    injector.wrap(Point.LOAD, torch, "load", leave_out=False)


def watch_engine(injector: Injector, engine: Any, boundary: str) -> None:
    """Put points before an engine's calls.

    Args:
        injector: of the fault.
        engine: the rank's.
        boundary: the method by which the front end marks the end of a request.
    """
    injector.wrap(Point.VOTE, engine, "begin_request")
    injector.wrap(Point.ABORT, engine, "abort_request")
    injector.left_out(Point.STEP, engine, "step")
    injector.left_out(Point.SAVE, engine, "save_checkpoint")
    injector.left_out(Point.LOAD, engine, "load_checkpoint")
    if boundary == "end_request":
        injector.wrap(Point.BOUNDARY, engine, boundary)
    else:
        _watch_marks(injector, engine)


def _watch_marks(injector: Injector, engine: Any) -> None:
    """Put a point before a mark that says that a request ends; others are no boundaries."""
    mark = engine.set_gradient_accumulation_boundary
    ends = injector.at(Point.BOUNDARY, mark)

    def set_gradient_accumulation_boundary(is_boundary: bool, **kwargs: Any) -> None:
        (ends if is_boundary else mark)(is_boundary, **kwargs)

    engine.set_gradient_accumulation_boundary = set_gradient_accumulation_boundary
