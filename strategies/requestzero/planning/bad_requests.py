"""Requests that cannot be trained on as they are: an error names them, unless the user has chosen otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from requestzero.config.validation import Choice, check

ON_LONG_TEXT = Choice(("error", "truncate", "own_micro_batch", "skip"), quoted=False)
ON_BAD_REQUEST = Choice(("error", "skip"), quoted=False)


@dataclass(frozen=True)
class BadRequestPolicy:
    """Treatment of bad requests and texts. Those that are left out are counted.

    Raises:
        ValueError: an unknown choice.
    """

    on_long_text: str = "error"
    """A text with more tokens than a micro-batch may have: ``"error"``; ``"truncate"`` keeps its first tokens;
    ``"own_micro_batch"`` runs it alone, beyond the budget; ``"skip"`` leaves it out of its request."""
    on_empty_request: str = "error"
    """A request without texts, or a text without tokens: ``"error"``; ``"skip"`` leaves it out."""
    on_untrainable_request: str = "error"
    """A request without a token to train on: ``"error"``; ``"skip"`` leaves it out."""

    def __post_init__(self) -> None:
        check("on_long_text", self.on_long_text, ON_LONG_TEXT)
        check("on_empty_request", self.on_empty_request, ON_BAD_REQUEST)
        check("on_untrainable_request", self.on_untrainable_request, ON_BAD_REQUEST)


@dataclass
class UsableRequest:
    """The texts of a request that are trained on."""

    positions: list[int] = field(default_factory=list)
    """Their positions in the request."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each."""
    truncated: set[int] = field(default_factory=set)
    """Positions of texts that are cut to the budget."""
    skipped_texts: int = 0
    """Number of texts that are left out."""


def usable(
    name: str | int, lengths: Sequence[int], trainable: Sequence[int] | None, tokens: int, policy: BadRequestPolicy
) -> UsableRequest:
    """Return the texts of a request that are trained on; none where the whole request is left out.

    Args:
        name: name of the request, for messages.
        lengths: tokens of each of its texts.
        trainable: tokens to train on of each text, if known.
        tokens: token budget of a micro-batch.
        policy: treatment of bad requests and texts.

    Raises:
        ValueError: the request is bad and ``policy`` says ``"error"``.
    """
    if len(lengths) == 0 and policy.on_empty_request == "error":
        raise ValueError(
            f"Request {name!r} is empty: it has no text. Leave it out, or use on_empty_request='skip' to skip it."
        )
    request = UsableRequest()
    for position, length in enumerate(lengths):
        _add_text(request, name, position, length, tokens, policy)
    if request.positions and trainable is not None and not any(trainable[p] for p in request.positions):
        if policy.on_untrainable_request == "error":
            raise ValueError(
                f"Request {name!r} has no token to train on: leave it out, or use on_untrainable_request='skip' to "
                "skip it."
            )
        return UsableRequest(skipped_texts=request.skipped_texts)
    return request


def _add_text(
    request: UsableRequest, name: str | int, position: int, length: int, tokens: int, policy: BadRequestPolicy
) -> None:
    if length < 1:
        if policy.on_empty_request == "error":
            raise ValueError(
                f"Text {position} of request {name!r} has {length} tokens: leave it out, or use "
                "on_empty_request='skip' to skip it."
            )
        request.skipped_texts += 1
        return
    if length > tokens:
        if policy.on_long_text == "error":
            raise ValueError(
                f"Text {position} of request {name!r} has {length:,} tokens, and a micro-batch may have {tokens:,}: "
                "raise tokens_per_micro_batch, or use on_long_text='truncate', 'own_micro_batch' or 'skip'."
            )
        if policy.on_long_text == "skip":
            request.skipped_texts += 1
            return
        if policy.on_long_text == "truncate":
            request.truncated.add(position)
            length = tokens
    request.positions.append(position)
    request.lengths.append(length)
