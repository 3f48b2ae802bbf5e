"""The error of ranks that do not do the same."""

from __future__ import annotations


class RankDisagreement(RuntimeError):
    """The data-parallel ranks have come to different things to do: raised on all of them, with the same text.

    The engine cannot be used any more: some of its collectives may be under way on some ranks only.
    """
