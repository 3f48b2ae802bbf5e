"""What all ranks have to raise."""

from __future__ import annotations

import re

from support.rank_scenarios import Outcome


def assert_all_raise(outcomes: list[Outcome], *lines: str, seconds: float = 5.0) -> None:
    """The same RankDisagreementError on all ranks, with these lines (patterns), in time, and again on further use."""
    assert {each.error for each in outcomes} == {"RankDisagreementError"}, outcomes
    assert len({each.text for each in outcomes}) == 1, outcomes
    for line in lines:
        assert re.search(line, outcomes[0].text), outcomes[0].text
    assert all(each.again == each.text for each in outcomes)
    assert max(each.seconds for each in outcomes) < seconds
