"""Products by plain operators that take each number by itself: the bits of an output depend on no
other row and no other output, as those of PyTorch's own may.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from nanoengine.models import torch_ops


def use_plain_products(patch: pytest.MonkeyPatch) -> None:
    """From here on PyTorch's products are made of plain operators. Our own stay: those of float32
    and of codes.
    """
    patch.setattr(torch_ops.Linear, "__init__", _keep_weight)
    patch.setattr(torch_ops.Linear, "__call__", _multiply_in_order)


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
    out = parts[0].contiguous()  # as kernels take it
    return (out if self._bias is None else out + self._bias.float()).to(x.dtype)
