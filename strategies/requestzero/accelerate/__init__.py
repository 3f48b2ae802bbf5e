"""``Accelerator(deepspeed_plugin=RequestZeROPlugin(...))``: update windows of requests in Accelerate.

Importing this package changes nothing; the first :class:`RequestZeROPlugin` that is built patches the constructor of
``accelerate.Accelerator``. A program that would rather have nothing patched imports :class:`Accelerator` from here,
before it builds the plugin, and uses it in the place of Accelerate's.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from requestzero.environment.ranges import require_allowed

require_allowed("accelerate", "transformers")  # first: other versions may lack what is imported below

from requestzero.accelerate.micro_batches import MicroBatches  # noqa: E402
from requestzero.accelerate.plugin import RequestZeROPlugin  # noqa: E402
from requestzero.accelerate.requests import Requests  # noqa: E402

if TYPE_CHECKING:
    from requestzero.accelerate.accelerator import Accelerator

__all__ = ["Accelerator", "MicroBatches", "RequestZeROPlugin", "Requests"]

_TRAINING_ARGUMENTS = "RequestZeROTrainingArguments"


def __getattr__(name: str) -> Any:
    """Load what imports DeepSpeed on first use, and find a class in its former place."""
    if name == "Accelerator":
        return _load_accelerator()
    if name != _TRAINING_ARGUMENTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    current = "requestzero.transformers"
    warnings.warn(
        f"{name} has moved: import it from {current} instead of {__name__}.", DeprecationWarning, stacklevel=2
    )
    return getattr(import_module(current), name)


def _load_accelerator() -> type:
    from requestzero.accelerate import patch
    from requestzero.accelerate.accelerator import Accelerator

    patch.leave_out()
    return Accelerator
