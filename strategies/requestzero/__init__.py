"""Exact optimizer steps for windows of requests with DeepSpeed ZeRO-1/2.

Importing this package loads neither torch nor DeepSpeed and changes nothing global; every public name is
loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from requestzero.versions import __version__

if TYPE_CHECKING:
    from requestzero.agreement.errors import RankDisagreement
    from requestzero.errors import GradientOverflowError
    from requestzero.initialization import initialize
    from requestzero.lightning.strategy import RequestZeRO
    from requestzero.micro_batch import MicroBatch
    from requestzero.planned_loader import PlannedLoader
    from requestzero.request_loader import RequestLoader
    from requestzero.settings import OverflowSettings

# Public name -> the module that defines it.
_LAZY = {
    "initialize": "requestzero.initialization",
    "GradientOverflowError": "requestzero.errors",
    "MicroBatch": "requestzero.micro_batch",
    "OverflowSettings": "requestzero.settings",
    "PlannedLoader": "requestzero.planned_loader",
    "RankDisagreement": "requestzero.agreement.errors",
    "RequestLoader": "requestzero.request_loader",
    "RequestZeRO": "requestzero.lightning",
    "RequestZeROPlugin": "requestzero.accelerate",
}

__all__ = [
    "GradientOverflowError",
    "MicroBatch",
    "OverflowSettings",
    "PlannedLoader",
    "RankDisagreement",
    "RequestLoader",
    "RequestZeRO",
    "RequestZeROPlugin",
    "__version__",
    "initialize",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
