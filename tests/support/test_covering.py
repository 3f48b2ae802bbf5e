"""The cut of tests with many parameters: every pair of values stays, and fewer are not cut."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

from support.covering import cover_pairs


def item(function: str, **params: object) -> Any:
    return SimpleNamespace(nodeid=f"{function}[{params}]", callspec=SimpleNamespace(params=params))


def pairs(items: list[Any]) -> set[Any]:
    return set().union(*(combinations(each.callspec.params.items(), 2) for each in items))


def test_every_pair_of_values_stays() -> None:
    levels = {
        "stage": (1, 2),
        "offload": (False, True),
        "model": ("fp32", "bf16", "fp16"),
        "ends": (1, 2),
        "abort": (0, 1),
    }
    items = [item("test_many", **dict(zip(levels, values, strict=True))) for values in product(*levels.values())]
    kept, others = cover_pairs(items)
    assert pairs(kept) == pairs(items)
    assert len(kept) <= 9 < len(items)
    assert sorted(kept + others, key=items.index) == items
    assert cover_pairs(items) == (kept, others), "all processes choose the same"
    assert cover_pairs(kept[:1]) == (kept[:1], []), "what is asked for by name runs"


def test_fewer_parameters_are_not_cut() -> None:
    plain = SimpleNamespace(nodeid="test_plain")
    two = [item("test_two", stage=stage, offload=offload) for stage, offload in product((1, 2), (False, True))]
    together = [item("test_together", stage=n % 2, a=n, b=-n, c=str(n)) for n in range(4)]
    items: list[Any] = [plain, *two, *together]
    assert cover_pairs(items) == (items, [])
