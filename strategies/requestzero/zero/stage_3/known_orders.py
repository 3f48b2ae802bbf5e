"""The orders in which forwards of an engine have gathered weights, and the one that the running forward follows."""

from __future__ import annotations

from enum import Enum

from torch import nn

# Programs with several kinds of forwards, or with loops of different lengths, have as many orders.
_KEPT = 16


class Action(Enum):
    """Parts of a forward that concern the other ranks."""

    START = "DeepSpeed begins its record of the order of modules; again where a module calls itself"
    GATHER = "the weights of a module are gathered"
    RELEASE = "they are released"
    BACKWARD = "a backward begins"


Step = tuple[Action, nn.Module | None]


class KnownOrders:
    """Compares the running forward with those before it, step by step.

    Ranks that run the same modules know the same orders, and follow the same one. Releases are left out of the
    comparison: no rank waits for another there, and one that has caught an exception in a module has not made them all.
    """

    def __init__(self) -> None:
        self._known: list[list[Step]] = []  # the last one first
        self._now: list[Step] = []
        self._followed: list[Step] | None = None
        self._place = 0  # steps of the followed order that are done

    @property
    def follows(self) -> bool:
        """True while the running forward has made the steps of one before it."""
        return self._followed is not None

    def begin(self) -> None:
        """Keep the forward before, and begin another, which follows it until it makes another step."""
        if self._now:
            known = self._followed if self._followed is not None and self._next() == len(self._followed) else None
            others = [order for order in self._known if order is not known]
            self._known = [known or self._now, *others][:_KEPT]
        self._now, self._place = [], 0
        self._followed = self._known[0] if self._known else None

    def forget_forward(self) -> None:
        """Forget the running forward, which may have been left in the middle."""
        self._now, self._followed, self._place = [], None, 0

    def expects(self, step: Step) -> bool:
        """Return true if ``step`` is the next one of the followed order."""
        if self._followed is None:
            return False
        place = self._next()
        return place < len(self._followed) and self._followed[place] == step

    def note(self, step: Step) -> None:
        """Note a step; where it is another than expected, follow an order that has made it too, if there is one."""
        if step[0] is not Action.RELEASE:
            if self.expects(step):
                self._place = self._next() + 1
            elif self._followed is not None:
                self._follow_another([*filter(_is_compared, self._now), step])
        self._now.append(step)

    def rest(self) -> list[Step]:
        """Return the steps of the followed order that are left, up to the next backward."""
        left = [] if self._followed is None else self._followed[self._place :]
        end = next((i for i, (action, _) in enumerate(left) if action is Action.BACKWARD), len(left))
        return left[:end]

    def _next(self) -> int:
        """Return the index of the followed order's next step that is compared."""
        assert self._followed is not None
        place = self._place
        while place < len(self._followed) and not _is_compared(self._followed[place]):
            place += 1
        return place

    def _follow_another(self, done: list[Step]) -> None:
        self._followed = None
        for order in self._known:
            compared = [index for index, step in enumerate(order) if _is_compared(step)][: len(done)]
            if [order[index] for index in compared] == done:
                self._followed, self._place = order, compared[-1] + 1
                return


def _is_compared(step: Step) -> bool:
    return step[0] is not Action.RELEASE
