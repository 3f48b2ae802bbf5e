"""Rules for single values: values that keep them, values that break them, and the message then."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from requestzero.config.validation import (
    Boolean,
    Choice,
    Count,
    Number,
    Rule,
    Weight,
    WholeNumber,
    as_mapping,
    check,
    check_count,
    check_weight,
    problem,
)

# Rule, its description, values that keep it, values that break it.
RULES: list[tuple[Rule, str, list[Any], list[Any]]] = [
    (Choice((1, 2)), "one of 1, 2", [1, 2], [True, 2.0, "1", None, [1]]),
    (Choice((None, "fp32")), "one of None, 'fp32'", [None, "fp32"], ["FP32", 0]),
    (Choice(("stop", "skip"), quoted=False), "one of stop, skip", ["stop"], ["Stop", ""]),
    (Boolean(), "true or false", [True, False], [1, 0, "true", None]),
    (Boolean(also="auto"), "true, false or 'auto'", [True, "auto"], [1, "Auto", None]),
    (WholeNumber(0, 127), "a whole number of at least 0 and at most 127", [0, 127], [-1, 128, 1.0, True, "1", None]),
    (WholeNumber(1, as_float=True), "a whole number of at least 1", [1, 16.0], [0, 0.5, math.nan, math.inf, True]),
    (Count(), "a whole number above 0", [1, 10**12], [0, -1, 1.0, True, None]),
    (Count(even=True, unit="elements"), "an even whole number above 0, in elements", [2], [1, 3, 0, "2"]),
    (Count(also="auto"), "a whole number above 0, or 'auto'", [1, "auto"], [0, "any"]),
    (Number(lowest=0), "a number of at least 0", [0, 0.5, 10**400], [-1, math.inf, math.nan, True, "0", None]),
    (Number(above=0), "a number above 0", [1e-9], [0, -1.0]),
    (Number(lowest=0, finite=False), "a number of at least 0", [math.inf], [math.nan, -math.inf]),
]


@pytest.mark.parametrize(("rule", "described", "kept", "broken"), RULES, ids=lambda value: str(value)[:30])
def test_a_rule(rule: Rule, described: str, kept: list[Any], broken: list[Any]) -> None:
    assert str(rule) == described
    for value in kept:
        assert rule.accepts(value), value
        assert problem("name", value, rule) is None
        check("name", value, rule)
    for value in broken:
        assert not rule.accepts(value), value
        text = f"name={value!r} is not allowed: use {described}."
        assert problem("name", value, rule) == text
        with pytest.raises(ValueError, match="is not allowed") as raised:
            check("name", value, rule)
        assert str(raised.value) == text


def test_a_text_may_show_more_than_name_and_value() -> None:
    text = problem("size", 0, Count(), given="Loader(size=0)", advice="give one")
    assert text == "Loader(size=0) is not allowed: give one."


def test_a_mapping() -> None:
    assert as_mapping("section", {"a": 1}) == {"a": 1}
    with pytest.raises(ValueError, match=r"^section=\[1\] is not allowed: give a mapping of its options\.$"):
        as_mapping("section", [1])


def test_a_count_may_be_left_out() -> None:
    check_count("tokens", None)
    check_count("tokens", 1)
    with pytest.raises(ValueError, match=r"^tokens=0 is not allowed: give a whole number above 0\.$"):
        check_count("tokens", 0)
    with pytest.raises(ValueError, match=r"^Loader\(tokens=True\) is not allowed: give a whole number above 0\.$"):
        check_count("tokens", True, owner="Loader")


@pytest.mark.parametrize("weight", [0, 3, 0.5, torch.tensor(2), torch.ones(1, 1, dtype=torch.bfloat16)])
def test_a_weight(weight: Any) -> None:
    assert Weight().accepts(weight)
    check_weight(weight)


@pytest.mark.parametrize(
    ("weight", "given"),
    [
        (-1, "-1"),
        (math.nan, "nan"),
        (True, "True"),
        ("3", "'3'"),
        (torch.ones(2), r"a tensor of shape \[2\] and dtype float32"),
        (torch.tensor(True), r"a tensor of shape \[\] and dtype bool"),
        (torch.tensor(1j), r"a tensor of shape \[\] and dtype complex64"),
    ],
)
def test_what_is_no_weight(weight: Any, given: str) -> None:
    with pytest.raises(ValueError, match=rf"^weight={given} is not allowed: use a finite number of at least 0, such"):
        check_weight(weight)


class Unreadable:
    """A tensor on a device for which a read would have to wait."""

    shape = (1,)
    dtype = "torch.float32"

    def __init__(self, elements: int) -> None:
        self.elements = elements

    def numel(self) -> int:
        return self.elements

    def is_complex(self) -> bool:
        return False

    def __repr__(self) -> str:
        raise AssertionError("the tensor was read")


def test_a_tensor_is_not_read() -> None:
    check_weight(Unreadable(1))
    with pytest.raises(ValueError, match=r"^weight=a tensor of shape \[1\] and dtype float32 is not allowed"):
        check_weight(Unreadable(2))
