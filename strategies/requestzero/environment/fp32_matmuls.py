"""Matrix products of a 16-bit model, computed in fp32: for processors without 16-bit units.

Weights, activations between operators and gradients stay 16-bit. The operands of a product are widened, which is exact,
and its result is rounded once, as 16-bit units do that add up in fp32. So are the gradients: autograd computes them in
fp32 and rounds them to the operands' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
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

    Args:
        module: whose ``forward`` is replaced; parameters, their names and their dtype stay.
    """
    forward = module.forward

    @wraps(forward)
    def forward_in_fp32(*args: Any, **kwargs: Any) -> Any:
        with Fp32Matmuls():
            return forward(*args, **kwargs)

    module.forward = forward_in_fp32  # type: ignore[method-assign]


def _sixteen_bit_dtype(args: tuple[Any, ...]) -> torch.dtype | None:
    return next((arg.dtype for arg in args if isinstance(arg, Tensor) and arg.dtype in SIXTEEN_BITS), None)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in SIXTEEN_BITS else value
