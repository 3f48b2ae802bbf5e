"""Work on files that fails on all ranks where it fails on one."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed


def on_one_rank(runs_here: bool, work: Callable[[], object]) -> None:
    """Run ``work`` on the ranks that say so, while the others wait. Collective.

    Raises:
        RuntimeError: on all ranks, if it has failed on one.
    """
    error = ""
    if runs_here:
        try:
            work()
        except Exception as failure:  # whatever it is: the others wait for this rank
            error = f"{type(failure).__name__}: {failure}"
    errors = [error] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(errors, error)
    if any(errors):
        raise RuntimeError(f"The checkpoint could not be written: {next(filter(None, errors))}")


def true_on_all(condition: bool) -> bool:
    """Return whether the condition holds on every rank. Collective."""
    conditions = [condition] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(conditions, condition)
    return all(conditions)


def together(work: Callable[[], object]) -> None:
    """Run ``work`` on every rank. Collective.

    Raises:
        Exception: on all ranks, that of the first rank that has raised one.
    """
    error: Exception | None = None
    try:
        work()
    except Exception as failure:  # whatever it is: the others wait for this rank
        error = failure
    errors: list[Exception | None] = [error] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(errors, error)
    first = next((each for each in errors if each is not None), None)
    if first is not None:
        raise first
