"""The state of one update window, in one object: what this package knows from one optimizer step to the next.

DeepSpeed's own fields (``averaged_gradients``, ``all_grad_tensors``, ``norm_for_param_grads``) hold the tensors.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from requestzero.data.micro_batch import RequestId
from requestzero.zero.skips import DroppedRequest


@dataclass
class UpdateWindow:
    """What has happened since the last optimizer step, on this rank.

    The optimizer owns exactly one and replaces it by a new one at the end of ``step()``, on ``zero_grad()`` and when a
    checkpoint is loaded, so that nothing of a window can survive it. A *request* is one or more micro-batches; its end
    is a gradient accumulation boundary, not a step.
    """

    micro_batches: int = 0
    """Backwards in this window."""
    requests: int = 0
    """Requests that have ended in this window."""
    request_open: bool = False
    """Whether a backward has run since the last request end."""
    request_ids: list[RequestId] = field(default_factory=list)
    """Names of the window's requests in order, the open one included; ``None`` where the caller gave none."""
    divisor: float = 1.0
    """What the sum is divided by when it is applied; known at step time only."""
    by_weight: bool = False
    """Whether the divisor follows from the weights of all ranks' micro-batches; known at step time only."""
    total_weight: float | None = None
    """Weight of the window over all ranks, once a step that divides by it has read it."""
    reported_weights: int = 0
    """Weights that were reported on this rank: one for each micro-batch, where they are used."""
    host_weight: float = 0.0
    """Sum of those that were given as numbers."""
    device_weight: torch.Tensor | None = None
    """Sum of those that were given as tensors, a scalar on the device; NaN where one was negative."""

    device_sums: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Group -> running sum of every owned parameter, each of the parameter's size (device, no flat fp32 partition)."""

    # CPU offload only. Parameter ids are DeepSpeed's numbers, group indices those of its parameter groups.
    used: set[int] = field(default_factory=set)
    """Owned parameters that have received a gradient."""
    on_host: set[int] = field(default_factory=set)
    """Owned parameters whose host gradient holds the window's sum (zero included), not an earlier window's."""
    published: set[int] = field(default_factory=set)
    """Groups whose partition has been copied to the host gradient; a released one is restored from there."""
    travelled: set[int] = field(default_factory=set)
    """Those of them that gradients have come into; a further request restores them ahead of its first reduction."""
    restored_ahead: set[int] = field(default_factory=set)
    """Groups whose partition was restored for the open request before anything was reduced into it."""
    unpublished: set[int] = field(default_factory=set)
    """Groups whose device partition holds something that the host gradient does not."""
    partition_norms: dict[int, torch.Tensor] = field(default_factory=dict)
    """Group -> norm of its published partition, a scalar on the device."""
    edited: bool = False
    """Whether a user has set a gradient, so that norms recorded in backward no longer describe it."""
    partition_ready: dict[int, Any] = field(default_factory=dict)
    """Group -> device event after which its partition may be added to on other streams."""

    # Overflow. What is recorded for on_overflow="raise" and "drop_request" only is empty otherwise.
    judged: int = 0
    """Requests whose end has been seen to, as the overflow policy asks."""
    dropped: list[DroppedRequest] = field(default_factory=list)
    """Requests that were left out, in order; the counts above are without them."""
    open_peaks: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """Parameter id and largest magnitude of every local gradient that the open request has taken into a reduction."""
    local_peaks: list[tuple[list[int], torch.Tensor]] = field(default_factory=list)
    """The same of every ended request, the magnitudes in one tensor on the device."""
    sum_squares: list[torch.Tensor] = field(default_factory=list)
    """For every ended request, this rank's squared norm of every group's sum at its end, a tensor of that length."""

    @property
    def is_open(self) -> bool:
        """Whether anything has come that the next step applies, or skips if every request of it was dropped."""
        return self.has_sum or bool(self.dropped)

    @property
    def has_sum(self) -> bool:
        """Whether the window holds any gradient."""
        return self.micro_batches > 0

    def add_weight(self, weight: float | torch.Tensor) -> None:
        """Report a micro-batch's weight: a number of at least 0, or a scalar on the device, which is not read."""
        self.reported_weights += 1
        if not isinstance(weight, torch.Tensor):
            self.host_weight += weight
            return
        checked = torch.where(weight >= 0, weight, torch.nan)
        self.device_weight = checked if self.device_weight is None else self.device_weight + checked

    def save(self) -> dict[str, Any]:
        """All fields, to go back to with :meth:`load`; tensors are not copied."""
        return {name: copy.copy(value) for name, value in vars(self).items()}

    def load(self, saved: dict[str, Any]) -> None:
        """Become what :meth:`save` has saved; what was dropped since is still known."""
        dropped = self.dropped
        vars(self).update({name: copy.copy(value) for name, value in saved.items()})
        self.dropped = dropped

    def begin_request(self, request_id: RequestId) -> None:
        """Note the name of the request that the next backward belongs to."""
        del self.request_ids[self.requests :]  # one that was announced and never came
        self.request_ids.append(request_id)

    def successor(self) -> UpdateWindow:
        """A clean window. It keeps the name of a request that was announced and has not begun."""
        ahead = [] if self.request_open else self.request_ids[self.requests :]
        return UpdateWindow(request_ids=ahead)

    def begin_micro_batch(self) -> None:
        """Count one backward, which begins a request without a name where none was announced."""
        if not self.request_open and len(self.request_ids) == self.requests:
            self.request_ids.append(None)
        self.micro_batches += 1
        self.request_open = True

    def end_request(self) -> None:
        """Count the open request, if there is one, as ended."""
        self.requests += self.request_open
        self.request_open = False
