"""``Accelerator(deepspeed_plugin=RequestZeROPlugin(...))``: update windows of requests in Accelerate.

Importing this package changes nothing; the first :class:`RequestZeROPlugin` that is built lets Accelerate know it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from requestzero.accelerate.plugin import RequestZeROPlugin
from requestzero.accelerate.requests import MicroBatches, Requests

if TYPE_CHECKING:
    from requestzero.accelerate.training_arguments import RequestZeROTrainingArguments

__all__ = ["MicroBatches", "RequestZeROPlugin", "RequestZeROTrainingArguments", "Requests"]


def __getattr__(name: str) -> Any:
    """Transformers' Trainer takes seconds to import, and only its users need it."""
    if name != "RequestZeROTrainingArguments":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from requestzero.accelerate.training_arguments import RequestZeROTrainingArguments

    return RequestZeROTrainingArguments
