"""Losses of gradients at request boundaries in DeepSpeed's own optimizers, derived from a config.

Written for DeepSpeed 0.19.6 to 0.19.8, whose ``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py`` and
``runtime/bf16_optimizer.py`` it follows. ``tests/doctor/test_stock_losses.py`` runs these against each other,
Muon aside: its updates are orthogonalized, so that a test by values cannot tell the sums apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from requestzero.config.nested import look_up, section_of
from requestzero.config.own_keys import own_names
from requestzero.config.precision import precision_of
from requestzero.config.translation import AUTO

_DECIDING = (
    "zero_optimization.stage",
    "zero_optimization.offload_optimizer.device",
    "bf16.enabled",
    "fp16.enabled",
    "data_types.grad_accum_dtype",
)


class Loss(Enum):
    """One way in which an update is not the sum of its window; the value describes the windows and the effect."""

    EARLIER_REQUESTS = (
        "Updates of several requests: the end of a request puts its own sum in the place of what was there. Only the "
        "window's last request is applied."
    )
    FIRST_REQUEST = (
        "Updates of several requests: the first request is written to the host gradient, but not to the sum that the "
        "next one adds to, and is lost. What that sum still holds of an older window is counted in its place."
    )
    FIRST_BACKWARD = (
        "Updates of several requests, the first of one micro-batch: it is written to the host gradient, but not to the "
        "sum that the next micro-batch adds to, and is lost. What that sum still holds of an older window is counted "
        "in its place."
    )
    LATE_AFTER_FIRST_REQUEST = (
        "Parameters that take part in a window, but not in its first request: what they have summed in an older window "
        "of several requests is counted again."
    )
    LATE_AFTER_FIRST_BACKWARD = (
        "Parameters that take part in a window, but not in its first micro-batch: what they have summed in an older "
        "window is counted again."
    )
    ABSENT_AT_REQUEST_END = (
        "Parameters that take part in a request, but not in its last micro-batch: their sum does not reach the host "
        "gradient. The one of their last request end, of this window or an older one, is applied instead."
    )
    UNREDUCED = (
        "Parameters that take part in a request, but not in its last micro-batch (overlap_comm at stage 1 reduces in "
        "that one's backward only): their gradient is never reduced and is lost."
    )
    ABSENT_FROM_WINDOW = (
        "Parameters that take no part in a window: the gradient of their last update is applied once more, also with "
        "one micro-batch per update."
    )
    DISCARDED_SUM = (
        "Windows that zero_grad() discards after a backward: parameters that take no part in the next window get what "
        "the discarded one has summed."
    )
    FIRST_OF_TWO_FORWARDS = (
        "Two forwards before their backwards, at the beginning of a window: the second gradient replaces the first one."
    )
    USED_TWICE = (
        "Parameters that several reentrant checkpoints of one micro-batch use: in a window's first micro-batch only "
        "the part that comes last is kept where others were reduced in between; where none were, it is an error."
    )
    EDITED_SUM = (
        "Gradients that safe_set_full_grad sets inside a window: what the reduced gradients sum to without it replaces "
        "them at the next end of a request, or before the step."
    )
    SKIPPED_AGAIN = (
        "Windows that are skipped for inf or NaN: the next ones are skipped too, until the parameter that had it takes "
        "part in a window's first micro-batch."
    )
    INF_APPLIED = (
        "Windows that are skipped for inf or NaN: it is applied in the next window if the parameter that had it takes "
        "no part there. The weights are not finite any more."
    )
    RAISED_SCALE = (
        "Steps before which the dynamic loss scale is raised (every fp16.loss_scale_window steps): gradients that had "
        "the old scale are divided by the new one, and half of the update is applied."
    )


@dataclass(frozen=True)
class StockRun:
    """The options of a config that decide how DeepSpeed's own optimizers handle gradients."""

    stage: int
    offload: bool
    model: str
    """dtype of the parameters: ``"fp32"``, ``"bf16"`` or ``"fp16"``."""
    accumulation: str
    """dtype of the window's sum, with the same words."""
    managed: bool
    """``managed_gradient_accumulation``; without it requests have no ends."""
    overlap: bool
    """``overlap_comm``."""
    muon: bool
    """True if the config's optimizer is Muon."""
    dynamic_scale: bool = False
    """True for fp16 with a loss scale that DeepSpeed adjusts."""
    has_one_sum: bool = True
    """True if this DeepSpeed sums in one fp32 partition where accumulation is fp32 on a 16-bit model: since 0.19.8."""

    @property
    def losses(self) -> list[Loss]:
        """Return every loss that can occur, if requests or parameters are as its text describes."""
        if self.stage == 0 or self._is_bf16_optimizer:
            return []
        raised = [Loss.RAISED_SCALE] if self.dynamic_scale else []
        if self.stage == 3:
            return [*self._of_stage_3(), *raised]
        return [*(self._of_offload() if self.offload else self._of_device()), *raised]

    @property
    def is_known(self) -> bool:
        """False where what follows does not hold before 0.19.8.

        At stage 3, and at stage 1 with sums in another dtype than the model's.
        """
        if self.has_one_sum or self.stage not in (1, 3):
            return True
        return self.stage == 1 and (self.accumulation == self.model or self._is_bf16_optimizer)

    @property
    def _is_bf16_optimizer(self) -> bool:
        """True for stage 1 in bf16 with fp32 accumulation on the device: an optimizer class with one fp32 sum."""
        return self.stage == 1 and not self.offload and (self.model, self.accumulation) == ("bf16", "fp32")

    @property
    def _keeps_one_sum(self) -> bool:
        """True for fp32 accumulation on a 16-bit model: one fp32 partition from step to step, Muon's matrices aside."""
        return self.has_one_sum and self.accumulation == "fp32" != self.model and not self.muon

    @property
    def _reduces_in_last_backward_only(self) -> bool:
        return self.stage == 1 and self.overlap

    def _of_device(self) -> list[Loss]:
        if not self.managed:
            return []
        found = [] if self._keeps_one_sum else [Loss.EARLIER_REQUESTS]
        return [*found, Loss.UNREDUCED] if self._reduces_in_last_backward_only else found

    def _of_offload(self) -> list[Loss]:
        found = []
        if not self._keeps_one_sum:
            found = self._of_host_buffers()
        if self.managed and self.stage == 2:
            found.append(Loss.ABSENT_AT_REQUEST_END)
        if self.managed and self._reduces_in_last_backward_only:
            found.append(Loss.UNREDUCED)
        return [*found, Loss.ABSENT_FROM_WINDOW]

    def _of_host_buffers(self) -> list[Loss]:
        """Return the losses where the sum is a host buffer per parameter, and a shared counter decides to add to it.

        Stage 2 reduces in every backward, stage 1 once per request (without managed accumulation: once per window).
        """
        if self.stage == 2:
            return [*([Loss.FIRST_BACKWARD] if self.managed else []), Loss.LATE_AFTER_FIRST_BACKWARD]
        return [Loss.FIRST_REQUEST, Loss.LATE_AFTER_FIRST_REQUEST] if self.managed else []

    def _of_stage_3(self) -> list[Loss]:
        """Return the losses of one sum per parameter, where a counter of the window's backwards decides to add to it.

        Under offload the step reads a copy, which is made of the parameters of the request's last micro-batch (without
        managed accumulation: of the window's).
        """
        at_end = [Loss.ABSENT_AT_REQUEST_END] if self.offload and self.managed else []
        return [
            Loss.LATE_AFTER_FIRST_BACKWARD,
            *at_end,
            Loss.ABSENT_FROM_WINDOW,
            Loss.DISCARDED_SUM,
            Loss.FIRST_OF_TWO_FORWARDS,
            Loss.USED_TWICE,
            *([Loss.EDITED_SUM] if self.offload else []),
            # fp16 looks for inf in the sums, other dtypes in the norms of what the step reads.
            Loss.INF_APPLIED if self.offload and self.model != "fp16" else Loss.SKIPPED_AGAIN,
        ]


