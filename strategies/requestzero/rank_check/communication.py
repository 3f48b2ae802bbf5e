"""DeepSpeed's collectives on the CPU, with waits that can be given up."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from requestzero.rank_check.agreement import RankAgreement


class WatchedWork:
    """A collective under way."""

    def __init__(self, work: Any, agreement: RankAgreement) -> None:
        self._work, self._agreement = work, agreement

    def wait(self) -> None:
        """Wait for it.

        Raises:
            RankDisagreementError: on all ranks, if they wait for different things.
        """
        self._agreement.wait(self._work)


class WatchedCommunication:
    """``deepspeed.comm`` with watched reductions of CPU tensors, for one optimizer.

    A wait for gloo cannot be interrupted, but it can be made in pieces. On other devices a reduction is queued, and the
    host does not wait here.
    """

    def __init__(self, agreement: RankAgreement) -> None:
        self._agreement = agreement

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run ``deepspeed.comm.all_reduce`` (collective); with ``async_op`` its wait is watched."""
        return self._begin(dist.all_reduce, tensor, *args, **kwargs)

    def reduce(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run ``deepspeed.comm.reduce`` (collective)."""
        return self._run(dist.reduce, tensor, *args, **kwargs)

    def all_to_all_single(self, output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run ``deepspeed.comm.all_to_all_single`` (collective)."""
        return self._run(dist.all_to_all_single, output, *args, **kwargs)

    def reduce_scatter(self, output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run ``deepspeed.comm.reduce_scatter`` (collective)."""
        return self._run(dist.reduce_scatter, output, *args, **kwargs)

    def reduce_scatter_tensor(self, output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run ``deepspeed.comm.reduce_scatter_tensor`` (collective)."""
        return self._run(dist.reduce_scatter_tensor, output, *args, **kwargs)

    def broadcast(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run ``deepspeed.comm.broadcast`` (collective)."""
        return self._run(dist.broadcast, tensor, *args, **kwargs)

    def all_gather_into_tensor(self, output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run ``deepspeed.comm.all_gather_into_tensor`` (collective); with ``async_op`` its wait is watched."""
        return self._begin(dist.all_gather_into_tensor, output, *args, **kwargs)

    def allgather_fn(self, output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run ``deepspeed.comm.allgather_fn``, likewise."""
        return self._begin(dist.allgather_fn, output, *args, **kwargs)

    def _begin(self, collective: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = self._run(collective, tensor, *args, **kwargs)
        return work if work is None or tensor.device.type != "cpu" else WatchedWork(work, self._agreement)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Run ``deepspeed.comm.barrier`` (collective)."""
        work = dist.barrier(*args, **(kwargs | {"async_op": True}))
        if work is None:  # a rank outside the group has none
            return
        if torch.distributed.get_backend(args[0] if args else kwargs.get("group")) == "gloo":
            self._agreement.wait(work)
        else:
            work.wait()  # of the device's stream; with a timeout, NCCL aborts its communicator when that is over
            self._agreement.wait_for_device(torch.device(get_accelerator().device_name()))

    def reduce_scatter_fn(
        self, output_tensor: torch.Tensor, tensor: torch.Tensor, group: Any = None, **kwargs: Any
    ) -> Any:
        """Run ``deepspeed.comm.reduce_scatter_fn`` of equal shares (collective).

        Gloo's all-reduces the whole input, and its work ignores the time limit of a wait: so does this, under watch.
        """
        if output_tensor.device.type != "cpu":
            return dist.reduce_scatter_fn(output_tensor, tensor, group=group, **kwargs)
        self.all_reduce(tensor, group=group)
        output_tensor.copy_(tensor.view(-1, output_tensor.numel())[dist.get_rank(group=group)])

    def _run(self, collective: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type != "cpu" or kwargs.get("async_op"):
            return collective(tensor, *args, **kwargs)
        work = collective(tensor, *args, **(kwargs | {"async_op": True}))
        if work is not None:  # a rank outside the group has none
            self._agreement.wait(work)
        return None
