"""Errors of this package that a caller may want to catch by type."""

from __future__ import annotations


class GradientOverflowError(RuntimeError):
    """The gradient of an update window is not finite, and ``overflow`` says that the run ends.

    Raised on all ranks with the same text. Weights and optimizer state are those before the window, the window is
    discarded, and the update counts as attempted and skipped: a caller may catch the error and go on.
    """


class AbortRequest(Exception):
    """Raise it to abort the request at hand: the others of its window are not affected.

    It does not leave the block of the request (``engine.request()``, ``requests.request()`` under Accelerate, or a
    ``training_step`` of Lightning), which goes on behind its end. Where another rank aborts the request, a backward
    raises it on this one; outside of such a block call ``engine.abort_request(reason)`` then.
    """


class DuplicateRequestError(ValueError):
    """``begin_request(id, once=True)`` was given the name of a request that is in the window, or was applied."""


class RankDisagreementError(RuntimeError):
    """The data-parallel ranks are about to do different things.

    Raised on all ranks with the same text. The engine cannot be used any more: some of its collectives may be pending
    on some ranks only.
    """


RankDisagreement = RankDisagreementError
"""Former name of :class:`RankDisagreementError`."""
