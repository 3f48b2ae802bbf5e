"""The patch of ``accelerate.Accelerator.__init__``, which brings an Accelerator and its plugin together.

HACK: Accelerate calls nothing of a plugin after ``deepspeed.initialize``, and a plugin never meets its Accelerator,
whose constructor is the one place where they come together. With the patch an Accelerator that is given one of our
plugins becomes a :class:`requestzero.accelerate.Accelerator`; without one of them it does what it did. Written for
Accelerate 1.15.

The first plugin that is built installs it, unless the program has imported :class:`requestzero.accelerate.Accelerator`,
which needs no patch.
"""

from __future__ import annotations

import functools
from typing import Any

from accelerate import Accelerator as StockAccelerator

from requestzero.accelerate.accelerator import Accelerator
from requestzero.accelerate.checks import check_construction
from requestzero.accelerate.request_safe_plugin import any_request_safe

_INSTALLED = "_requestzero_installed"
_needed = True


def leave_out() -> None:
    """Let plugins leave ``accelerate.Accelerator`` alone from now on, since the program uses our class."""
    global _needed
    _needed = False


def install_if_needed() -> None:
    """Install the patch, unless it was left out."""
    if _needed:
        install()


def install() -> None:
    """Let every ``accelerate.Accelerator`` that is given one of our plugins become one of ours. Done once."""
    original = StockAccelerator.__init__
    if hasattr(original, _INSTALLED):
        return

    @functools.wraps(original)
    def __init__(self: StockAccelerator, *args: Any, **kwargs: Any) -> None:
        check_construction(args, kwargs)
        original(self, *args, **kwargs)
        become_if_ours(self)

    setattr(__init__, _INSTALLED, True)
    StockAccelerator.__init__ = __init__


def become_if_ours(accelerator: Any) -> None:
    """Let an ``accelerate.Accelerator`` become one of ours if it has one of our plugins, whoever has built that."""
    if not any_request_safe(vars(accelerator.state).get("deepspeed_plugins")):
        return
    cls = type(accelerator)
    if not issubclass(cls, Accelerator):
        accelerator.__class__ = Accelerator if cls is StockAccelerator else type(cls.__name__, (Accelerator, cls), {})
    accelerator.adopt_plugin()
