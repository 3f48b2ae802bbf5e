"""The lists of names in a DeepSpeed config, compared with what the installed DeepSpeed reads."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime import constants
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config

from requestzero.config.keys import REMOVED_KEYS, SECTION_KEYS, TOP_LEVEL_KEYS, check_top_level_keys, unread_keys
from requestzero.config.removed_keys import removed_sections
from requestzero.config.values import check_zero_section


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
    assert config.read - REMOVED_KEYS - {"bfloat16"} == TOP_LEVEL_KEYS - unread_keys()


def test_removed_sections_are_deepspeeds() -> None:
    removed = set(removed_sections())
    assert removed < REMOVED_KEYS if unread_keys() else removed == REMOVED_KEYS  # an older one has removed fewer
    assert not REMOVED_KEYS & TOP_LEVEL_KEYS


def test_keys_of_sections_are_deepspeeds() -> None:
    types = Recording()
    DeepSpeedConfig({"train_batch_size": 1, constants.DATA_TYPES: types})
    assert {f"data_types.{key}" for key in SECTION_KEYS["data_types"]} - unread_keys() == {
        f"data_types.{key}" for key in types.read
    }
    assert SECTION_KEYS["activation_checkpointing"] == set(ACT_CHKPT_DEFAULT)
    assert SECTION_KEYS["fp16"] == set(DeepSpeedFP16Config.model_fields)
    assert SECTION_KEYS["bf16"] == set(DeepSpeedBF16Config.model_fields)


@pytest.mark.parametrize("key", sorted(REMOVED_KEYS))
def test_removed_section_says_what_deepspeed_says(key: str) -> None:
    with pytest.raises(ValueError, match=f"'{key}' in file is not possible: .*removed") as raised:
        check_top_level_keys({key: {}}, "file")
    assert removed_sections().get(key, "DeepSpeed has removed it") in str(raised.value)


@pytest.mark.parametrize("config", [{"disable_python_gc": True}, {"data_types": {"keep_in_fp32_modules": []}}])
def test_a_key_that_an_older_deepspeed_skips_is_refused(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    for name in ("DISABLE_PYTHON_GC", "KEEP_IN_FP32_MODULES"):
        monkeypatch.setattr(constants, name, name.lower(), raising=False)
    check_top_level_keys(config, "file")
    for name in ("DISABLE_PYTHON_GC", "KEEP_IN_FP32_MODULES"):
        monkeypatch.delattr(constants, name)
    with pytest.raises(ValueError, match="the installed DeepSpeed does not read it"):
        check_top_level_keys(config, "file")


@pytest.mark.parametrize("name", ["_REMOVED_TOP_LEVEL_CONFIG_KEYS", "_REMOVED_ZERO_CONFIG_KEYS"])
def test_a_deepspeed_without_lists_of_what_it_has_removed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """DeepSpeed 0.19.6."""
    monkeypatch.delattr(f"deepspeed.runtime.config.{name}", raising=False)
    check_zero_section({"zero_optimization": {"stage": 2}}, "file")
    with pytest.raises(ValueError, match="'amp' in file is not possible: "):
        check_top_level_keys({"amp": {}}, "file")
