"""One gather of weights, which can be repeated where it has failed, for want of memory above all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, free_param

from requestzero.zero.common.streams import current_stream
from requestzero.zero.patch import is_replaced, patched
from requestzero.zero.stage_3.resumable_communication import ResumableCommunication


class Gather:
    """A gather of DeepSpeed's: how it is begun, its handle, and what of it has been done.

    DeepSpeed looks at the status of the weights, and asserts what it expects. Where the gather has failed, the status
    says what it would be without the failure, until the gather is made up for.

    Args:
        run: begins it and returns DeepSpeed's handle, or gathers at once and returns something else.
        params: the weights that it gathers, none of which is there or under way.
        comm: ``deepspeed.comm`` for a gather that can be repeated, or is waited for under watch; else ``None``.
    """

    def __init__(self, run: Callable[[], Any], params: list[Any], comm: Any) -> None:
        self._run, self._params = run, params
        self._comm = None if comm is None else ResumableCommunication(comm)
        self.stream = current_stream()
        """Of the accelerator, on which DeepSpeed gathers."""
        self._handle: Any = None
        self._has_begun = self._has_ended = False
        self._has_failed = self._is_passed_over = False
        self._released: list[Any] | None = None

    def begin(self) -> None:
        """Begin to gather (collective), but for what an attempt before has begun."""
        if self._has_failed:
            self._set(ZeroParamStatus.NOT_AVAILABLE)
        with _communicating_by(self._comm):
            self._handle = self._run()
        self._has_begun = True

    def end(self, handle_dependency: bool = True) -> None:
        """Wait for the weights; after an attempt that has failed behind the wait, once more.

        Args:
            handle_dependency: of DeepSpeed's handle: keep the buffer until the current stream has read it.
        """
        if self._has_ended:
            return
        if self._has_failed:  # some of the weights may be there
            self._set(ZeroParamStatus.INFLIGHT)
        self._handle.wait(handle_dependency=handle_dependency)
        if self._has_failed:
            self._set(ZeroParamStatus.AVAILABLE)
        self._has_ended = True

    # --- after a failure --------------------------------------------------------------------------------------------

    def note_failure(self) -> None:
        """Note that it, or one before it, has failed; let DeepSpeed go on as if the weights were under way."""
        self._has_failed = True
        if not self._has_begun:
            self._set(ZeroParamStatus.INFLIGHT)

    def pass_over(self) -> None:
        """Let DeepSpeed go on as if it had waited for the weights; once, since it may release them afterwards."""
        if not self._is_passed_over:
            self._set(ZeroParamStatus.AVAILABLE)
            self._is_passed_over = True

    def make_up(self) -> None:
        """Do what has failed (collective); weights that DeepSpeed has released by now are released again."""
        if self._released is None:
            missing = [param for param in self._params if param.ds_status == ZeroParamStatus.NOT_AVAILABLE]
            self._released = missing if self._is_passed_over else []
        if not self._has_begun:
            self.begin()
        if self._is_passed_over:
            self.end()
        for param in self._released:
            free_param(param)

    def _set(self, status: ZeroParamStatus) -> None:
        for param in self._params:
            param.ds_status = status


def _communicating_by(comm: ResumableCommunication | None) -> AbstractContextManager[None]:
    """Let DeepSpeed's gathers communicate by ``comm``, from its first collective.

    In a checkpoint they are under watch already; none of those is repeated.
    """
    if comm is None or is_replaced(partition_parameters, "dist"):
        return nullcontext()
    comm.restart()
    return patched(partition_parameters, "dist", comm)
