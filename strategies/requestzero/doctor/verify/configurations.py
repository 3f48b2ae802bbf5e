"""The configurations of the self-test: every place and dtype alone, and every option of the reduction somewhere."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from requestzero.doctor.verify.setup import Setup

PLACES: list[tuple[int, bool]] = list(product((1, 2), (False, True)))
"""ZeRO stage, and whether the optimizer is offloaded."""
SUMS = [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")]
"""dtype of the model, and of its accumulated gradient."""
_FP16 = [("fp16", "fp16"), ("fp16", "fp32")]
_SCALE = {"fp16": {"enabled": True, "loss_scale": 16.0}}  # a power of two: exact

# Stage, offload, model, sum, and the option that differs from the default.
_OPTIONS: list[tuple[int, bool, str, str, dict[str, Any]]] = [
    (1, False, "bf16", "fp32", {"checkpointing": "reentrant"}),
    (2, True, "bf16", "fp32", {"checkpointing": "reentrant"}),
    (2, False, "fp32", "fp32", {"checkpointing": "nonreentrant"}),
    (1, True, "bf16", "bf16", {"groups": 3}),
    (2, True, "bf16", "fp32", {"groups": 3}),
    (1, True, "bf16", "fp32", {"retain": True}),
    (2, True, "bf16", "fp32", {"retain": True}),
    (2, True, "bf16", "fp32", {"retain": "auto"}),
    (1, False, "bf16", "bf16", {"managed": False}),
    (1, True, "bf16", "fp32", {"managed": False}),
    (2, False, "bf16", "fp32", {"managed": False}),
    (2, True, "fp32", "fp32", {"managed": False}),
    (1, True, "bf16", "bf16", {"zero": {"round_robin_gradients": True}}),
    (2, False, "bf16", "fp32", {"zero": {"round_robin_gradients": True}, "groups": 3}),
    (1, False, "fp32", "fp32", {"zero": {"reduce_scatter": False}}),
    (2, True, "bf16", "bf16", {"zero": {"reduce_scatter": False}}),
    (1, True, "bf16", "fp32", {"zero": {"overlap_comm": True}}),
    (2, True, "bf16", "fp32", {"zero": {"overlap_comm": True, "reduce_bucket_size": 8}}),
    (2, False, "bf16", "bf16", {"zero": {"overlap_comm": True}}),
    (2, False, "bf16", "bf16", {"zero": {"contiguous_gradients": False}}),
    (1, False, "bf16", "fp32", {"zero": {"reduce_bucket_size": 8}}),
    (2, True, "fp32", "fp32", {"zero": {"reduce_bucket_size": 16, "use_multi_rank_bucket_allreduce": False}}),
]


_GATHERED = {"stage3_param_persistence_threshold": 0}  # else parameters as small as these are never sharded
_PARAMS = {"offload_param": {"device": "cpu"}}
_STAGE_3: list[tuple[bool, str, str, dict[str, Any]]] = [
    (False, "fp32", "fp32", {}),
    (False, "bf16", "bf16", {"zero": _GATHERED}),
    (False, "bf16", "fp32", {"zero": {**_GATHERED, "reduce_bucket_size": 8}, "checkpointing": "reentrant"}),
    (False, "bf16", "fp32", {"managed": False, "zero": {"sub_group_size": 20}}),
    (True, "bf16", "bf16", {"zero": {**_GATHERED, "overlap_comm": True}}),
    (True, "bf16", "fp32", {"zero": {**_PARAMS, **_GATHERED}, "groups": 3}),
    (False, "bf16", "fp32", {"zero": {**_PARAMS, "reduce_scatter": False}}),
]


ALWAYS = 28
"""The first configurations, which run however long they take."""


def configurations(cuda: bool, stage_3: bool) -> list[Setup]:
    """Return what the self-test runs, first what is farthest apart.

    Args:
        cuda: with fp16, which DeepSpeed refuses on the CPU.
        stage_3: with ZeRO 3.
    """
    plain = [
        Setup(stage=stage, offload=offload, model=model, accum=accum)
        for (stage, offload), (model, accum) in product(PLACES, [*SUMS, *(_FP16 if cuda else [])])
    ]
    found = [replace(each, config=_SCALE) if each.model == "fp16" else each for each in plain]
    if stage_3:
        found += [
            Setup(stage=3, offload=offload, model=model, accum=accum, **option)
            for offload, model, accum, option in _STAGE_3
        ]
    return found + [
        Setup(stage=stage, offload=offload, model=model, accum=accum, **option)
        for stage, offload, model, accum, option in _OPTIONS
    ]
