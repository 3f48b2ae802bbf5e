"""Passes over loaders that Accelerate has prepared, told to the other ranks if the model is trained in them.

Written for Accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from requestzero.accelerate.engine import RequestZeROEngineWrapper


class SharedPass:
    """Mixin for the class of one loader; see :func:`share_passes`."""

    _requestzero_wrapper: Callable[[], RequestZeROEngineWrapper | None]

    def __iter__(self) -> Iterator[Any]:
        """Iterate as the loader does, and tell the other ranks of the end or a failure. Collective.

        Raises:
            RankDisagreementError: the loader has raised on this rank or another; or another rank has not come to the
                end of its pass, in which this rank has trained.
        """
        batches: Iterator[Any] = super().__iter__()  # type: ignore[misc]
        wrapper = self._requestzero_wrapper()
        if wrapper is None:
            yield from batches
            return
        before = wrapper.backwards
        with wrapper.engine.failing_together():
            yield from batches
        if wrapper.backwards > before:
            wrapper.engine.end_data()


def share_passes(loader: Any, wrapper: Callable[[], RequestZeROEngineWrapper | None]) -> Any:
    """Tell the other ranks of passes over ``loader``, and return it; the object stays the same.

    Args:
        loader: one that Accelerate has prepared.
        wrapper: gives the engine that is trained, once there is one.
    """
    cls = type(loader)
    if not issubclass(cls, SharedPass):
        # On the class, since the loader's own attributes may have to be pickled.
        body = {"__module__": cls.__module__, "_requestzero_wrapper": staticmethod(wrapper)}
        shared = type(cls.__name__, (SharedPass, cls), body)
        # HACK: Accelerate's loaders show another class in a property of this name, beside their own.
        vars(object)["__class__"].__set__(loader, shared)
    return loader
