"""Reasons for which a request cannot be aborted, as the error says them."""

from __future__ import annotations

NO_COPY = (
    "its gradients are in the window's sum already, and the sum before it was not copied: set the option abort "
    "(requestzero.abort in a DeepSpeed config) to true"
)
UNSEEN = (
    "a backward that the engine does not see has come between two requests, and its gradients have been added to those "
    "of the request before: announce every request with begin_request(), or start backwards with engine.backward(loss)"
)
EDITED = (
    "safe_set_full_grad() or safe_set_local_grad() has set a gradient of the window since it began, which is one of "
    "all its requests: set gradients before the step, when every request is there to stay"
)
