"""The fault on the rank that meets it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from requestzero.faults.combination import DAMAGES, Combination, Fault, Point
from requestzero.faults.damage import damage_newest, write_half
from requestzero.faults.journal import Journal

_SLEEP = 2.0
"""Seconds; several looks of the ranks at each other."""
_SIGNALS = {Fault.KILL: signal.SIGKILL, Fault.TERM: signal.SIGTERM, Fault.STOP: signal.SIGSTOP}


class InjectedError(Exception):
    """The error that a fault raises."""


class Injector:
    """Wraps the functions of a training at which a fault can happen; it happens once, on one rank.

    Args:
        combination: the fault; ``None`` in a run without one.
        rank: of this process.
        folder: of the checkpoints.
        journal: of this rank.
    """

    def __init__(self, combination: Combination | None, rank: int, folder: Path, journal: Journal) -> None:
        self._combination, self._rank, self._folder, self._journal = combination, rank, folder, journal
        self._done = combination is None or combination.rank != rank
        self._disk_full = False

    def at(
        self, point: Point, function: Callable[..., Any], leave_out: bool = True, begins: bool = True
    ) -> Callable[..., Any]:
        """Return ``function`` with the fault before it.

        Args:
            point: the place in the training.
            function: called there.
            leave_out: a fault that returns ``None`` does it here.
            begins: the fault may happen here; else only a disk that is full already shows.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            if begins and self._due(point, leave_out):
                self._done = True
                self._journal.injected()
                if self._happens():
                    return None
            if self._disk_full and point is Point.SAVE and not leave_out:
                write_half(function, *args, **kwargs)
            return function(*args, **kwargs)

        return call

    def wrap(self, point: Point, owner: Any, name: str, leave_out: bool = True, begins: bool = True) -> None:
        """Put :meth:`at` in the place of a method or function of ``owner``."""
        setattr(owner, name, self.at(point, getattr(owner, name), leave_out, begins))

    @property
    def saves_window(self) -> bool:
        """True if the fault is to meet the first checkpoint within a window."""
        return self._combination is not None and self._combination.saves_window

    def left_out(self, point: Point, owner: Any, name: str) -> None:
        """Leave a call of ``owner`` out where the fault is to return ``None``; other faults happen deeper within it.

        What is read is damaged before it too: at the first file its checksums are compared already.
        """
        each = self._combination
        if each is not None and (each.fault is Fault.NONE or (each.damages and each.point is Point.LOAD)):
            self.wrap(point, owner, name)

    def _due(self, point: Point, leave_out: bool) -> bool:
        each = self._combination
        if self._done or each is None or each.point is not point:
            return False
        is_time = point is Point.LOAD or self._journal.place >= each.place
        return is_time and (leave_out or each.fault is not Fault.NONE)

    def _happens(self) -> bool:
        """Let the fault happen; return true if the function is to return ``None``."""
        each = self._combination
        assert each is not None
        if each.fault is Fault.RAISE:
            raise InjectedError(f"injected on rank {self._rank}: {each.point.value}")
        if each.fault is Fault.SLEEP:
            time.sleep(_SLEEP)
        elif each.fault in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[each.fault])
        elif each.fault in DAMAGES:
            damage_newest(self._folder, each.fault, self._rank)
            if each.ends_process:
                os.kill(os.getpid(), signal.SIGKILL)
        self._disk_full = each.fault is Fault.DISK_FULL
        return each.fault is Fault.NONE
