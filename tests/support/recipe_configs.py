"""Configurations of the recipes, composed as their commands compose them."""

from __future__ import annotations

from typing import Any

TINY = ["model=byte_decoder_tiny", "data.sequence_length=32", "data.micro_batch_size=2"]


def compose_recipe(*overrides: str, recipe: str = "lightning_sft") -> Any:
    """Return the configuration of a recipe with these overrides."""
    from hydra import compose, initialize_config_module

    from requestzero.recipes.config_schema import register_schema

    register_schema()
    with initialize_config_module("requestzero.configs", version_base="1.3"):
        return compose(recipe, overrides=list(overrides))
