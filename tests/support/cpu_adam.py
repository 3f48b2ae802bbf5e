"""DeepSpeed's CPU Adam, compiled once before any test: a rank that did it could be killed by a test's time limit."""

from __future__ import annotations

from collections.abc import Callable

from requestzero.environment import cpu_adam


def compile_before_tests(say: Callable[[str], None]) -> None:
    """Compile the operator; a failure is told, and fails the tests that need it."""
    try:
        cpu_adam.compile_cpu_adam(say)
    except RuntimeError as error:
        say(str(error))
