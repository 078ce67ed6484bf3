"""The layers of a decoder, each a small object around its weights. They know the context, no
checkpoint.

Activations are [tokens, features]: the tokens of all sequences laid end to end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from nanoengine.config import RopeConfig
from nanoengine.context import ForwardContext
from nanoengine.cpu_kernels import CpuKernels
from nanoengine.cpu_linear import CpuLinear

Norm = tuple[Tensor, float]  # weight and epsilon of an RMSNorm


class Product(Protocol):
    """norm(x) @ weight.T + bias; the norm and the bias where it was made with them."""

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features]."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """residual += self(x) in place, the product rounded first."""
        ...


class LayerOps(Protocol):
    """Makes the products of a model and does the small operators between them."""

    def linear(
        self, weight: Tensor, bias: Tensor | None = None, norm: Norm | None = None
    ) -> Product:
        """weight is [out_features, in_features]."""
        ...

    def gate_up(
        self, gate: Tensor, up: Tensor, biases: tuple[Tensor, Tensor] | None, norm: Norm
    ) -> Callable[[Tensor], Tensor]:
        """x -> silu(gate(x)) * up(x), both of norm(x), in one product."""
        ...

    def tied(self, weight: Tensor, norm: Norm) -> tuple[Callable[[Tensor], Tensor], Product]:
        """Token ids -> rows of the weight, and the product with the same weight, held once."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension; x is [tokens, dim] or [tokens, heads, dim].

        Statistics in fp32; the weight is applied after rounding, as transformers does
        (arXiv 1910.07467).
        """
        ...

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Turn the pairs (i, i + head_dim / 2) of q and k, [tokens, heads, head_dim].

        May overwrite its arguments.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [tokens, 2 * dim]."""
        ...


class Linear:
    """A product by PyTorch. On a CPU bfloat16 weights are reordered once into oneDNN's layout."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        norm: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._bias = bias
        self._norm = norm
        self._packed = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """See Product."""
        if self._norm is not None:
            x = self._norm(x)
        if self._packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return out
        return functional.linear(x, self._weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """See Product."""
        residual += self(x)


class TorchOps:
    """Plain PyTorch: runs anywhere."""

    def linear(
        self, weight: Tensor, bias: Tensor | None = None, norm: Norm | None = None
    ) -> Product:
        """See LayerOps."""
        if norm is None:
            return Linear(weight, bias)
        norm_weight, eps = norm
        return Linear(weight, bias, lambda x: self.rms_norm(x, norm_weight, eps))

    def gate_up(
        self, gate: Tensor, up: Tensor, biases: tuple[Tensor, Tensor] | None, norm: Norm
    ) -> Callable[[Tensor], Tensor]:
        """See LayerOps."""
        both = self.linear(
            torch.cat((gate, up)), None if biases is None else torch.cat(biases), norm
        )
        return lambda x: self.silu_mul(both(x))

    def tied(self, weight: Tensor, norm: Norm) -> tuple[Callable[[Tensor], Tensor], Product]:
        """See LayerOps. A weight that oneDNN reorders is kept twice."""
        return functools.partial(torch.embedding, weight), self.linear(weight, None, norm)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See LayerOps."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * (wide * scale).to(x.dtype)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See LayerOps."""
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See LayerOps."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up


class KernelOps(TorchOps):
    """The fused C kernels: one call each instead of five to eight small PyTorch operators."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See LayerOps."""
        out = torch.empty(x.shape, dtype=x.dtype)
        self._kernels.rms_norm(x, weight, eps, out)
        return out

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See LayerOps."""
        self._kernels.rope(q, k, cos, sin)
        return q, k

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See LayerOps."""
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._kernels.silu_mul(gate_up, out)
        return out


class PackedOps(KernelOps):
    """bfloat16 products by our own kernel, with norm, silu and residual sum fused onto them."""

    def __init__(self, kernels: CpuKernels, products: CpuLinear) -> None:
        super().__init__(kernels)
        self._products = products

    def linear(
        self, weight: Tensor, bias: Tensor | None = None, norm: Norm | None = None
    ) -> Product:
        """See LayerOps."""
        return self._products.pack(weight, bias, norm)

    def gate_up(
        self, gate: Tensor, up: Tensor, biases: tuple[Tensor, Tensor] | None, norm: Norm
    ) -> Callable[[Tensor], Tensor]:
        """See LayerOps."""
        return self._products.pack_gate_up(gate, up, biases, norm)

    def tied(self, weight: Tensor, norm: Norm) -> tuple[Callable[[Tensor], Tensor], Product]:
        """See LayerOps."""
        head = self._products.pack(weight, None, norm)
        return head.gather_rows, head


class Rotary:
    """Rotary position embedding (arXiv 2104.09864) on half-split heads, with transformers'
    scalings.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._inv_freq = _inverse_frequencies(rope, head_dim).to(device)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, fp32 [tokens, 1, head_dim / 2]; computed once a step for all layers."""
        angles = positions.float().unsqueeze(1) * self._inv_freq
        return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(inv_freq, rope)
    return inv_freq


def _llama3_frequencies(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1's scaling: long waves are stretched by `factor`, short ones kept, a ramp in
    between.
    """
    wavelength = 2 * math.pi / inv_freq
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    ramp = rope.original_max_position / wavelength - rope.low_freq_factor
    smooth = ramp / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    stretched = torch.where(wavelength > longest, inv_freq / rope.factor, blended)
    return torch.where(wavelength < shortest, inv_freq, stretched)


class Attention:
    """Projections, optional per-head norms, rotary embedding, and one call each to the KV cache
    and backend.
    """

    def __init__(
        self,
        ops: LayerOps,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        qkv: Product,
        out: Product,
        head_norms: tuple[Norm, Norm] | None = None,
    ) -> None:
        """qkv: with the norm before it. head_norms: over each head of q and of k."""
        self._ops = ops
        self._layer = layer
        self._heads = [num_heads, num_kv_heads, num_kv_heads]
        self._qkv = qkv
        self._out = out
        self._head_norms = head_norms

    def __call__(self, residual: Tensor, cos: Tensor, sin: Tensor, ctx: ForwardContext) -> None:
        """Adds the attention to the residual stream [tokens, hidden], in place."""
        tokens = residual.shape[0]
        fused = self._qkv(residual).view(tokens, sum(self._heads), -1)
        q, k, v = torch.split(fused, self._heads, dim=1)
        if self._head_norms is not None:
            q_norm, k_norm = self._head_norms
            q, k = self._ops.rms_norm(q, *q_norm), self._ops.rms_norm(k, *k_norm)
        q, k = self._ops.rotate(q, k, cos, sin)
        ctx.kv.write(self._layer, k, v)
        out = ctx.attention.run(self._layer, q, ctx)
        self._out.add_to(residual, out.view(tokens, -1))


class MLP:
    """Gated feed-forward: down(silu(gate(x)) * up(x)), gate and up in one product (arXiv
    2002.05202).
    """

    def __init__(self, gate_up: Callable[[Tensor], Tensor], down: Product) -> None:
        """gate_up: with the norm before it and the gating."""
        self._gate_up = gate_up
        self._down = down

    def __call__(self, residual: Tensor) -> None:
        """Adds the feed-forward to the residual stream [tokens, hidden], in place."""
        self._down.add_to(residual, self._gate_up(residual))
