"""Access to the engine that an Accelerator has prepared, for code that is imported without DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from requestzero.accelerate.engine import RequestZeROEngineWrapper


def engine_wrapper_of(accelerator: Any) -> RequestZeROEngineWrapper:
    """Return the wrapper of the request-safe engine that ``accelerator`` has prepared.

    Raises:
        RuntimeError: it has prepared none.
    """
    wrapper = getattr(accelerator, "engine_wrapper", None)
    if wrapper is None:
        raise RuntimeError(
            "This Accelerator has not prepared a model with a RequestZeROPlugin: call accelerator.prepare(model, "
            "optimizer, ...) before, with that plugin selected."
        )
    return wrapper
