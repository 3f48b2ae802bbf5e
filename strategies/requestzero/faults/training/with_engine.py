"""The training as a loop over an engine."""

from __future__ import annotations

from typing import Any

from requestzero.errors import AbortRequest
from requestzero.faults.combination import Point
from requestzero.faults.setup import CLIPPING
from requestzero.faults.training.job import Job, Rank
from requestzero.faults.training.parts import (
    Model,
    make_loader,
    make_optimizer,
    refuse_bad,
    watch_engine,
    watch_files,
)


def train(job: Job, rank: Rank) -> None:
    """Train until ``job.until``, from the start or from a checkpoint."""
    import requestzero

    watch_files(rank.injector)
    model = Model(rank.injector)
    config = job.setup.config() | {"bf16": {"enabled": job.setup.is_half}, "gradient_clipping": CLIPPING}
    optimizer = make_optimizer(model, rank.injector)
    engine = requestzero.initialize(model=model, optimizer=optimizer, config=config)[0]
    watch_engine(rank.injector, engine, "set_gradient_accumulation_boundary")
    loader = make_loader(rank.injector, job.setup)
    if job.checkpoint is not None:
        loaded = engine.load_checkpoint(str(job.folder), tag=job.checkpoint.name)
        if loaded is not None:
            loader.load_state_dict(loaded[1]["loader"])
    rank.journal.engine = engine
    rank.journal.started(job.start, engine.applied_updates)
    if engine.applied_updates < job.until:
        with engine.data_pass():
            _loop(job, rank, engine, loader)


def _loop(job: Job, rank: Rank, engine: Any, loader: Any) -> None:
    forward = rank.injector.at(Point.FORWARD, engine)
    for batch in loader:
        if not engine.update_window.request_open:
            engine.begin_request(batch.request_id, micro_batches=batch.micro_batches, window_end=batch.window_end)
        engine.set_gradient_accumulation_boundary(batch.request_end)
        try:
            refuse_bad(batch.inputs)
            engine.backward(forward(batch.inputs))
        except AbortRequest as error:
            engine.abort_request(str(error))
        if not batch.request_end:
            continue
        rank.journal.request_ended()
        if batch.window_end:
            engine.step(normalization="mean")
            rank.journal.updated(engine)
        if job.saves_at(rank.journal.place):
            _save(job, rank, engine, loader)
        if engine.applied_updates == job.until:
            return


def _save(job: Job, rank: Rank, engine: Any, loader: Any) -> None:
    tag = f"global_step{job.name_at(rank.journal.place)}"
    if engine.save_checkpoint(str(job.folder), tag, client_state={"loader": loader.state_dict()}):
        rank.journal.saved()
