"""``Fabric(strategy=RequestZeROFabric(...))``: update windows of requests in a Fabric loop, with ZeRO 1, 2 and 3.

Importing this module registers the strategy's names with Fabric (``request_zero_1``, ``request_zero_2``,
``request_zero_3``, ``request_zero_1_offload``, ``request_zero_2_offload``, ``request_zero_3_offload``).
"""

from __future__ import annotations

from requestzero.environment.ranges import require_allowed

require_allowed("lightning")  # first: another version may lack what is imported below

from lightning.fabric.strategies import STRATEGY_REGISTRY  # noqa: E402

from requestzero.fabric.strategy import RequestZeROFabric  # noqa: E402

RequestZeROFabric.register_strategies(STRATEGY_REGISTRY)

__all__ = ["RequestZeROFabric"]
