"""Joining ranks compiles nothing, and leaves DeepSpeed as it was."""

from __future__ import annotations

import pytest

from support.ranks import RankGroup


def joined() -> tuple[bool, bool, bool]:
    import deepspeed
    import deepspeed.comm as dist

    from requestzero.zero.process_group import without_inference_operator

    operators = deepspeed.ops.__compatible_ops__
    before = dict(operators)
    with without_inference_operator():
        inside = operators["deepspeed_shm_comm"]
    with pytest.raises(KeyError, match="inside"), without_inference_operator():
        raise KeyError("inside")
    return dist.comm.cdb.shm_comm_op is None, inside, operators == before


def test_ranks_join_without_the_inference_operator(two_ranks: RankGroup) -> None:
    assert two_ranks.run(joined) == [(True, False, True)] * 2