def stock_run(config: Mapping[str, Any]) -> StockRun:
    """Return the options that decide. Loads DeepSpeed, whose own classes parse ``config``.

    Raises:
        ValueError: a value that decides the path is ``"auto"``, is none of DeepSpeed's, or belongs to ZenFlow; a
            section is no mapping; or nothing is known of the path in the installed release.
    """
    from deepspeed.runtime.config import DtypeEnum
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from pydantic import ValidationError

    _refuse_auto(config)
    own = own_names("zero_optimization")
    given = section_of(config, "zero_optimization").items()
    section = {key: value for key, value in given if value != AUTO and key not in own}
    try:
        zero = DeepSpeedZeroConfig(**section)
    except ValidationError as error:
        raise ValueError(f"zero_optimization is not allowed: {error}") from error
    if zero.zenflow is not None:
        raise ValueError("zero_optimization.zenflow has a gradient path of its own, of which nothing is known here.")
    precision = precision_of(config)
    accumulation = section_of(config, "data_types").get("grad_accum_dtype")
    if accumulation is not None and accumulation not in list(DtypeEnum._value2member_map_):
        raise ValueError(f"data_types.grad_accum_dtype={accumulation!r} is not allowed: use 'fp32', 'bf16' or 'fp16'.")
    optimizer = str(section_of(config, "optimizer").get("type", ""))
    run = StockRun(
        stage=int(zero.stage),
        offload=zero.offload_optimizer is not None and zero.offload_optimizer.device != "none",
        model=precision,
        accumulation=precision if accumulation is None else DtypeEnum(accumulation).name,
        managed=config.get("managed_gradient_accumulation", True) is not False,
        overlap=bool(zero.overlap_comm),
        muon=optimizer.lower() == "muon",
        dynamic_scale=precision == "fp16" and not section_of(config, "fp16").get("loss_scale"),
        has_one_sum=hasattr(DeepSpeedZeroOptimizer, "_use_compact_grad_partition_buffer"),
    )
    if not run.is_known:
        sums = f"data_types.grad_accum_dtype={accumulation!r} at stage 1"
        what = "zero_optimization.stage=3" if run.stage == 3 else sums
        raise ValueError(f"{what}: what DeepSpeed does with it before 0.19.8 is not known here.")
    return run


def _refuse_auto(config: Mapping[str, Any]) -> None:
    for key in _DECIDING:
        if look_up(config, key) == AUTO:
            raise ValueError(f"{key} is 'auto', which a trainer fills in: give a file that says what it becomes.")
