"""Every option of this package: the one owner of its type, default, meaning, allowed values, key and front ends.

Only the standard library is imported, so that a configuration can be checked before torch is loaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from requestzero.config import rules
from requestzero.config.option_record import FrontEnd, check_options, option, options_of
from requestzero.config.validation import Boolean, Choice, Number, WholeNumber, as_mapping


@dataclass(frozen=True)
class OverflowSettings:
    """Treatment of gradients that are not finite, and the scaling of fp16 losses.

    ``None`` leaves the choice to the default for the precision in use.

    Raises:
        ValueError: a value that is not allowed, or options that contradict each other: all of these at once.
    """

    group: ClassVar[str] = "overflow"

    check_grad_overflow: bool | None = option(
        None, Boolean(), key={"fp32": "overflow.check_grad_overflow", "bf16": "bf16.check_grad_overflow"}
    )
    """Check gradients for inf and NaN: by default in bf16 and fp16 (where the check cannot be off), not in fp32."""
    on_overflow: str | None = option(None, Choice(("skip", "raise", "drop_request")), key="overflow.on_overflow")
    """Treatment of a window whose gradient is not finite: ``"skip"`` (which ``None`` is) drops its update, ``"raise"``
    ends the run with an error on all ranks that names parameters, request and rank, ``"drop_request"`` leaves only that
    request out of the update."""
    max_consecutive_skips: int | None = option(None, WholeNumber(1), key="overflow.max_consecutive_skips")
    """Number of updates in a row that may be skipped; the last of them ends the run with an error. ``None``: any
    number."""
    loss_scale: float | None = option(None, Number(lowest=0), key="fp16.loss_scale")
    """fp16 only. 0 scales the loss dynamically (DeepSpeed's default), a positive number statically."""
    initial_scale_power: int | None = option(
        None,
        WholeNumber(0, highest=127),  # fp32's range
        key="fp16.initial_scale_power",
    )
    """fp16 only, dynamic. The first loss scale is 2 to this power (default 16)."""
    loss_scale_window: int | None = option(None, WholeNumber(1), key="fp16.loss_scale_window")
    """fp16 only, dynamic. Updates without overflow after which the scale doubles (default 1000)."""
    hysteresis: int | None = option(None, WholeNumber(1), key="fp16.hysteresis")
    """fp16 only, dynamic. Overflows that are tolerated before the scale is halved (default 2)."""
    consecutive_hysteresis: bool | None = option(None, Boolean(), key="fp16.consecutive_hysteresis")
    """fp16 only, dynamic. Refill the hysteresis at an update without overflow (default false)."""
    min_loss_scale: float | None = option(None, WholeNumber(1, as_float=True), key="fp16.min_loss_scale")
    """fp16 only, dynamic. The scale never falls below this whole number (default 1)."""

    def __post_init__(self) -> None:
        check_options(self)
        self.check()

    def check(self, precision: str | None = None) -> None:
        """Raise ValueError, with all that is wrong, where options contradict each other or the precision.

        Args:
            precision: the model's dtype, ``"fp32"``, ``"bf16"`` or ``"fp16"``; ``None`` where it is not known yet.
        """
        problems = self.contradictions(self.given(), precision)
        if problems:
            raise ValueError("\n".join(problems))

    @classmethod
    def contradictions(cls, given: Mapping[str, Any], precision: str | None = None) -> list[str]:
        """Return what cannot be meant together, one text for each.

        Args:
            given: options by name, each of an allowed value; ``None`` is not given.
            precision: as in :meth:`check`.
        """
        return rules.contradictions(options_of(cls), given, precision)

    @classmethod
    def build(cls, value: OverflowSettings | Mapping[str, Any] | None) -> OverflowSettings:
        """Return the settings that are given as an object, as a mapping of their names, or not at all.

        Raises:
            ValueError: something else, a name that does not exist, or a value that is not allowed.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        given = as_mapping("overflow", value, advice="give OverflowSettings or a mapping of its fields")
        known = options_of(cls)
        for name in sorted(map(str, given)):
            if name not in known:
                raise ValueError(f"overflow.{name} is not an option: use one of {', '.join(known)}.")
        return cls(**{str(name): item for name, item in given.items()})

    def given(self) -> dict[str, Any]:
        """Return the options that were set, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def loss_scale_options(self) -> dict[str, Any]:
        """Return the options of the fp16 loss scale that were set. Deprecated: use :meth:`given`."""
        return self._given_at("loss_scale_options", "fp16.")

    def own_options(self) -> dict[str, Any]:
        """Return the options that were set and that DeepSpeed does not have. Deprecated: use :meth:`given`."""
        return self._given_at("own_options", "overflow.")

    def _given_at(self, former: str, section: str) -> dict[str, Any]:
        warnings.warn(f"OverflowSettings.{former}() is deprecated: use given().", DeprecationWarning, stacklevel=3)
        keys = {name: known.key for name, known in options_of(type(self)).items()}
        return {name: value for name, value in self.given().items() if str(keys[name]).startswith(section)}

    def resolved(self, precision: str) -> OverflowSettings:
        """Return the settings with the defaults of ``check_grad_overflow`` and ``on_overflow`` for a precision."""
        check_grad_overflow = precision != "fp32" if self.check_grad_overflow is None else self.check_grad_overflow
        return replace(self, check_grad_overflow=check_grad_overflow, on_overflow=self.on_overflow or "skip")


@dataclass(frozen=True)
class RequestZeROSettings:
    """The options that the front ends share.

    Raises:
        ValueError: a value that is not allowed.
    """

    stage: int = option(2, Choice((1, 2, 3)), key="zero_optimization.stage")
    """ZeRO stage: 1 partitions the optimizer state, 2 the gradients as well, 3 the weights as well."""
    offload_optimizer: bool = option(
        False,
        Boolean(),
        key="zero_optimization.offload_optimizer.device",
        stored={True: "cpu", False: "none"},
    )
    """Keep master weights and optimizer state on the CPU, and run the optimizer step there."""
    offload_parameters: bool = option(
        False,
        Boolean(),
        key="zero_optimization.offload_param.device",
        stored={True: "cpu", False: "none"},
    )
    """Stage 3: keep this rank's part of the weights on the CPU while no forward or backward needs it."""
    retain_gpu_grad_partition_until_step: bool | str = option(
        False,
        Boolean(also="auto"),
        key="zero_optimization.retain_gpu_grad_partition_until_step",
        own_key=True,
    )
    """With CPU offload and fp32 accumulation on a 16-bit model: true keeps the device's fp32 gradient partition
    until the step, false releases it at every request boundary and reloads it for the next request; ``"auto"`` keeps it
    while the device has memory to spare, as each rank finds at every boundary. The weights are the same bit for bit."""
    grad_accum_dtype: str | None = option(
        None, Choice((None, "fp32", "bf16", "fp16")), key="data_types.grad_accum_dtype"
    )
    """dtype of the window's running gradient sum: ``"fp32"``, ``"bf16"`` or ``"fp16"``; ``None``: the model's."""
    normalization: str = option("mean", Choice(("mean", "sum", "token")))
    """Divisor of the window's gradient sum at the step: ``"mean"``, the window's micro-batches per rank;
    ``"sum"``, 1; DeepSpeed's mean over the data-parallel ranks applies to both. ``"token"``: the sum over
    all ranks is divided by the weight of all of the window's micro-batches, such as their trained tokens; losses are
    sums then, and each micro-batch reports its weight."""
    incomplete_window: str = option("step", Choice(("step", "drop")), front_ends=(FrontEnd.LIGHTNING, FrontEnd.RECIPES))
    """Treatment of a window with fewer requests than ``accumulate_grad_batches`` at an epoch's end: ``"step"`` applies
    it, divided by its own number of micro-batches; ``"drop"`` discards it."""
    log_metrics: bool = option(True, Boolean(), front_ends=(FrontEnd.LIGHTNING, FrontEnd.ACCELERATE, FrontEnd.RECIPES))
    """Give loggers ``grad_norm`` and ``overflow/...`` (skipped updates, skips in a row, dropped requests, loss
    scale) of the updates that are logged. A metric of yours by the same name is left as it is."""
    reduce_gradients_at: str | None = option(
        None, Choice((None, "backward", "request", "window", "auto")), key="requestzero.reduce_gradients_at"
    )
    """When gradients are summed over the ranks: ``"backward"``, in every backward (stage 2 only); ``"request"``, at
    request ends; ``"window"``, once, before the step; ``"auto"``, as ``"window"``, at stage 2 only while memory for the
    model's gradients is free on every rank, else as ``"backward"``. Until then every rank keeps the gradients of the
    whole model, in the dtype of the accumulation. ``None``: at stage 1 ``"window"``, at stage 2 ``"backward"``. With
    ``on_overflow`` ``"raise"`` or ``"drop_request"``, which look at every request, ``"request"`` in the place of
    ``"window"``."""
    abort: bool = option(False, Boolean(), key="requestzero.abort")
    """Let ``engine.abort_request`` undo any request at any time until the next one begins, and the ranks agree before
    every backward that all of them run it, so that one rank alone can abort a request. Costs that agreement, at stage 1
    a reduction for every request (once per window otherwise), and at most one copy of the gradient sums for every
    request but a window's first: none at stage 1, nor with CPU offload and fp32 accumulation on a 16-bit model. Without
    it only a request that needs no copy can be aborted, by all ranks together."""
    rank_agreement: bool = option(True, Boolean(), key="requestzero.rank_agreement")
    """Let the data-parallel ranks agree, once per request, on what they are about to do, so that ranks that do not
    do the same raise an error instead of waiting for each other. Can be turned off where equal numbers of micro-batches
    are guaranteed."""
    rank_dependent_micro_batches: bool = option(
        False,
        Boolean(),
        key="requestzero.rank_dependent_micro_batches",
        front_ends=(FrontEnd.FABRIC, FrontEnd.ACCELERATE),
    )
    """Allow the ranks to run different numbers of micro-batches in an update window, at least one each: nothing but
    the window's sum is reduced then (``reduce_gradients_at="window"``), and the ranks agree once per step instead of
    once per request. A planned loader needs no fillers then (``PlannedLoader(equal_micro_batches=False)``). Not with
    ``normalization="mean"``, whose divisor would differ."""
    rank_dependent_parameters: bool = option(False, Boolean(), key="requestzero.rank_dependent_parameters")
    """Allow parameters to take part on some ranks only (adapters, experts, conditional branches), as
    ``find_unused_parameters`` does in DDP: gradients are reduced at the end of the backward, request or window, with
    zeros for absent ones, which gives up the overlap of reduction with the backward."""
    gradients_in_hooks: bool = option(True, Boolean(), front_ends=(FrontEnd.LIGHTNING, FrontEnd.RECIPES))
    """Let ``p.grad`` be the window's gradient, summed, averaged and divided, in ``on_before_optimizer_step`` and
    ``configure_gradient_clipping`` where the module or a callback has such a hook, and let its changes count, as under
    DDP. Each rank holds the whole gradient meanwhile."""
    compare_weights: bool = option(True, Boolean(), key="requestzero.compare_weights")
    """Compare this rank's part of the weights with the master weights before every step, so that weights that were
    written through ``param.data``, or at stage 3, count like any other. It costs a pass over the partition, with CPU
    offload also a copy of it to the host; false leaves it out, and only writes that autograd counts are seen (in-place
    operations, ``load_state_dict``, ``param.data = ...``), and none at stage 3."""
    overflow: OverflowSettings = field(default_factory=OverflowSettings)
    """See :class:`OverflowSettings`."""

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "overflow", OverflowSettings.build(self.overflow))


OWNERS = (RequestZeROSettings, OverflowSettings)
"""The classes that declare options."""
