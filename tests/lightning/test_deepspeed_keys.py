"""The lists of names in a DeepSpeed config, compared with what the installed DeepSpeed reads."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime import constants
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config

from requestzero.config.keys import REMOVED_KEYS, SECTION_KEYS, TOP_LEVEL_KEYS, check_top_level_keys


class Recording(dict[str, Any]):
    """A section that notes which of its keys somebody looks for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def keys(self) -> Any:
        return self  # for `key in config.keys()`


def test_sections_are_those_that_deepspeed_reads() -> None:
    config = Recording(train_batch_size=1)
    DeepSpeedConfig(config)
    # "bfloat16" is the old name of "bf16".
    assert config.read - REMOVED_KEYS - {"bfloat16"} == TOP_LEVEL_KEYS


def test_removed_sections_are_deepspeeds() -> None:
    assert set(_REMOVED_TOP_LEVEL_CONFIG_KEYS) == REMOVED_KEYS
    assert not REMOVED_KEYS & TOP_LEVEL_KEYS


def test_keys_of_sections_are_deepspeeds() -> None:
    types = Recording()
    DeepSpeedConfig({"train_batch_size": 1, constants.DATA_TYPES: types})
    assert SECTION_KEYS["data_types"] == types.read
    assert SECTION_KEYS["activation_checkpointing"] == set(ACT_CHKPT_DEFAULT)
    assert SECTION_KEYS["fp16"] == set(DeepSpeedFP16Config.model_fields)
    assert SECTION_KEYS["bf16"] == set(DeepSpeedBF16Config.model_fields)


@pytest.mark.parametrize("key", sorted(REMOVED_KEYS))
def test_removed_section_says_what_deepspeed_says(key: str) -> None:
    with pytest.raises(ValueError, match=f"'{key}' in file is not possible: .*removed") as raised:
        check_top_level_keys({key: {}}, "file")
    assert _REMOVED_TOP_LEVEL_CONFIG_KEYS[key] in str(raised.value)
