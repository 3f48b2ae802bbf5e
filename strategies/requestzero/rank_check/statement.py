"""What a rank is about to do, as integers that ranks compare and as text for people."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from itertools import zip_longest


class Kind(IntEnum):
    """What comes next on a rank."""

    REQUEST = 1
    """Begins a request."""
    MICRO_BATCH = 2
    """Runs a backward that was not announced."""
    SKIP = 3
    """Leaves a micro-batch out."""
    ORDER = 4
    """Reduces gradients in another order than before."""
    REDUCTION = 5
    """Waits in a gradient reduction; never stated."""
    STEP = 6
    """Steps, which was not announced."""
    APPLY = 7
    """Waits within the step; never stated."""
    BATCH = 8
    """Waits before a batch; never stated."""
    END_OF_DATA = 9
    """Has no more data."""
    FAILURE = 10
    """Cannot go on."""
    DESTROYED = 11
    """Has destroyed its engine; never stated."""
    REQUEST_END = 12
    """Ends a request of which the number of micro-batches was not announced, where that is collective."""
    JUDGEMENT = 13
    """Waits at a request's end; never stated."""
    CHECKPOINT = 14
    """Saves or loads a checkpoint."""


NUMBERS = 5
"""How many integers a statement is."""


@dataclass(frozen=True)
class Statement:
    """One rank's next act and how far it has come. Ranks agree where :meth:`numbers` are equal."""

    kind: Kind
    request: int
    """Requests begun so far."""
    micro_batch: int
    """Micro-batches of that request that are done."""
    window: int
    """Micro-batches of the open update window."""
    announced: tuple[int, ...] = ()
    """What was announced of the request, as numbers."""
    content: str = ""
    """Whatever else has to be equal."""
    text: str = ""
    """For people; not compared."""

    def numbers(self) -> list[int]:
        """``NUMBERS`` integers that fit into int64, as do their negatives."""
        compared = (self.announced, self.content)
        return [self.kind, self.request, self.micro_batch, self.window, _hash(repr(compared))]

    def place(self) -> list[int]:
        """Equal for ranks that may be waiting for one thing, or for neighbouring parts of it."""
        return [self.kind, self.request, self.micro_batch]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


@dataclass(frozen=True)
class Account:
    """A statement for another rank's eyes."""

    place: list[int]
    text: str
    parameters: list[str] | None = None
    """Names of the parameters whose gradients this backward has reduced so far, in order."""
    window: int = 0
    """Micro-batches of the open update window."""

    @classmethod
    def of(cls, statement: Statement, parameters: list[str] | None = None) -> Account:
        return cls(statement.place(), statement.text, parameters, statement.window)

    @classmethod
    def parse(cls, text: str) -> Account:
        return cls(**json.loads(text))

    def dump(self) -> str:
        return json.dumps(asdict(self))


HINT = (
    "All data-parallel ranks have to run the same requests with the same number of micro-batches over the same "
    "parameters, and to step and to end together."
)
PARAMETERS_HINT = (
    "Where parameters take part on some ranks only (adapters, experts, conditional branches), set "
    "rank_dependent_parameters=true."
)
_NAMES_SHOWN = 5


def compose(accounts: Sequence[Account | None], head: str | None = None) -> str:
    """The error's text: what every rank is about to do (``None``: it has not said), under ``head`` if given."""
    said = [account for account in accounts if account is not None]
    if any(account.place[0] == Kind.FAILURE for account in said):
        head = "A data-parallel rank cannot go on:"
    texts = [_text(account, said) for account in accounts]
    lines = [f"  {_ranks([r for r, t in enumerate(texts) if t == text])}: {text}" for text in dict.fromkeys(texts)]
    if head is not None:
        return "\n".join([head, *lines])
    hint = PARAMETERS_HINT if _orders_differ(said) else HINT
    return "\n".join(["The data-parallel ranks disagree about what comes next:", *lines, hint])


def _text(account: Account | None, said: list[Account]) -> str:
    if account is None:
        return "has not said (it computes, or has ended)"
    difference = _difference(account, said) if _orders_differ(said) else ""
    return account.text + difference + _window(account, said)


def _window(account: Account, said: list[Account]) -> str:
    """The size of the window, where that is the difference between ranks that say the same."""
    if len({other.window for other in said if other.text == account.text}) == 1:
        return ""
    return f"; micro-batches in its update window: {account.window}"


def _orders_differ(said: list[Account]) -> bool:
    """Whether ranks are in the reduction of the same micro-batch, one of them in an order of its own."""
    kinds = {account.place[0] for account in said}
    return Kind.ORDER in kinds and kinds <= {Kind.ORDER, Kind.REDUCTION} and len({str(a.place[1:]) for a in said}) == 1


def _difference(account: Account, said: list[Account]) -> str:
    """The parameters from where the ranks part, those first that not all ranks have had until now."""
    orders = [other.parameters or [] for other in said]
    together = next((i for i, names in enumerate(zip_longest(*orders)) if len(set(names)) > 1), len(orders[0]))
    rest = (account.parameters or [])[together:]
    alone = [name for name in rest if not all(name in order for order in orders)]
    return f"; where the ranks part: {_names(alone or rest) or 'nothing yet'}"


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def _ranks(ranks: list[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
