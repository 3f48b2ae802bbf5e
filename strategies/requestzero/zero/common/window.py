"""The counts of one update window: all requests between two optimizer steps."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from requestzero.data.micro_batch import RequestId
from requestzero.former_names import renamed_attribute


@dataclass(frozen=True)
class DroppedRequest:
    """One request that was left out of its window's update, because it made the gradient not finite."""

    request_id: RequestId
    micro_batches: int
    """Its backwards on this rank."""
    cause: str
    """``"inf"`` or ``"NaN"``."""


@dataclass
class WindowWeights:
    """Weights of this rank's micro-batches, for ``normalization="token"``."""

    reported: int = 0
    """Number of weights: one for each micro-batch, where they are used."""
    on_host: float = 0.0
    """Sum of those that were given as numbers."""
    on_device: torch.Tensor | None = None
    """Sum of those that were given as tensors, a scalar on the device; NaN where one was negative."""

    def add(self, weight: float | torch.Tensor) -> None:
        """Add a micro-batch's weight: a number of at least 0, or a scalar on the device, which is not read."""
        self.reported += 1
        if not isinstance(weight, torch.Tensor):
            self.on_host += weight
            return
        checked = torch.where(weight >= 0, weight, torch.nan)
        self.on_device = checked if self.on_device is None else self.on_device + checked


@dataclass
class UpdateWindow:
    """The requests and micro-batches of this rank since the last optimizer step.

    The optimizer owns exactly one and replaces it by a new one at the end of ``step()``, on ``zero_grad()`` and when a
    checkpoint is loaded. A *request* is one or more micro-batches; its end is a gradient accumulation boundary, not a
    step.
    """

    micro_batches: int = 0
    """Backwards in this window."""
    requests: int = 0
    """Requests that have ended in this window."""
    request_open: bool = False
    """True between a request's first backward and its end."""
    ends_with_request: bool = False
    """True where a step is known to follow the request at hand."""
    request_ids: list[RequestId] = field(default_factory=list)
    """Names of the window's requests in order, the open one included; ``None`` where the caller gave none."""
    weights: WindowWeights = field(default_factory=WindowWeights)
    checked: int = 0
    """Requests whose end the overflow policy has seen."""
    dropped: list[DroppedRequest] = field(default_factory=list)
    """Requests that were left out, in order; the counts above are without them."""
    shared_out: bool = False
    """True if another number of ranks has begun the window: the micro-batches of one rank are no divisor then."""

    reported_weights = renamed_attribute("reported_weights", "weights.reported")
    host_weight = renamed_attribute("host_weight", "weights.on_host")
    device_weight = renamed_attribute("device_weight", "weights.on_device")

    @property
    def is_open(self) -> bool:
        """True if the next step has something to apply, or to skip because every request was dropped."""
        return self.has_sum or bool(self.dropped)

    @property
    def has_sum(self) -> bool:
        """True if the window holds any gradient."""
        return self.micro_batches > 0

    def divisor_of_mean(self) -> int:
        """Return the micro-batches of one rank, by which a mean divides.

        Raises:
            ValueError: another number of ranks has begun the window.
        """
        if self.shared_out:
            raise ValueError(
                "normalization='mean' divides by the micro-batches of one rank, and another number of ranks has begun "
                "this update window: there is no such number. Divide by the weight of all micro-batches (normalization="
                "'token'), by a number of your own (divisor=...) or by nothing; or load the checkpoint without its "
                "window: load_checkpoint(..., discard_window=True)."
            )
        return self.micro_batches

    def begin_request(self, request_id: RequestId, window_ends: bool = False) -> None:
        """Note the name of the request that the next backward belongs to, and whether a step follows it."""
        self.ends_with_request = window_ends
        del self.request_ids[self.requests :]  # one that was announced and never came
        self.request_ids.append(request_id)

    def count_micro_batch(self) -> None:
        """Count one backward; it begins a request without a name where none was announced."""
        if not self.request_open and len(self.request_ids) == self.requests:
            self.request_ids.append(None)
        self.micro_batches += 1
        self.request_open = True

    def end_request(self) -> None:
        """Count the open request, if there is one, as ended."""
        self.requests += self.request_open
        self.request_open = self.ends_with_request = False

    def successor(self) -> UpdateWindow:
        """Return a new window. It keeps the name of a request that was announced and has not begun."""
        ahead = [] if self.request_open else self.request_ids[self.requests :]
        return UpdateWindow(request_ids=ahead, ends_with_request=bool(ahead) and self.ends_with_request)

    def save(self) -> dict[str, Any]:
        """Return the counts of a window between requests, for :meth:`load`. Their number does not grow with it."""
        counts = {name: value for name, value in vars(self).items() if name not in ("request_ids", "dropped")}
        return counts | {"weights": copy.copy(self.weights)}  # whose tensor is never changed in place

    def load(self, saved: dict[str, Any]) -> None:
        """Become what :meth:`save` has seen, except for requests that were dropped since."""
        vars(self).update(saved, weights=copy.copy(saved["weights"]))
        del self.request_ids[self.requests :]
