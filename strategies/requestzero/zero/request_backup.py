"""``on_overflow="drop_request"``: the window's sum as it was at the last good request end, to go back to.

Every request end is judged, with one all-reduce and one host read. A good one is remembered: its bookkeeping at once,
its sums when the next request first reduces into them, so that a window of one request copies nothing. A bad one is
undone.

Memory, from the first window of several requests on: one copy of the sums. On the device in the accumulation dtype (a
parameter that is split between ranks whole); under CPU offload of the host gradient, in host memory, or of the device
partition while that is resident at request ends (``retain_gpu_grad_partition_until_step``, 16-bit masters).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from requestzero.zero.grad_norm import cause_of_overflow
from requestzero.zero.skips import DroppedRequest
from requestzero.zero.window import UpdateWindow
from requestzero.zero.windowed import WindowedOptimizer


@dataclass
class GoodEnd:
    """The window at the end of its last good request."""

    window: dict[str, Any]
    norms: dict[int, torch.Tensor]
    """``norm_for_param_grads``."""
    copied: bool = False
    """Whether the sums are in the backup."""
    resident: frozenset[int] = frozenset()
    """Groups whose backup is of the device partition (CPU offload)."""


class RequestBackup(WindowedOptimizer):
    """Written for DeepSpeed 0.19.8."""

    def __init__(self, *args: Any, drops_requests: bool = False, **kwargs: Any) -> None:
        self.drops_requests = drops_requests
        self._good_end: GoodEnd | None = None
        self._backup: dict[int, list[torch.Tensor]] = {}
        super().__init__(*args, **kwargs)

    def backup_bytes(self) -> int:
        """Bytes of the copy of the window's sums that this rank holds, wherever it lies."""
        return sum(each.numel() * each.element_size() for copies in self._backup.values() for each in copies)

    def forget_good_end(self) -> None:
        """The window is over. The memory of the backup is kept for the next one."""
        self._good_end = None

    @override
    def begin_backward(self) -> None:
        """Also save the sums before the first backward of a request changes them."""
        super().begin_backward()  # waits for pending copies under offload
        if self._good_end is not None and not self._good_end.copied:
            self._save_sums(self._good_end)

    def judge_request(self) -> DroppedRequest | None:
        """At a request end: remember it, or undo it if the sum is not finite now (collective, one host read).

        What is judged is the sum as the step would read it: under offload the value cast to the host gradient's dtype.
        """
        if self.cpu_offload:
            self.judge_unjudged()
        cause = cause_of_overflow(self.read_squares())
        if cause is None:
            self._good_end = GoodEnd(self.window.save(), dict(self._recorded_norms()))
            return None
        before = 0 if self._good_end is None else self._good_end.window["micro_batches"]
        window = self.window
        dropped = DroppedRequest(window.request_ids[window.requests - 1], window.micro_batches - before, cause)
        self._go_back()
        window.dropped.append(dropped)
        return dropped

    def _recorded_norms(self) -> dict[int, torch.Tensor]:
        return self.norm_for_param_grads if self.cpu_offload else {}

    def _go_back(self) -> None:
        window, end = self.window, self._good_end
        if end is None:
            self.discard_window()
            window.load(UpdateWindow().save())
            self.window = window  # still the same window to who holds it
            return
        window.load(end.window)
        if self.cpu_offload:
            self.norm_for_param_grads.clear()
            self.norm_for_param_grads.update(end.norms)
        self._load_sums(end)

    # --- sums -------------------------------------------------------------------------------------------------------

    def _sums(self, group_idx: int) -> list[torch.Tensor]:
        """The tensors that hold the group's sum now."""
        partition = self.sum_on_device(group_idx)
        if partition is not None:
            return [partition]
        return [self.host_gradient(group_idx)] if self.cpu_offload else self.window.device_sums[group_idx]

    def _save_sums(self, end: GoodEnd) -> None:
        end.copied = True
        end.window["edited"] = self.window.edited  # a user may have set a gradient since
        if self.cpu_offload:
            end.resident = frozenset(i for i in self.group_indices if self.sum_on_device(i) is not None)
        for group_idx in self.group_indices:
            sums, kept = self._sums(group_idx), self._backup.get(group_idx)
            if kept is None or [(t.shape, t.device) for t in kept] != [(t.shape, t.device) for t in sums]:
                self._backup[group_idx] = [torch.empty_like(total) for total in sums]
            for copy, total in zip(self._backup[group_idx], sums, strict=True):
                copy.copy_(total, non_blocking=True)

    def _load_sums(self, end: GoodEnd) -> None:
        """The sums as they were; nothing to do where the request that is undone has not reduced anything."""
        if not end.copied:
            return
        if self.cpu_offload:
            self._wait_for_offload_copies()
        for group_idx in self.group_indices:
            if self.cpu_offload and group_idx in end.resident:
                self._get_compact_grad_partition_buffer(group_idx)
                self.window.unpublished.add(group_idx)
            elif self.cpu_offload:
                self.averaged_gradients[group_idx] = None  # restored from the host in the next backward
            for total, copy in zip(self._sums(group_idx), self._backup[group_idx], strict=True):
                total.copy_(copy, non_blocking=True)
        if self.cpu_offload:
            self.publish_window()
        end.copied = False  # saved anew before the next request: until then a user may set a gradient
