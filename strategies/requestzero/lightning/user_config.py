"""The DeepSpeed config that a user gives to ``RequestZeRO``: read, and checked for what Lightning decides."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import DeepSpeedStrategy

from requestzero.config.files import load_config
from requestzero.config.keys import check_top_level_keys
from requestzero.config.merge import Source
from requestzero.config.nested import Config, look_up
from requestzero.config.translation import AUTO, KEYS_WITH_AUTO
from requestzero.lightning.strategy_facts import TRAINER, StrategyFacts


def read_user_config(config: Any, strategy: StrategyFacts = TRAINER) -> Source:
    """Return the user's config as a new dictionary, and how messages name the place where it stands.

    As in Lightning, the environment variable ``PL_DEEPSPEED_CONFIG_PATH`` names a file that is read when
    there is no ``config``.

    Raises:
        ValueError: it cannot be read, holds a key that DeepSpeed does not know, or one that Lightning or this
            strategy decides.
    """
    source, variable = "config", DeepSpeedStrategy.DEEPSPEED_ENV_VAR
    if config is None and variable in os.environ:
        config, source = os.environ[variable], f"the file in ${variable}"
    loaded = load_config(config, source)
    check_top_level_keys(loaded, source)
    _check_automatic(loaded, source)
    _check_loop_keys(loaded, source, strategy)
    return Source(source, loaded)


def _check_automatic(value: Any, source: str, path: str = "") -> None:
    if value == AUTO and path not in KEYS_WITH_AUTO:
        raise ValueError(
            f"{path}='auto' in {source} is not possible under Lightning, which has no place to take it from: "
            "set a value, or leave the key out."
        )
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_automatic(item, source, f"{path}.{key}".lstrip("."))


def _check_loop_keys(config: Config, source: str, strategy: StrategyFacts) -> None:
    if config.pop("gradient_accumulation_steps", 1) != 1:
        raise ValueError(
            f"gradient_accumulation_steps in {source} must be 1 or left out, since the strategy divides the "
            f"window's sum itself: {strategy.accumulates}."
        )
    if config.get("managed_gradient_accumulation") is False:
        raise ValueError(
            f"managed_gradient_accumulation=False in {source} is not possible, since the strategy marks the "
            "ends of requests: leave it out."
        )
    if strategy.counts_batches and look_up(config, "requestzero.rank_dependent_micro_batches"):
        raise ValueError(
            f"requestzero.rank_dependent_micro_batches=True in {source} is not possible, since the Trainer counts "
            "batches on every rank: leave it out."
        )
    if "train_batch_size" in config:
        raise ValueError(
            f"train_batch_size={config['train_batch_size']!r} in {source} is decided by the data loader: "
            f"leave it out, and {strategy.accumulates}."
        )
