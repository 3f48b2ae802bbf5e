"""Overflow options that contradict each other, found all at once and told in the same words by every front end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from requestzero.config.option_record import Option

UNEQUAL_MEANS = (
    "the ranks would divide by different numbers of micro-batches. Use 'token', where each micro-batch reports its "
    "weight (1 for the mean over all of them), or 'sum'."
)
"""Why unequal micro-batches have no mean."""

# DeepSpeed's defaults, against which a value that is given alone is held.
_INITIAL_SCALE_POWER, _HYSTERESIS, _MIN_LOSS_SCALE = 16, 2, 1


def contradictions(options: Mapping[str, Option], given: Mapping[str, Any], precision: str | None) -> list[str]:
    """Return what cannot be meant together; each text names the options that disagree and says what to do.

    Args:
        options: of :class:`~requestzero.config.options.OverflowSettings`, by name.
        given: values by name, each an allowed one; ``None`` is not given.
        precision: the model's dtype, ``"fp32"``, ``"bf16"`` or ``"fp16"``; ``None`` where it is not known yet, which
            finds only what no precision could make right.
    """
    known = _Given(options, {name: value for name, value in given.items() if value is not None}, precision)
    return [problem for rule in _RULES for problem in rule(known)]


@dataclass(frozen=True)
class _Given:
    """The options that were given, and the precision."""

    options: Mapping[str, Option]
    values: Mapping[str, Any]
    precision: str | None

    def shown(self, name: str) -> str:
        """Return an option with its value, and its key in a DeepSpeed config where that is called otherwise."""
        path = self.options[name].path
        elsewhere = [key for key in self.options[name].keys if key != path]
        return f"{path}={self.values[name]!r}" + (f" ({elsewhere[0]})" if elsewhere else "")

    def all_shown(self, names: Sequence[str]) -> str:
        return ", ".join(map(self.shown, names))

    @property
    def loss_scale_options(self) -> list[str]:
        """The options that only fp16 has."""
        return [name for name, item in self.options.items() if name in self.values and item.keys == (f"fp16.{name}",)]

    @property
    def dynamic_options(self) -> list[str]:
        """The options of dynamic loss scaling."""
        return [name for name in self.loss_scale_options if name != "loss_scale"]

    @property
    def is_dynamic(self) -> bool:
        """True where the loss scale is dynamic, as far as is known: in fp16 it is unless it is static."""
        if self.values.get("loss_scale"):
            return False
        return self.precision == "fp16" or (self.precision is None and bool(self.loss_scale_options))


def _scaling_outside_fp16(given: _Given) -> Iterator[str]:
    names = given.loss_scale_options
    if names and given.precision in ("fp32", "bf16"):
        scale, them = ("scales", "it") if len(names) == 1 else ("scale", "them")
        yield (
            f"{given.all_shown(names)} {scale} fp16 losses, but the precision is {given.precision}: leave {them} out, "
            "or train in fp16."
        )


def _static_with_dynamic(given: _Given) -> Iterator[str]:
    names = given.dynamic_options
    if given.values.get("loss_scale") and names:
        are, them = ("is", "it") if len(names) == 1 else ("are", "them")
        yield (
            f"{given.shown('loss_scale')} is a static loss scale, but {given.all_shown(names)} {are} for dynamic loss "
            f"scaling: leave {them} out, or set overflow.loss_scale=0."
        )


def _fp16_without_check(given: _Given) -> Iterator[str]:
    if given.precision == "fp16" and given.values.get("check_grad_overflow") is False:
        yield (
            f"{given.shown('check_grad_overflow')} is not possible in fp16, whose loss scaling needs the check: leave "
            "it out, or train in bf16."
        )


def _policy_without_check(given: _Given) -> Iterator[str]:
    wanted = [name for name in ("on_overflow", "max_consecutive_skips") if given.values.get(name) not in (None, "skip")]
    check = given.values.get("check_grad_overflow")
    for name in wanted:
        if check is False:
            yield (
                f"{given.shown(name)} and {given.shown('check_grad_overflow')} disagree: without the check no overflow "
                "is seen. Turn it on, or leave the other out."
            )
        elif check is None and given.precision == "fp32":
            yield (
                f"{given.shown(name)} needs overflow.check_grad_overflow=true, which is off by default in fp32: turn "
                "it on, or leave both out."
            )


def _raise_with_limit(given: _Given) -> Iterator[str]:
    if given.values.get("on_overflow") == "raise" and "max_consecutive_skips" in given.values:
        yield (
            f"{given.shown('max_consecutive_skips')} and {given.shown('on_overflow')} disagree: no update is skipped "
            "where the first one raises. Leave one of them out."
        )


def _drop_with_dynamic_scale(given: _Given) -> Iterator[str]:
    if given.values.get("on_overflow") == "drop_request" and given.is_dynamic:
        yield (
            f"{given.shown('on_overflow')} and a dynamic loss scale (fp16.loss_scale=0, the default) disagree: an "
            "overflow says there that the scale is too large for all requests. Set a static overflow.loss_scale "
            "(fp16.loss_scale), or use 'skip'."
        )


def _smallest_above_first(given: _Given) -> Iterator[str]:
    power = given.values.get("initial_scale_power", _INITIAL_SCALE_POWER)
    smallest = given.values.get("min_loss_scale", _MIN_LOSS_SCALE)
    if not given.values.get("loss_scale") and smallest > 2.0**power:
        default = "" if "initial_scale_power" in given.values else ", the default"
        yield (
            f"{given.shown('min_loss_scale')} is above the first loss scale, {2**power} "
            f"(overflow.initial_scale_power={power}{default}): lower the one or raise the other."
        )


def _nothing_to_refill(given: _Given) -> Iterator[str]:
    if given.values.get("consecutive_hysteresis") and given.values.get("hysteresis") == 1:
        yield (
            f"{given.shown('consecutive_hysteresis')} and {given.shown('hysteresis')} disagree: a hysteresis of 1 "
            "tolerates no overflow, so nothing can be refilled. Leave one of them out."
        )


def _stops_before_scale_falls(given: _Given) -> Iterator[str]:
    most, hysteresis = given.values.get("max_consecutive_skips"), given.values.get("hysteresis", _HYSTERESIS)
    if most is not None and most <= hysteresis and given.is_dynamic:
        default = "" if "hysteresis" in given.values else ", the default"
        yield (
            f"{given.shown('max_consecutive_skips')} and overflow.hysteresis={hysteresis} (fp16.hysteresis{default}) "
            "disagree: the run would stop before a smaller loss scale has been tried. Allow at least "
            f"{hysteresis + 1} skips, or lower the hysteresis."
        )


_RULES = (
    _scaling_outside_fp16,
    _static_with_dynamic,
    _fp16_without_check,
    _policy_without_check,
    _raise_with_limit,
    _drop_with_dynamic_scale,
    _smallest_above_first,
    _nothing_to_refill,
    _stops_before_scale_falls,
)
