"""How far a rank has come, and its intents in those terms."""

from __future__ import annotations

from collections.abc import Callable

from requestzero.data.micro_batch import RequestId
from requestzero.rank_check.intent import Intent, Kind
from requestzero.rank_check.request import Request, Window


class Progress:
    """The request at hand and the open window.

    Args:
        window: returns the engine's open update window.
        equal_micro_batches: ranks that agree are at the same micro-batch; else only in the same window.
    """

    def __init__(self, window: Callable[[], Window], equal_micro_batches: bool = True) -> None:
        self._window = window
        self.equal_micro_batches = equal_micro_batches
        self.windows = 0
        """Times that the ranks have agreed to step."""
        self.request = Request()
        self.reductions = 0
        """Reductions that this rank has begun. On a GPU they are only queued when the next vote comes."""
        self.gathers = 0
        """Gathers of weights that this rank has begun, likewise."""

    @property
    def window(self) -> Window:
        """The open update window."""
        return self._window()

    def begin(self, name: RequestId, micro_batches: int | None, window_end: bool | None) -> None:
        """Put a new request in the place of the last."""
        number = self.request.number + 1
        self.request = Request(number, name, micro_batches, window_end, closed=False, window=self.window)

    def count_micro_batch(self, request_ended: bool) -> None:
        """Count a micro-batch that was run or left out."""
        self.request.done += 1
        self.request.closed = request_ended
        self.request.window = self.window

    # --- intents ----------------------------------------------------------------------------------------------------

    def intent(self, kind: Kind, text: str, content: str = "", announced: tuple[int, ...] = ()) -> Intent:
        """Return an intent at this place."""
        request = self.request
        if not self.equal_micro_batches:
            return Intent(kind, self.windows, micro_batch=0, window=0, content=content, text=text)
        return Intent(kind, request.number, request.done, self.window.micro_batches, announced, content, text)

    def begins(self) -> Intent:
        """Return the intent to begin the request, as announced."""
        request = self.request
        size = "" if request.micro_batches is None else f" of {request.micro_batches} micro-batches"
        end = ", with a step after it" if request.window_end else ", with no step after it"
        end = "" if request.window_end is None else end
        return self.intent(Kind.REQUEST, f"begins {request}{size}{end}", repr(request.name), request.announced)

    def forwards(self, kind: Kind = Kind.FORWARD) -> Intent:
        """Return the intent to run another forward of the request."""
        request = self.request
        text = f"runs forward {request.forwards + (kind == Kind.FORWARD)} of {request}"
        return self.intent(kind, text, str(request.forwards))

    def evaluates(self, kind: Kind = Kind.EVALUATION) -> Intent:
        """Return the intent to run a forward without gradients."""
        return self.intent(kind, f"runs a forward without gradients after {self}", "evaluation")

    def reduces(self, kind: Kind = Kind.REDUCTION, content: str = "") -> Intent:
        """Return the intent to reduce gradients of the micro-batch at hand, or what waits after its request."""
        return self.intent(kind, f"reduces {self.gradients}", content)

    @property
    def gradients(self) -> str:
        """The gradients that are reduced here, as text."""
        if self.request.closed:
            return f"the gradients that wait after {self}"
        return f"the gradients of micro-batch {self.request.done + 1} of {self.request}"

    def votes(self, kind: Kind, text: str, place: str = "") -> Intent:
        """Return the intent to go on with the request, or to abort it, wherever in it a rank is between reductions.

        Args:
            kind: of vote.
            text: for messages.
            place: of those that go on; they have begun the same gathers too.
        """
        content = f"{place} {self.gathers}"
        return Intent(kind, self.request.number, self.reductions, window=0, content=content, text=text)

    def steps(self, kind: Kind) -> Intent:
        """Return the intent to step."""
        return self.intent(kind, f"steps after {self}")

    def ends_request(self, kind: Kind) -> Intent:
        """Return the intent to end the request."""
        return self.intent(kind, f"ends {self.request} after micro-batch {self.request.done}")

    def comes_to_next_batch(self) -> Intent:
        """Return the intent to get the next batch."""
        return self.intent(Kind.BATCH, f"comes to its next batch after {self}")

    def __str__(self) -> str:
        return f"micro-batch {self.request.done} of {self.request}" if self.request.number else "no request"
