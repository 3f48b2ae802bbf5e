"""Joining ranks on the CPU without compiling an operator that training does not use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_OPERATOR = "deepspeed_shm_comm"


@contextmanager
def without_inference_operator() -> Iterator[None]:
    """While the block runs, let DeepSpeed set up communication without its shared-memory all-reduce.

    DeepSpeed 0.19.8 compiles it whenever ranks are joined on the CPU, although only ``inference_all_reduce`` calls it:
    close to a minute of work that needs a compiler and ninja, and that waits without end for the lock of a build that
    was killed. Without it DeepSpeed uses the process group for that call too. Other accelerators do not have it.
    """
    import deepspeed

    compatible = deepspeed.ops.__compatible_ops__
    before = compatible.get(_OPERATOR)
    compatible[_OPERATOR] = False
    try:
        yield
    finally:
        if before is None:
            del compatible[_OPERATOR]
        else:
            compatible[_OPERATOR] = before
