"""One gather of weights, which can be repeated where it has failed, for want of memory above all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from requestzero.zero.common.streams import current_stream
from requestzero.zero.patch import is_replaced, patched


class Gather:
    """A gather of DeepSpeed's: how it is begun, its handle, and what of it has been done.

    Args:
        run: begins it and returns DeepSpeed's handle, or ends it and returns ``None``.
        params: the weights that ``run`` begins to gather; none of them where it ends the gather.
        comm: ``deepspeed.comm`` for a gather that can be repeated, or is waited for under watch; else ``None``.
    """

    def __init__(self, run: Callable[[], Any], params: list[Any], comm: Any) -> None:
        self._run, self._params = run, params
        self._comm = None if comm is None else ResumableCommunication(comm)
        self.stream = current_stream()
        """Of the accelerator, on which DeepSpeed gathers."""
        self._handle: Any = None
        self._is_repeated = self.has_begun = self._has_ended = False
        self.is_awaited = False
        """True once DeepSpeed has waited for the weights, though they were not there."""

    def begin(self) -> None:
        """Begin to gather, or go on where it has failed before (collective)."""
        if self._is_repeated:
            self._set(ZeroParamStatus.NOT_AVAILABLE)
        with _communicating_by(self._comm):
            self._handle = self._run()
        self.has_begun = True

    def end(self, handle_dependency: bool = True) -> None:
        """Wait for the weights; again where what follows the wait has failed before.

        Args:
            handle_dependency: of DeepSpeed's handle: keep the buffer until the current stream has read it.
        """
        if self._has_ended:
            return
        if self._is_repeated:  # some of them may be there
            self._set(ZeroParamStatus.INFLIGHT)
        self._handle.wait(handle_dependency=handle_dependency)
        if self._is_repeated:
            self._set(ZeroParamStatus.AVAILABLE)
        self._has_ended = True

    def note_failure(self) -> None:
        """Note that it has failed to begin or to end, at whatever place."""
        self._is_repeated = True

    def pass_over(self) -> None:
        """Let DeepSpeed go on as if the weights were there, up to where its forward can be left."""
        self._set(ZeroParamStatus.AVAILABLE)
        self.is_awaited = True

    def _set(self, status: ZeroParamStatus) -> None:
        for param in self._params:
            param.ds_status = status


class ResumableCommunication:
    """``deepspeed.comm`` for one gather, which begins each of its collectives once, however often it is repeated.

    A repeated gather gets the work of the first attempt, whose result is elsewhere: nobody reads it, since the weights
    are released as the request is aborted.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._works: list[Any] = []
        self._place = 0

    def restart(self) -> None:
        """Let the gather begin from its first collective."""
        self._place = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def allgather_fn(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``deepspeed.comm.allgather_fn`` (collective), unless it is begun."""
        return self._once(self._comm.allgather_fn, *args, **kwargs)

    def all_gather_into_tensor(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``deepspeed.comm.all_gather_into_tensor``, likewise."""
        return self._once(self._comm.all_gather_into_tensor, *args, **kwargs)

    def _once(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._place == len(self._works):
            self._works.append(collective(*args, **kwargs))
        self._place += 1
        return self._works[self._place - 1]


def _communicating_by(comm: ResumableCommunication | None) -> AbstractContextManager[None]:
    """Let DeepSpeed's gathers communicate by ``comm``, from its first collective.

    In a checkpoint they are under watch already; none of those is repeated.
    """
    if comm is None or is_replaced(partition_parameters, "dist"):
        return nullcontext()
    comm.restart()
    return patched(partition_parameters, "dist", comm)
