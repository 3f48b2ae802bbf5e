"""The origin of a gradient that is not finite: recorded with ``on_overflow="raise"`` only, read only when needed.

The largest magnitude of every local gradient is kept on the device as it goes into its reduction (one operator and one
reading pass per gradient, four bytes of it; no host read), and the norm of every group's sum at every request end. When
a step finds that the window is not finite, the ranks exchange what they have recorded and build the same message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from deepspeed import comm as dist

from requestzero.data.micro_batch import RequestId
from requestzero.zero.common.window import UpdateWindow

_NAMES_SHOWN = 8


@dataclass(frozen=True)
class LocalOrigin:
    """The records of one rank; request numbers count from 0 within the window."""

    request_ids: tuple[RequestId, ...]
    request: int | None
    """The first request with a local gradient that was not finite before any reduction."""
    parameters: tuple[str, ...]
    """Names of the parameters with such a gradient in that request."""
    sum_request: int | None
    """The request since whose end this rank's share of the window's sum has not been finite."""
    sum_parameters: tuple[str, ...]
    """Names of the parameters whose owned sum is not finite."""


class RecordedSums(Protocol):
    """The sums of a window, as far as their origin is concerned."""

    def squared_norms(self) -> list[torch.Tensor | None]: ...

    def not_finite(self) -> list[str]: ...


class OverflowOrigin:
    """Records over one window.

    Args:
        sums: of the window.
        names: of parameters, by id.
    """

    def __init__(self, sums: RecordedSums, names: Sequence[str]) -> None:
        self._sums, self._names = sums, names
        self.message = ""
        """The origin of the overflow of the last step, the same text on all ranks."""
        self.discard()

    def discard(self) -> None:
        """Forget the records: the window is over."""
        self._edited = False
        self._open: list[tuple[int, torch.Tensor]] = []
        self._peaks: list[tuple[list[int], torch.Tensor]] = []
        self._squares: list[list[torch.Tensor]] = []

    def record(self, param_id: int, param: torch.Tensor, gradient: torch.Tensor) -> None:
        """Record the peak of a gradient before it meets those of other ranks."""
        if gradient.numel():
            peak = torch.linalg.vector_norm(gradient, float("inf"), dtype=torch.float32)  # NaN goes through
            self._open.append((param_id, peak))

    def note_edit(self) -> None:
        """Note that a user has set a gradient."""
        self._edited = True

    def end_request(self) -> None:
        """Close the list of the request's local gradients; keep this rank's squared norm of every group's sum."""
        param_ids, peaks = [each[0] for each in self._open], [each[1] for each in self._open]
        self._peaks.append((param_ids, torch.stack(peaks) if peaks else torch.zeros(0)))
        self._open.clear()
        self._squares.append([square for square in self._sums.squared_norms() if square is not None])

    def state(self) -> dict[str, Any]:
        """Return what is known now of the open window's ended requests, for a checkpoint (reads the device)."""
        request, parameters = self._first_bad_request()
        since = self._first_of_the_last_bad_sums()
        return {"request": request, "parameters": list(parameters), "sum_request": since, "edited": self._edited}

    def load(self, state: dict[str, Any], requests: int) -> None:
        """Go on from :meth:`state` of another engine, in whose window ``requests`` had ended."""
        self.discard()
        self._edited = state["edited"]
        bad = [self._names.index(name) for name in state["parameters"]]
        since = requests if state["sum_request"] is None else state["sum_request"]
        for number in range(requests):
            param_ids = bad if number == state["request"] else []
            self._peaks.append((param_ids, torch.full((len(param_ids),), float("inf"))))
            self._squares.append([torch.tensor(float("inf"))] if number >= since else [])

    def go_back(self, requests: int) -> None:
        """Forget all but the first ``requests`` requests of the window."""
        self._open.clear()
        del self._peaks[requests:], self._squares[requests:]

    def find(self, window: UpdateWindow) -> None:
        """Exchange the records and build :attr:`message`, while the gradients are still there. Collective."""
        known: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(known, self._local(window))
        self.message = describe_origin(known, edited=self._edited)

    def _local(self, window: UpdateWindow) -> LocalOrigin:
        request, parameters = self._first_bad_request()
        return LocalOrigin(
            request_ids=tuple(window.request_ids),
            request=request,
            parameters=parameters,
            sum_request=self._first_of_the_last_bad_sums(),
            sum_parameters=tuple(self._sums.not_finite()),
        )

    def _first_bad_request(self) -> tuple[int | None, tuple[str, ...]]:
        for number, (param_ids, peaks) in enumerate(self._peaks):
            finite = peaks.isfinite().tolist()
            bad = {param_id for param_id, each in zip(param_ids, finite, strict=True) if not each}
            if bad:
                return number, tuple(self._names[param_id] for param_id in sorted(bad))
        return None, ()

    def _first_of_the_last_bad_sums(self) -> int | None:
        """Return the request since which the sum has not been finite; an overflow that a later one cancels is none."""
        first = None
        for number, squares in enumerate(self._squares):
            finite = all(bool(square.isfinite()) for square in squares)
            first = None if finite else (number if first is None else first)
        return first


def describe_origin(known: Sequence[LocalOrigin], edited: bool = False) -> str:
    """Return where the window's first value that is not finite arose.

    Args:
        known: the records of every rank, in rank order.
        edited: a user has set a gradient in the window.
    """
    local = [(rank, each) for rank, each in enumerate(known) if each.request is not None]
    if local:
        first = min(each.request for _, each in local if each.request is not None)
        places = [f"on rank {rank} in {_names(each.parameters)}" for rank, each in local if each.request == first]
        return f"It arose in the gradients of {_request(local[0][1], first)}, {'; '.join(places)}."
    sums = [(rank, each) for rank, each in enumerate(known) if each.sum_request is not None or each.sum_parameters]
    text = (
        "Before reduction the gradients of every rank and request were finite: it arose in their sum, by the reduction "
        "over ranks, the accumulation over the window, or the cast to the dtype of the host gradient"
        + (", or in a gradient that was set by the caller" if edited else "")
    )
    since = [each.sum_request for _, each in sums if each.sum_request is not None]
    if since:
        text += f"; with {_request(sums[0][1], min(since))}"
    places = [f"in {_names(each.sum_parameters)} (owned by rank {rank})" for rank, each in sums if each.sum_parameters]
    return f"{', '.join([text, *places])}."


def _request(origin: LocalOrigin, number: int) -> str:
    name = origin.request_ids[number] if number < len(origin.request_ids) else None
    place = f"request {number + 1} of {len(origin.request_ids)}"
    return place if name is None else f"request {name!r} ({place})"


def _names(parameters: Sequence[str]) -> str:
    more = [f"{len(parameters) - _NAMES_SHOWN} more"] if len(parameters) > _NAMES_SHOWN else []
    return ", ".join([*parameters[:_NAMES_SHOWN], *more])
