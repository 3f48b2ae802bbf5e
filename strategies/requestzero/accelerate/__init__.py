"""``Accelerator(deepspeed_plugin=RequestZeROPlugin(...))``: update windows of requests in Accelerate.

Importing this package changes nothing; the first :class:`RequestZeROPlugin` that is built lets Accelerate know it.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

from requestzero.accelerate.plugin import RequestZeROPlugin
from requestzero.accelerate.requests import MicroBatches, Requests

__all__ = ["MicroBatches", "RequestZeROPlugin", "Requests"]

_TRAINING_ARGUMENTS = "RequestZeROTrainingArguments"


def __getattr__(name: str) -> Any:
    """Former place of ``RequestZeROTrainingArguments``, for one release."""
    if name != _TRAINING_ARGUMENTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    current = "requestzero.transformers"
    warnings.warn(
        f"{name} has moved: import it from {current} instead of {__name__}.", DeprecationWarning, stacklevel=2
    )
    return getattr(import_module(current), name)
