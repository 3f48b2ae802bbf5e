"""Where a gradient that is not finite came from: recorded with ``on_overflow="raise"`` only, read only when needed.

The largest magnitude of every local gradient is kept on the device as it goes into its reduction (one operator and one
reading pass per gradient, four bytes of it; no host read), and the norm of every group's sum at every request end. When
a step finds that the window is not finite, the ranks exchange what they have recorded and build the same message.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.utils import logger as deepspeed_logger
from typing_extensions import override

from requestzero.data.micro_batch import RequestId
from requestzero.zero.windowed import WindowedOptimizer

_NAMES_TOLD = 8
_SCALE_AT_MINIMUM = "Current loss scale already at minimum"


@dataclass(frozen=True)
class LocalOrigin:
    """What one rank knows; request numbers count from 0 within the window."""

    request_ids: tuple[RequestId, ...]
    request: int | None
    """The first request with a local gradient that was not finite before any reduction."""
    parameters: tuple[str, ...]
    """Names of the parameters with such a gradient in that request."""
    sum_request: int | None
    """The request since whose end this rank's share of the window's sum has not been finite."""
    sum_parameters: tuple[str, ...]
    """Names of the parameters whose owned sum is not finite."""


class OverflowOrigin(WindowedOptimizer):
    """Written for DeepSpeed 0.19.8, which knows of an overflow only that there is one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.overflow_origin = ""
        """Where the overflow of the last step arose, the same text on all ranks."""
        self.loss_scale_exhausted = False
        """Whether the last step would have had to reduce the loss scale below its minimum."""
        super().__init__(*args, **kwargs)

    @override
    def record_origin(self, param: torch.Tensor) -> None:
        """Record the peak of a gradient before it meets those of other ranks."""
        gradient = self.get_gradient_for_reduction(param)
        if gradient is not None and gradient.numel():
            peak = torch.linalg.vector_norm(gradient, float("inf"), dtype=torch.float32)  # NaN goes through
            self.window.open_peaks.append((self.get_param_id(param), peak))

    def note_request_end(self) -> None:
        """Close the list of the request's local gradients; keep this rank's squared norm of every group's sum."""
        window = self.window
        param_ids, peaks = [each[0] for each in window.open_peaks], [each[1] for each in window.open_peaks]
        window.local_peaks.append((param_ids, torch.stack(peaks) if peaks else torch.zeros(0)))
        window.open_peaks.clear()
        window.sum_squares.append(torch.stack([self._local_square(i) for i in self.group_indices]))

    @override
    def _update_scale(self, has_overflow: bool = False) -> None:
        """Also find out where an overflow arose, while the gradients are still there (collective then).

        DeepSpeed's own line about it stays away, since the engine tells more; and its bare exception at the minimal
        loss scale is left to the engine, so that the step ends in order on all ranks.
        """
        self.loss_scale_exhausted = False
        if not has_overflow:
            super()._update_scale(has_overflow)
            return
        if self.records_origin:
            self.overflow_origin = self._find_origin()
        try:
            with _without_overflow_lines():
                super()._update_scale(has_overflow)
        except Exception as error:
            if _SCALE_AT_MINIMUM not in str(error):
                raise
            self.loss_scale_exhausted = True

    def _find_origin(self) -> str:
        known: list[LocalOrigin | None] = [None] * dist.get_world_size()
        dist.all_gather_object(known, self._local_origin())
        return describe_origin([each for each in known if each is not None], edited=self.window.edited)

    def _local_origin(self) -> LocalOrigin:
        window = self.window
        request, parameters = None, ()
        for number, (param_ids, peaks) in enumerate(window.local_peaks):
            finite = peaks.isfinite().tolist()
            bad = {param_id for param_id, each in zip(param_ids, finite, strict=True) if not each}
            if bad:
                request = number
                parameters = tuple(self.param_names[self.param_dict[param_id]] for param_id in sorted(bad))
                break
        return LocalOrigin(
            request_ids=tuple(window.request_ids),
            request=request,
            parameters=parameters,
            sum_request=self._first_of_the_last_bad_sums(),
            sum_parameters=tuple(self._parameters_with_bad_sums()),
        )

    def _first_of_the_last_bad_sums(self) -> int | None:
        """An overflow that a later request has cancelled is none."""
        first = None
        for number, squares in enumerate(self.window.sum_squares):
            finite = bool(squares.isfinite().all())
            first = None if finite else (number if first is None else first)
        return first

    def _parameters_with_bad_sums(self) -> Iterator[str]:
        for group_idx in self.group_indices:
            for param, total in self.owned_sums(group_idx):
                if not bool(total.isfinite().all()):
                    yield self.param_names[param]


def describe_origin(known: Sequence[LocalOrigin], edited: bool = False) -> str:
    """Where the window's first value that is not finite arose, from what every rank knows, in rank order."""
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
    more = [f"{len(parameters) - _NAMES_TOLD} more"] if len(parameters) > _NAMES_TOLD else []
    return ", ".join([*parameters[:_NAMES_TOLD], *more])


@contextmanager
def _without_overflow_lines() -> Iterator[None]:
    """While the block runs, DeepSpeed's logger leaves out its lines about an overflow."""

    def other(record: logging.LogRecord) -> bool:
        return "OVERFLOW!" not in record.getMessage()

    deepspeed_logger.addFilter(other)
    try:
        yield
    finally:
        deepspeed_logger.removeFilter(other)
