"""Products by plain operators that take each number by itself: the bits of an output depend on no
other row and no other output, as those of PyTorch's own may.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional

from nanoengine.models import products


def use_plain_products(patch: pytest.MonkeyPatch) -> None:
    """From here on PyTorch's products are made of plain operators. Our own stay: those of float32
    and of codes.
    """
    patch.setattr(products.Linear, "__init__", _keep_weight)
    patch.setattr(products.Linear, "__call__", _multiply_in_order)


def _keep_weight(
    self: products.Linear, weight: Tensor, bias: Any = None, quantized: Any = None
) -> None:
    self._quantized, self._bias = quantized, bias
    self._columns = weight.float().T.contiguous().unsqueeze(1)


def _multiply_in_order(self: products.Linear, x: Tensor) -> Tensor:
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


def use_plain_tiles(patch: pytest.MonkeyPatch) -> None:
    """From here on Triton's interpreter computes each number of a product of tiles by itself. The
    bits of NumPy's products depend on how many rows a tile has.
    """
    from triton.runtime import interpreter

    def multiplied(self: Any, a: Any, b: Any, total: Any, *_: Any) -> Any:
        out = total.data.copy()
        for column, row in zip(a.data.T, b.data, strict=True):
            out += column[:, None] * row[None, :]
        return interpreter.TensorHandle(out, total.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", multiplied)


def use_plain_softplus(patch: pytest.MonkeyPatch) -> None:
    """From here on no number's softplus depends on its place. PyTorch computes whole vectors of a
    CPU in another way than the rest.
    """
    softplus = functional.softplus

    def padded(x: Tensor) -> Tensor:
        whole = functional.pad(x.flatten(), (0, -x.numel() % 64))
        return softplus(whole)[: x.numel()].view(x.shape)

    patch.setattr(functional, "softplus", padded)
