"""The request-safe optimizer classes, and the place in which DeepSpeed's engine builds them instead of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.zero import stage3

from requestzero.zero.common.window_options import WindowOptions
from requestzero.zero.patch import patched
from requestzero.zero.stage_1_and_2.optimizer import RequestZeROOptimizer
from requestzero.zero.stage_3.optimizer import RequestZeROStage3Optimizer
from requestzero.zero.upstream import optimizer_class

OPTIMIZER_CLASSES = (RequestZeROOptimizer, RequestZeROStage3Optimizer)


@contextmanager
def optimizer_classes_in_place(stage: int, options: WindowOptions) -> Iterator[None]:
    """While the block runs, let DeepSpeed's engine build the request-safe class of a ZeRO stage."""
    if stage != 3:
        wanted = partial(optimizer_class(), window_options=options)
        with patched(deepspeed_engine, "DeepSpeedZeroOptimizer", wanted):
            yield
        return
    # DeepSpeed derives another class from the one that is replaced, where it is first imported: not in the block.
    import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: F401

    with patched(stage3, "DeepSpeedZeroOptimizer_Stage3", partial(RequestZeROStage3Optimizer, window_options=options)):
        yield
