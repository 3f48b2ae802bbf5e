"""The rule by which update windows end."""

from __future__ import annotations

from dataclasses import dataclass

from requestzero.config.validation import check_count


@dataclass(frozen=True)
class WindowRule:
    """A window ends with the request that completes the given number; without one, every request is planned alone.

    Raises:
        ValueError: both are given, or one that is no whole number above 0.
    """

    requests: int | None = None
    """Requests in a window."""
    tokens: int | None = None
    """Minimum number of tokens in a window, over all ranks and without padding."""

    def __post_init__(self) -> None:
        check_count("requests_per_update", self.requests)
        check_count("tokens_per_update", self.tokens)
        if self.requests is not None and self.tokens is not None:
            raise ValueError(
                f"requests_per_update={self.requests} and tokens_per_update={self.tokens} are not allowed together: "
                "give one of them."
            )

    @property
    def marks(self) -> bool:
        """True where the plan knows the ends of windows; false where the training loop counts requests."""
        return self.requests is not None or self.tokens is not None

    def is_complete(self, requests: int, tokens: int) -> bool:
        """Return true if a window of so many requests and tokens is complete."""
        if self.tokens is not None:
            return tokens >= self.tokens
        return requests >= (self.requests or 1)
