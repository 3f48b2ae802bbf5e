"""Names of classes that depend on the installed DeepSpeed."""

from __future__ import annotations


def optimizer_name() -> str:
    """Return the name of this package's ZeRO-1/2 optimizer: an adapter's with an older DeepSpeed."""
    from requestzero.zero.upstream import optimizer_class

    return optimizer_class().__name__
