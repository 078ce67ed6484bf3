"""The layers of a decoder, each a small object around its weights. They know the context, no
checkpoint.

Activations are [tokens, features]: the tokens of all sequences laid end to end.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from nanoengine.config import RopeConfig
from nanoengine.context import ForwardContext
from nanoengine.cpu_kernels import CpuKernels


class Linear:
    """x @ weight.T + bias. On a CPU bfloat16 weights are reordered once into oneDNN's blocked
    layout.

    A packed bf16 product at batch 1 reads memory about three times faster than a plain one.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features]."""
        if self._packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return out
        return functional.linear(x, self._weight, self._bias)


class TensorOps(Protocol):
    """The small operators between the products, on activations [tokens, ...]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension; x is [tokens, dim] or [tokens, heads, dim].

        Statistics in fp32; the weight is applied after rounding, as transformers does.
        """
        ...

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place, then the norm of that."""
        ...

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Turn the pairs (i, i + head_dim / 2) of q and k, [tokens, heads, head_dim].

        May overwrite its arguments.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [tokens, 2 * dim]."""
        ...


class TorchOps:
    """Plain PyTorch: runs anywhere."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See TensorOps."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * (wide * scale).to(x.dtype)

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See TensorOps."""
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See TensorOps."""
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See TensorOps."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up


class KernelOps:
    """The fused C kernels: one call each instead of five to eight small PyTorch operators."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See TensorOps."""
        out = torch.empty(x.shape, dtype=x.dtype)
        self._kernels.rms_norm(x, weight, eps, out)
        return out

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See TensorOps."""
        out = torch.empty_like(x)
        self._kernels.rms_norm(x, weight, eps, out, residual)
        return out

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See TensorOps."""
        self._kernels.rope(q, k, cos, sin)
        return q, k

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See TensorOps."""
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._kernels.silu_mul(gate_up, out)
        return out


class RMSNorm:
    """Root-mean-square norm (arXiv 1910.07467) over the last dimension."""

    def __init__(self, ops: TensorOps, weight: Tensor, eps: float) -> None:
        self._ops = ops
        self._weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x, of its shape and dtype."""
        return self._ops.rms_norm(x, self._weight, self._eps)

    def after_add(self, residual: Tensor, x: Tensor) -> Tensor:
        """The norm of residual + x, which stays in `residual`."""
        return self._ops.add_rms_norm(residual, x, self._weight, self._eps)


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
        ops: TensorOps,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        qkv: Linear,
        out: Linear,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        self._ops = ops
        self._layer = layer
        self._heads = [num_heads, num_kv_heads, num_kv_heads]
        self._qkv = qkv
        self._out = out
        self._q_norm = q_norm
        self._k_norm = k_norm

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, ctx: ForwardContext) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        tokens = x.shape[0]
        fused = self._qkv(x).view(tokens, sum(self._heads), -1)
        q, k, v = torch.split(fused, self._heads, dim=1)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q), self._k_norm(k)
        q, k = self._ops.rotate(q, k, cos, sin)
        ctx.kv.write(self._layer, k, v)
        out = ctx.attention.run(self._layer, q, ctx)
        return self._out(out.view(tokens, -1))


class MLP:
    """Gated feed-forward: down(silu(gate(x)) * up(x)), gate and up in one product (arXiv
    2002.05202).
    """

    def __init__(self, ops: TensorOps, gate_up: Linear, down: Linear) -> None:
        self._ops = ops
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return self._down(self._ops.silu_mul(self._gate_up(x)))
