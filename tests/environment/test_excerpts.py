"""Definitions that are cut out by indentation: those that parsing the module finds, or none."""

from __future__ import annotations

from itertools import groupby
from textwrap import dedent

import pytest

from requestzero.environment.definitions import Source
from requestzero.environment.excerpts import Excerpts
from requestzero.environment.proved_sources import path_of, proved_sources
from requestzero.environment.versions import deepspeed_folder

MODULE = dedent(
    '''
    limit: int = 3


    @decorated
    @twice(
    )
    def function(a,
                 b=None):
        limit = a
        return limit


    @once
    def decorated(
        a,
    ):
        return a


    class Class:
        """A text
    that stands farther left."""

        scale = property(lambda self: 1)

        @property
        def value(self):
            step = 1
            return step

        @value.setter
        def value(self, new):
            pass

        def step(
            self,
        ) -> None:
            self.other(step=1,
                       value=2)
    # a comment
            return """
    left"""

        def __private(self):
            def inner():
                pass

        if flag:

            def conditional(self):
                pass

        def twice(self):
            return 1

        if flag:
            twice = None


    class Last:
        def step(self): return 5


    if flag:
        def function_of_two():
            pass


    def function_of_two(): ...
    '''
)


def found(text: str, qualname: str) -> list[str]:
    return [each.lines for each in Source(text).find(qualname).values()]


@pytest.mark.parametrize(
    "qualname",
    ["decorated", "Class.scale", "Class.value", "Class._Class__private", "Last.step", "Last"],
)
def test_a_definition_is_cut_out_whole(qualname: str) -> None:
    assert found(Excerpts(MODULE).of(qualname), qualname) == found(MODULE, qualname) != []


@pytest.mark.parametrize(
    "qualname", ["Class.conditional", "Class.twice", "function_of_two", "Class.Inner.step", "Gone"]
)
def test_what_may_stand_under_a_condition_is_left_out(qualname: str) -> None:
    assert found(Excerpts(MODULE).of(qualname), qualname) == []


def test_a_definition_that_is_cut_in_a_string_is_no_python() -> None:
    with pytest.raises(SyntaxError):
        found(Excerpts(MODULE).of("Class.step"), "Class.step")


def test_a_decorator_of_several_lines_is_missed() -> None:
    (cut,) = found(Excerpts(MODULE).of("function"), "function")
    (whole,) = found(MODULE, "function")
    assert whole == f"@decorated\n@twice(\n)\n{cut}"


def test_a_name_is_nowhere_only_if_nothing_defines_it() -> None:
    names = ("limit", "function", "Class.conditional", "Class.twice", "Class.other", "Class._Class__private", "Gone")
    assert [Excerpts(MODULE).is_nowhere(name) for name in names] == [False, False, False, False, True, False, True]


def test_every_definition_of_deepspeed_is_cut_out_whole() -> None:
    package = deepspeed_folder()
    assert package is not None
    for module, names in groupby(sorted(proved_sources().definitions), key=lambda name: name.partition(":")[0]):
        path = path_of(package, module)
        text = path.read_text() if path.exists() else ""
        whole, excerpts = Source(text), Excerpts(text)
        for qualname in (name.partition(":")[2] for name in names):
            wanted = [each.lines for each in whole.find(qualname).values()]
            assert found(excerpts.of(qualname), qualname) == wanted, (module, qualname)
