"""Products by plain operators that take each number by itself: the bits of an output depend on no
other row and no other output, as those of PyTorch's own may.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nanoengine.kernels.c_build import KernelBuildError
from nanoengine.kernels.call_tape import CallTape
from nanoengine.kernels.cpu_linear import CpuLinear
from nanoengine.models import torch_ops


def use_plain_products(patch: pytest.MonkeyPatch) -> None:
    """From here on PyTorch's products, and its GELU, are made of plain operators. They take the
    place of our own float32 products as well, which serve engines that guess, but not of codes'.
    """
    load = CpuLinear.load

    def load_others(tape: CallTape, dtype: torch.dtype = torch.bfloat16, **asked: Any) -> CpuLinear:
        if dtype is torch.float32 and "with_codes" not in asked:
            raise KernelBuildError("plain operators take their place")
        return load(tape, dtype=dtype, **asked)

    patch.setattr(CpuLinear, "load", load_others)
    patch.setattr(torch_ops.Linear, "__init__", _keep_weight)
    patch.setattr(torch_ops.Linear, "__call__", _multiply_in_order)
    patch.setitem(torch_ops.GATED, "gelu_pytorch_tanh", _gelu_mul)


def _keep_weight(
    self: torch_ops.Linear, weight: Tensor, bias: Any = None, quantized: Any = None
) -> None:
    self._quantized, self._bias = quantized, bias
    self._columns = weight.float().T.contiguous().unsqueeze(1)


def _multiply_in_order(self: torch_ops.Linear, x: Tensor) -> Tensor:
    """A sum in the order of a tree."""
    if self._quantized is not None:
        product: Tensor = self._quantized(x)
        return product if self._bias is None else product.add_(self._bias)
    parts = x.float().T.unsqueeze(2) * self._columns  # [in, tokens, out]
    while len(parts) > 1:
        half = len(parts) // 2
        parts[:half] += parts[-half:]
        parts = parts[:-half]
    out = parts[0]
    return (out if self._bias is None else out + self._bias.float()).to(x.dtype)


def _gelu_mul(gate_up: Tensor) -> Tensor:
    """In double: a vector's last elements go through other code than the first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate.double(), approximate="tanh").to(gate.dtype) * up
