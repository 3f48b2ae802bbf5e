"""The short training of every front end: the same model, data, windows and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from requestzero.faults.combination import FrontEnd
from requestzero.faults.training.job import Job, Rank

_MODULES = {
    FrontEnd.ENGINE: "with_engine",
    FrontEnd.LIGHTNING: "with_lightning",
    FrontEnd.ACCELERATE: "with_accelerate",
}

Train = Callable[[Job, Rank], None]


def training(front_end: FrontEnd) -> Train:
    """Return the function that trains with a front end, on all ranks."""
    train: Train = import_module(f"{__name__}.{_MODULES[front_end]}").train
    return train
