"""A plugin of pytest for the cells of the matrix: notes why a test has ended in an error that an older DeepSpeed gets.

What counts is the exception itself, with those that it was raised from: of a test, or on its ranks or in its program.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from requestzero.environment.versions import UNPROVED

REFUSALS = {
    f"{UNPROVED}=1 python -m requestzero.doctor": "stage 3",
    "Muon is not allowed with this version of DeepSpeed": "Muon",
    "Muon with reduce scatter does not support optimizer offload": "Muon",
    "Extra inputs are not permitted": "an option of ZeRO that came later",
    "before 0.19.8 is not known here": "the doctor's rules for that release",
}
"""Parts of the messages that refuse something with an older DeepSpeed, and what that is."""
PROPERTY = "refused"
"""Name of the property in the report: what the test was refused."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None:
        found = (reason for text in texts(call.excinfo.value) for part, reason in REFUSALS.items() if part in text)
        reason = next(found, None)
        if reason is not None:
            item.user_properties.append((PROPERTY, reason))  # written at the test's end, from there
    return report


def texts(error: BaseException | None) -> Iterator[str]:
    """Return the texts of the exceptions that a test has ended in."""
    while error is not None:
        errors = getattr(error, "errors", None)  # of ranks; other exceptions have a method of that name
        yield from errors if errors and isinstance(errors, (list, tuple)) else [str(error)]
        error = error.__cause__ or error.__context__
