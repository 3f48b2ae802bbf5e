"""``Trainer(strategy=RequestZeRO(...))``: update windows of requests in Lightning, with ZeRO 1 and 2.

Importing this module registers the strategy's names with Lightning (``request_zero_1``, ``request_zero_2``,
``request_zero_1_offload``, ``request_zero_2_offload``). DeepSpeed is imported when a strategy is built.
"""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from requestzero.lightning.strategy import RequestZeRO

RequestZeRO.register_strategies(StrategyRegistry)

__all__ = ["RequestZeRO"]
