"""The cut through all tests: some functions of every file, one parameter set of each, the same in every process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.fast import PER_FILE, fast_cut


@dataclass(frozen=True)
class Item:
    """A collected test."""

    nodeid: str
    slow: bool = False

    def get_closest_marker(self, name: str) -> str | None:
        return name if self.slow and name == "slow" else None


def test_one_set_of_every_quick_function() -> None:
    functions = [f"tests/{number}.py::test_it" for number in range(40)]
    items: list[Any] = [Item(f"{name}[{value}]") for name in functions for value in "abc"]
    items += [Item("tests/b.py::test_slow[a]", slow=True), Item("tests/b.py::test_partly[a]", slow=True)]
    items += [Item("tests/b.py::test_partly[b]"), Item("tests/b.py::test_plain")]
    kept, others = fast_cut(items)
    names = [item.nodeid for item in kept]
    assert [name.split("[")[0] for name in names[:40]] == functions
    assert names[40:] == ["tests/b.py::test_partly[b]", "tests/b.py::test_plain"]
    assert {name[-2] for name in names[:40]} == {"a", "b", "c"}, "functions get different sets"
    assert sorted(kept + others, key=items.index) == items
    assert fast_cut(items) == (kept, others)


def test_of_a_long_file_every_nth_function() -> None:
    items: list[Any] = [
        Item(f"tests/long.py::test_{number:02}[{value}]") for number in range(3 * PER_FILE) for value in "ab"
    ]
    items += [Item("tests/short.py::test_one"), Item("tests/short.py::test_two")]
    kept, others = fast_cut(items)
    names = [item.nodeid.split("[")[0] for item in kept]
    assert names[:PER_FILE] == [f"tests/long.py::test_{number:02}" for number in range(0, 3 * PER_FILE, 3)]
    assert names[PER_FILE:] == ["tests/short.py::test_one", "tests/short.py::test_two"]
    assert len(kept) + len(others) == len(items)
