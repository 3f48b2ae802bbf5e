"""The overflow options of a front end and those of its DeepSpeed config, put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from requestzero.config.nested import Config, look_up
from requestzero.config.options import OverflowSettings
from requestzero.config.precision import counts
from requestzero.config.translation import from_config, to_config


def overflow_to_config(overflow: OverflowSettings, precision: str) -> Config:
    """Return the DeepSpeed keys of the overflow options that were set.

    Args:
        overflow: the options.
        precision: the model's dtype, ``"fp32"``, ``"bf16"`` or ``"fp16"``.

    Raises:
        ValueError: options contradict each other or the precision; the text names all of them.
    """
    overflow.check(precision)
    return to_config(OverflowSettings, overflow.given(), precision)


def merged_overflow(
    overflow: OverflowSettings, config: Mapping[str, Any], precision: str | None = None
) -> OverflowSettings:
    """Return the options of a front end's arguments with those of its DeepSpeed config; they were compared before.

    Args:
        overflow: from the arguments.
        config: the DeepSpeed config.
        precision: the model's dtype; ``None`` where it is not known yet.

    Raises:
        ValueError: an option of the config is misplaced, or options contradict each other or the precision; the text
            names all of them.
    """
    given = {**from_config(OverflowSettings, config, precision), **overflow.given()}
    for name, value in given.items():
        OverflowSettings(**{name: value})  # each by itself, before they are compared
    problems = [*_misplaced(config, precision), *OverflowSettings.contradictions(given, precision)]
    if problems:
        raise ValueError("\n".join(problems))
    return OverflowSettings(**given)


def _misplaced(config: Mapping[str, Any], precision: str | None) -> Iterator[str]:
    """Yield what is wrong with the place of ``check_grad_overflow``, which in bf16 is upstream's and in fp32 ours."""
    own, upstream = "overflow.check_grad_overflow", "bf16.check_grad_overflow"
    fp16 = "the precision is fp16, which always checks: leave it out."
    if precision in ("bf16", "fp16") and look_up(config, own) is not None:
        told = fp16 if precision == "fp16" else f"the precision is bf16: use {upstream}."
        yield f"{own} in a DeepSpeed config is for fp32; {told}"
    if precision in ("fp32", "fp16") and look_up(config, upstream) is not None and counts(config, "bf16", precision):
        told = fp16 if precision == "fp16" else f"the precision is fp32: use {own}."
        yield f"{upstream} in a DeepSpeed config is for bf16; {told}"
