"""The collectives of a gather that can be repeated after a failure between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ResumableCommunication:
    """``deepspeed.comm`` for one gather, which begins each of its collectives once, however often it is repeated.

    The other ranks are in the collectives that the first attempt has begun. A repeated gather gets copies of their
    results.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._begun: list[tuple[torch.Tensor, Any]] = []  # results, with works (``None`` for one that is over)
        self._place = 0

    def restart(self) -> None:
        """Let the gather begin from its first collective."""
        self._place = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def allgather_fn(self, output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run ``deepspeed.comm.allgather_fn`` (collective), unless it is begun."""
        return self._once(self._comm.allgather_fn, output, *args, **kwargs)

    def all_gather_into_tensor(self, output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run ``deepspeed.comm.all_gather_into_tensor``, likewise."""
        return self._once(self._comm.all_gather_into_tensor, output, *args, **kwargs)

    def all_reduce(self, output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run ``deepspeed.comm.all_reduce``, likewise."""
        return self._once(self._comm.all_reduce, output, *args, **kwargs)

    def _once(self, collective: Callable[..., Any], output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._place += 1
        if self._place > len(self._begun):
            self._begun.append((output, collective(output, *args, **kwargs)))
            return self._begun[-1][1]
        result, work = self._begun[self._place - 1]
        if work is not None:
            return _CopiedWork(work, result, output)
        output.copy_(result)
        return None


class _CopiedWork:
    """A collective under way whose result is wanted in another place."""

    def __init__(self, work: Any, result: torch.Tensor, output: torch.Tensor) -> None:
        self._work, self._result, self._output = work, result, output

    def wait(self) -> None:
        """Wait for the collective, and copy its result."""
        self._work.wait()
        self._output.copy_(self._result)
