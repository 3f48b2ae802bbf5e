"""How the probe computes a 16-bit model on a CPU: as is measured to be faster there, which one line says."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from requestzero.environment import matmul_speed
from requestzero.environment.matmul_speed import LAYER, MatmulSpeed
from requestzero.probe.__main__ import _with_fast_matmuls
from requestzero.probe.counters import Operators
from requestzero.probe.options import parse
from support.tiny_llama import tiny_llama


def chosen(monkeypatch: pytest.MonkeyPatch, ratio: float, *arguments: str) -> tuple[bool, str, list[Any]]:
    """Return whether products are in fp32, what is printed, and the layers that were measured."""
    layers: list[Any] = []

    def measured(dtype: torch.dtype, layer: Any = LAYER) -> MatmulSpeed:
        layers.append(layer)
        return MatmulSpeed(dtype, ratio, 1.0)

    monkeypatch.setattr(matmul_speed, "measure_matmuls", measured)
    printed = io.StringIO()
    options = _with_fast_matmuls(parse(["--device", "cpu", *arguments]), Console(file=printed, width=200))
    return options.model.fp32_matmuls, printed.getvalue(), layers


@pytest.mark.parametrize(
    ("ratio", "in_fp32", "told"),
    [(8.0, True, "in fp32 (bfloat16 takes 8.0 times"), (1.0, False, "in the model's dtype (bfloat16 takes 1.0 times")],
)
def test_the_default_is_measured_at_its_own_size(
    monkeypatch: pytest.MonkeyPatch, ratio: float, in_fp32: bool, told: str
) -> None:
    found, line, layers = chosen(monkeypatch, ratio)
    assert found is in_fp32
    assert f"Matrix products of the model: {told}" in line
    assert line.count("\n") == 1
    assert layers == [(1, 256, 256)], "the chain of layers sees one row at a time"


def test_a_model_of_the_user_and_fp32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    assert chosen(monkeypatch, 8.0, "--model", str(tmp_path))[::2] == (True, [LAYER])
    assert chosen(monkeypatch, 8.0, "--dtype", "fp32") == (False, "", [])


@pytest.mark.parametrize("in_fp32", [False, True])
def test_the_chain_is_computed_so(in_fp32: bool) -> None:
    model = replace(parse(["--device", "cpu"]).model, layers=1, width=3, fp32_matmuls=in_fp32).build().bfloat16()
    with Operators() as counted:
        model(torch.ones(1, 3, dtype=torch.bfloat16))
    assert ("aten._to_copy" in counted.counts) is in_fp32
