"""What an engine is told beside DeepSpeed's own options, and where it stands in a DeepSpeed config."""

from __future__ import annotations

from dataclasses import dataclass

from requestzero.deepspeed_config import Config, take_retain_option


@dataclass(frozen=True)
class EngineOptions:
    """Options of :class:`~requestzero.optimizer.engine.RequestZeROEngine` that DeepSpeed's config classes do not know.

    See :mod:`requestzero.settings`, which owns their meaning and defaults.
    """

    retain_gpu_grad_partition_until_step: bool = False
    """DeepSpeed key: ``zero_optimization.retain_gpu_grad_partition_until_step``."""


def take_engine_options(config: Config) -> EngineOptions:
    """Remove from ``config`` what DeepSpeed would reject or ignore, and return it.

    Raises:
        ValueError: a value that is not allowed.
    """
    return EngineOptions(retain_gpu_grad_partition_until_step=take_retain_option(config))
