"""What must hold after a fault."""

from __future__ import annotations

from collections.abc import Iterator

from requestzero.faults.combination import Combination, Fault
from requestzero.faults.ranks import End


def broken(combination: Combination, ends: list[End], reference: list[End]) -> Iterator[str]:
    """Yield what does not hold after the training with the fault, as text.

    Args:
        combination: the fault.
        ends: of the ranks, in order.
        reference: those with whose updates theirs have to agree.
    """
    at_fault = ends[combination.rank]
    if not at_fault.record.injected:
        yield "the fault did not happen"
    elif combination.damages and combination.ends_process and at_fault.record.error is not None:
        yield f"the fault did not happen as meant: {at_fault.record.error}"
    for number, end in enumerate(ends):
        if not end.by_itself and not (combination.fault is Fault.STOP and number == combination.rank):
            yield f"rank {number} did not end"
        if not _is_prefix(end, reference[number]):
            yield f"rank {number} has applied another update"
    yield from _broken_errors(combination, ends)


def _is_prefix(end: End, reference: End) -> bool:
    return all(reference.record.updates.get(update) == found for update, found in end.record.updates.items())


def _broken_errors(combination: Combination, ends: list[End]) -> Iterator[str]:
    """Yield what does not hold for the errors: none where the fault has no consequence, else the same on all ranks."""
    speaking = [n for n in range(len(ends)) if not (combination.ends_process and n == combination.rank)]
    records = {number: ends[number].record for number in speaking}
    if all(record.ended for record in records.values()):
        if combination.ends_process:
            yield "the others have not noticed that a rank is gone"
        return
    if combination.fault is Fault.SLEEP:
        yield "a slow rank was not waited for"
    for number, record in records.items():
        if record.ended:
            yield f"rank {number} has ended as if nothing had happened"
        elif record.error is None and ends[number].by_itself:
            yield f"rank {number} has ended without an error (exit code {ends[number].code})"
    texts = [record.text for record in records.values() if record.error is not None]
    if texts and not any(all(cause in text for text in texts) for cause in texts):
        yield "the ranks have ended with different errors"


def outcome(combination: Combination, ends: list[End]) -> str:
    """Return how the training with the fault has ended, in a few words."""
    other = next(end for number, end in enumerate(ends) if number != combination.rank)
    if all(end.record.ended for end in ends):
        return "trains on"
    if not other.by_itself:
        return "hangs"
    if other.record.error is None:
        return f"exit code {other.code}"
    return f"{other.record.error}: {_summary(other.record.text)}"


def _summary(text: str) -> str:
    """Return the line of a message that says most."""
    lines = text.splitlines() or [""]
    named = [line.strip() for line in lines if "injected" in line or "failed after" in line]
    return (named or lines)[0][:160]
