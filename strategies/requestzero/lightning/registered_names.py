"""The names by which ``Trainer(strategy=...)`` and ``Fabric(strategy=...)`` find a strategy."""

from __future__ import annotations

from lightning.fabric.strategies.registry import _StrategyRegistry

_OFFLOADED = {1: "the optimizer", 2: "the optimizer", 3: "the optimizer and the weights"}


def register_names(registry: _StrategyRegistry, strategy: type, prefix: str) -> None:
    """Register a strategy for every stage, on the device and offloaded; doing it again changes nothing.

    Args:
        registry: the Trainer's or Fabric's.
        strategy: with the arguments ``stage``, ``offload_optimizer`` and ``offload_parameters``.
        prefix: of the names, such as ``"request_zero"`` for ``"request_zero_3_offload"``.
    """
    for stage in (1, 2, 3):
        for offload in (False, True):
            registry.register(
                f"{prefix}_{stage}" + "_offload" * offload,
                strategy,
                description=f"Request-safe DeepSpeed ZeRO {stage}" + f" with {_OFFLOADED[stage]} on the CPU" * offload,
                override=True,
                stage=stage,
                offload_optimizer=offload,
                offload_parameters=offload and stage == 3,
            )
