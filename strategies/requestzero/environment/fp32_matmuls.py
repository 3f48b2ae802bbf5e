"""Matrix products of a 16-bit model, computed in fp32: for processors without 16-bit units.

Weights, activations between operators and gradients stay 16-bit. The operands of a product are widened, which is exact,
and its result is rounded once, as 16-bit units do that add up in fp32. So are the gradients: autograd computes them in
fp32 and rounds them to the operands' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import Signature, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_map

PRODUCTS = frozenset(
    {
        functional.linear,
        functional.scaled_dot_product_attention,
        torch.baddbmm,
        torch.bmm,
        torch.einsum,
        torch.matmul,
        torch.mm,
        Tensor.__matmul__,
        Tensor.bmm,
        Tensor.matmul,
        Tensor.mm,
    }
)
"""The functions that are computed in fp32."""
SIXTEEN_BITS = frozenset({torch.bfloat16, torch.float16})


class Fp32Matmuls(TorchFunctionMode):
    """Computes :data:`PRODUCTS` of 16-bit tensors in fp32 within the block, and in the backward of what it computes.

    Costs fp32 copies of the operands, which autograd keeps until the backward.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, with wider operands if it is one of the products."""
        kwargs = kwargs or {}
        dtype = _sixteen_bit_dtype(args) if func in PRODUCTS else None
        if dtype is None:
            return func(*args, **kwargs)
        # Autocast would make 16-bit operands of them again.
        with torch.autocast("cpu", enabled=False):
            result: Tensor = func(*tree_map(_widened, args), **tree_map(_widened, kwargs))
        return result.to(dtype)


def run_in_fp32(module: nn.Module) -> None:
    """Make the forward of a module on the CPU, and its backward, compute their matrix products in fp32.

    Every submodule gets this too, so that activation checkpointing, whose recomputation calls submodules outside of the
    module's own forward, computes in fp32 as well. A checkpointed function that calls no module does so within
    :class:`Fp32Matmuls` only where it opens the block itself. A second call changes nothing; copies and pickles of the
    module keep it.

    Args:
        module: whose ``forward`` is replaced; parameters, their names and their dtype stay.
    """
    for part in module.modules():
        if not isinstance(part, torch.jit.ScriptModule) and not isinstance(part.forward, _Fp32Forward):
            part.forward = _Fp32Forward(part)  # type: ignore[method-assign]


class _Fp32Forward:
    """A module's forward in fp32. It holds the module and not its bound method, so that a copy's calls the copy."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._replaced = vars(module).get("forward")
        """A ``forward`` that the module itself had, in the place of its class's."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(mode, Fp32Matmuls) for mode in _get_current_function_mode_stack()):
            return self._forward(*args, **kwargs)
        with Fp32Matmuls():
            return self._forward(*args, **kwargs)

    @property
    def _forward(self) -> Callable[..., Any]:
        return self._replaced or partial(type(self._module).forward, self._module)

    @property
    def __signature__(self) -> Signature:
        """The signature of the forward, in which libraries look for arguments."""
        return signature(self._forward)


def _sixteen_bit_dtype(args: tuple[Any, ...]) -> torch.dtype | None:
    return next((arg.dtype for arg in args if isinstance(arg, Tensor) and arg.dtype in SIXTEEN_BITS), None)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in SIXTEEN_BITS else value
