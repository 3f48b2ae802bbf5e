"""The training as a loop for Accelerate, with requests in blocks."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from typing_extensions import override

from requestzero.accelerate.plugin import RequestZeROPlugin
from requestzero.faults.combination import RANKS, Point
from requestzero.faults.setup import CLIPPING
from requestzero.faults.training.job import Job, Rank
from requestzero.faults.training.parts import Model, make_optimizer, refuse_bad, requests, watch_engine, watch_files


class Shares(torch.utils.data.Dataset[Any]):
    """Micro-batches by request and rank, in turn: Accelerate deals neighbouring items out to the ranks."""

    def __init__(self, job: Job, rank: Rank) -> None:
        self._requests = requests(job.setup)
        self._share = rank.injector.at(Point.LOADER, self._share_of)

    def __len__(self) -> int:
        return len(self._requests) * RANKS

    @override
    def __getitem__(self, index: int) -> Any:
        return self._share(index)

    def _share_of(self, index: int) -> torch.Tensor:
        return self._requests[index // RANKS][index % RANKS :: RANKS]


class Progress:
    """The place in the data, which is saved with a checkpoint."""

    requests = 0

    def state_dict(self) -> dict[str, int]:
        """Return the number of requests that are done."""
        return {"requests": self.requests}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after so many requests."""
        self.requests = state["requests"]


def train(job: Job, rank: Rank) -> None:
    """Train until ``job.until``, from the start or from a checkpoint."""
    watch_files(rank.injector)
    setup = job.setup
    plugin = RequestZeROPlugin(hf_ds_config=setup.config(), gradient_clipping=CLIPPING)
    accelerator = Accelerator(
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=setup.requests_per_update,
        mixed_precision="bf16" if setup.is_half else "no",
    )
    model, progress = Model(rank.injector), Progress()
    loader = torch.utils.data.DataLoader(Shares(job, rank))
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model, rank.injector), loader)
    accelerator.register_for_checkpointing(progress)
    engine = accelerator.deepspeed_engine_wrapped.engine
    watch_engine(rank.injector, engine, "end_request")
    rank.journal.engine = engine
    if job.checkpoint is not None:
        accelerator.load_state(str(job.checkpoint))
        loader = accelerator.skip_first_batches(loader, progress.requests)
    rank.journal.started(job.start, engine.applied_updates)
    forward = rank.injector.at(Point.FORWARD, model)
    for (request,) in loader:
        with plugin.requests(accelerator).request():
            for inputs in request.split(1):
                refuse_bad(inputs)
                accelerator.backward(forward(inputs))
        progress.requests += 1
        rank.journal.request_ended()
        if job.ends_window(progress.requests):
            optimizer.step()
            optimizer.zero_grad()
            rank.journal.updated(engine)
        if job.saves_at(progress.requests):
            accelerator.save_state(str(job.folder / f"checkpoint_{job.name_at(progress.requests)}"))
            rank.journal.saved()
        if engine.applied_updates == job.until:
            break
