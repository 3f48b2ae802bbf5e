"""Matrix products of 16-bit models in fp32: exact gradients of the model's dtype; and the choice by measurement."""

from __future__ import annotations

import copy
import inspect
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from requestzero.environment import matmul_speed
from requestzero.environment.fp32_matmuls import Fp32Matmuls, run_in_fp32
from requestzero.environment.matmul_speed import MatmulSpeed, measure_matmuls
from requestzero.recipes.matmuls import choose_matmuls

DTYPES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_linear_layer_and_its_gradients_are_those_of_fp32_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 32).to(dtype)
    x = torch.randn(16, 64).to(dtype).requires_grad_()
    gradient = torch.randn(16, 32).to(dtype)
    run_in_fp32(layer)
    result = layer(x)
    result.backward(gradient)
    weight, bias = layer.weight.detach().float(), layer.bias.detach().float()
    inputs, upstream = x.detach().float(), gradient.float()
    assert torch.equal(result, (functional.linear(inputs, weight, bias)).to(dtype))
    assert torch.equal(x.grad, (upstream @ weight).to(dtype))
    assert torch.equal(layer.weight.grad, (upstream.t() @ inputs).to(dtype))
    assert torch.equal(layer.bias.grad, (upstream.sum(0)).to(dtype))


class Checkpointed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))

    def forward(self, x: torch.Tensor, reentrant: bool | None = None) -> torch.Tensor:
        return self.inner(x) if reentrant is None else checkpoint(self.inner, x, use_reentrant=reentrant)


def checkpointed() -> Checkpointed:
    torch.manual_seed(0)
    model = Checkpointed().bfloat16()
    run_in_fp32(model)
    return model


def copied(model: Checkpointed, how: str) -> Checkpointed:
    if how == "deepcopy":
        return copy.deepcopy(model)
    copied: Checkpointed = pickle.loads(pickle.dumps(model))
    return copied


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_computes_in_fp32_with_its_own_weights(how: str) -> None:
    model, x = checkpointed(), torch.randn(8, 64).bfloat16()
    copy_of_it = copied(model, how)
    assert torch.equal(copy_of_it(x), model(x))
    with torch.no_grad():
        copy_of_it.inner[2].weight.zero_()
        copy_of_it.inner[2].bias.zero_()
    assert not copy_of_it(x).any()
    assert model(x).any()


def test_a_second_call_changes_nothing() -> None:
    model = checkpointed()
    forward = model.forward
    run_in_fp32(model)
    assert model.forward is forward
    assert list(inspect.signature(model.forward).parameters) == ["x", "reentrant"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_module_is_recomputed_in_fp32(reentrant: bool) -> None:
    plain, model = checkpointed(), checkpointed()
    x = torch.randn(8, 64).bfloat16().requires_grad_()
    plain(x).sum().backward()
    model(x, reentrant=reentrant).sum().backward()
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


PRODUCTS = {
    "linear": lambda a, b: functional.linear(a, b),
    "matmul": lambda a, b: torch.matmul(a, b),
    "@": lambda a, b: a @ b,
    "mm": lambda a, b: torch.mm(a[0], b[0]),
    "bmm": lambda a, b: torch.bmm(a, b),
    "einsum": lambda a, b: torch.einsum("bij,bjk->bik", a, b),
    "attention": lambda a, b: functional.scaled_dot_product_attention(a, b, b, is_causal=True),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_computed_in_fp32(name: str) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(3, 8, 8).bfloat16(), torch.randn(3, 8, 8).bfloat16()
    if name == "linear":
        b = b[0]
    with Fp32Matmuls(), torch.autocast("cpu", torch.bfloat16):
        found = PRODUCTS[name](a, b)
    assert torch.equal(found, PRODUCTS[name](a.float(), b.float()).bfloat16())


def test_what_is_no_product_and_what_is_fp32_is_left_alone() -> None:
    x = torch.ones(2, 2)
    with Fp32Matmuls():
        assert (x.bfloat16() + 1).dtype == torch.bfloat16
        assert (x @ x).dtype == torch.float32


def test_the_slower_one_is_given_up_by_measurement() -> None:
    speed = measure_matmuls(torch.bfloat16)
    assert speed.sixteen_bit_seconds > 0
    assert speed.fp32_seconds > 0
    assert torch.get_num_threads() >= 1
    assert MatmulSpeed(torch.bfloat16, 8.0, 1.0).prefers_fp32
    assert not MatmulSpeed(torch.bfloat16, 1.2, 1.0).prefers_fp32
    assert str(MatmulSpeed(torch.bfloat16, 8.0, 1.0)).startswith("bfloat16 takes 8.0 times as long as fp32")


@pytest.mark.parametrize(
    ("mode", "matmuls", "accelerator", "seconds", "chosen", "told"),
    [
        ("bf16-true", "auto", "cpu", 8.0, True, "in fp32 (bfloat16 takes 8.0 times"),
        ("bf16-true", "auto", "cpu", 0.5, False, "in bf16 (bfloat16 takes 0.5 times"),
        ("bf16-true", "fp32", "cpu", 0.5, True, "in fp32, as configured"),
        ("bf16-true", "model", "cpu", 8.0, False, "in bf16, as configured"),
        ("bf16-true", "auto", "gpu", 8.0, False, ""),
        ("32-true", "auto", "cpu", 8.0, False, ""),
    ],
)
def test_the_recipes_choose_and_say_so(
    mode: str,
    matmuls: str,
    accelerator: str,
    seconds: float,
    chosen: bool,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matmul_speed, "measure_matmuls", lambda dtype: MatmulSpeed(dtype, seconds, 1.0))
    fp32, line = choose_matmuls(SimpleNamespace(mode=mode, matmuls=matmuls), accelerator)
    assert fp32 is chosen
    assert told in line
    assert bool(line) == bool(told)
