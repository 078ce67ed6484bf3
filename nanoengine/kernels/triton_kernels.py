"""Fused Triton kernels for the small operators between products, on a GPU.

Operators of CpuKernels, in the same steps: statistics and angles in fp32, rounded where PyTorch
rounds.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nanoengine.context import KVTarget
from nanoengine.kernels.triton_launch import FUSED, power_of_two


@triton.jit
def _rms_norm(
    x, residual, weight, out, eps, x_token, x_head,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """One row. ADDS: x is added to the residual stream first, in place."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, SIZE_PAD)
    mask = d < SIZE
    values = tl.load(x + row // HEADS * x_token + row % HEADS * x_head + d, mask=mask, other=0.0)
    if ADDS:
        values = values.to(tl.float32) + tl.load(residual + row * SIZE + d, mask=mask, other=0.0)
        values = values.to(residual.dtype.element_ty)
        tl.store(residual + row * SIZE + d, values, mask=mask)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = (wide * scale).to(weight.dtype.element_ty)
    weights = tl.load(weight + d, mask=mask, other=0.0)
    tl.store(out + row * SIZE + d, (normed * weights).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rotate(first, second, c, s):
    """The halves of a head, rotated, rounded to the dtype they came in."""
    x, y = first.to(tl.float32), second.to(tl.float32)
    return (x * c - y * s).to(first.dtype), (y * c + x * s).to(first.dtype)


@triton.jit
def _rope_store(
    q, k, v, cos, sin, k_slots, v_slots, pool, q_token, k_token, v_token,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, KV_HEADS: tl.constexpr,
    KV_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
):  # fmt: skip
    """One token: its q (program 0), or k and v (1)."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, HALF_PAD)
    is_dim = d < HALF
    c = tl.load(cos + token * HALF + d, mask=is_dim, other=0.0)[None, :]
    s = tl.load(sin + token * HALF + d, mask=is_dim, other=0.0)[None, :]
    if tl.program_id(1) == 0:
        h = tl.arange(0, HEADS_PAD)
        q_mask = (h < HEADS)[:, None] & is_dim[None, :]
        q_at = q + token * q_token + h[:, None] * (2 * HALF) + d[None, :]
        q_first = tl.load(q_at, mask=q_mask, other=0.0)
        q_second = tl.load(q_at + HALF, mask=q_mask, other=0.0)
        q_first, q_second = _rotate(q_first, q_second, c, s)
        tl.store(q_at, q_first, mask=q_mask)
        tl.store(q_at + HALF, q_second, mask=q_mask)
    else:
        slot = tl.load(k_slots + token)
        kv_h = tl.arange(0, KV_PAD)
        num_kept = tl.where(slot >= 0, KV_HEADS, 0)
        mask = (kv_h < num_kept)[:, None] & is_dim[None, :]
        rows = kv_h[:, None] * (2 * HALF) + d[None, :]
        first = tl.load(k + token * k_token + rows, mask=mask, other=0.0)
        second = tl.load(k + token * k_token + rows + HALF, mask=mask, other=0.0)
        first, second = _rotate(first, second, c, s)
        k_to = pool + slot * (KV_HEADS * 2 * HALF) + rows
        tl.store(k_to, first, mask=mask)
        tl.store(k_to + HALF, second, mask=mask)
        if v_slots is not None:
            v_to = pool + tl.load(v_slots + token) * (KV_HEADS * 2 * HALF) + rows
            v_at = v + token * v_token + rows
            tl.store(v_to, tl.load(v_at, mask=mask, other=0.0), mask=mask)
            tl.store(v_to + HALF, tl.load(v_at + HALF, mask=mask, other=0.0), mask=mask)


@triton.jit
def _gate_mul(gate_up, out, row_size, SIZE: tl.constexpr, STEP: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * STEP + tl.arange(0, STEP)
    mask = d < SIZE
    gate = tl.load(gate_up + row * row_size + d, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_size + SIZE + d, mask=mask, other=0.0)
    u = gate
    if GELU:  # its form with tanh
        u = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    gated = (gate / (1.0 + tl.exp(-u))).to(out.dtype.element_ty)
    tl.store(out + row * SIZE + d, gated * up, mask=mask)


@triton.jit
def _clamped_swiglu(gate_up, out, row_size, SIZE: tl.constexpr, STEP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * STEP + tl.arange(0, STEP)
    mask = d < SIZE
    gate = tl.load(gate_up + row * row_size + d, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_size + SIZE + d, mask=mask, other=0.0).to(tl.float32)
    gate = tl.where(gate > 7.0, 7.0, gate)
    up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
    gated = gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    tl.store(out + row * SIZE + d, gated.to(out.dtype.element_ty), mask=mask)


class TritonKernels:
    """Launches the kernels."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """out = x / rms(x) * weight over the last dimension; see CpuKernels.rms_norm.

        x is [tokens, dim] or [tokens, heads, dim], its last dimension contiguous; out contiguous.
        """
        heads = x.shape[1] if x.dim() == 3 else 1
        size = x.shape[-1]
        _rms_norm[(x.shape[0] * heads,)](
            x, x, weight, out, eps, x.stride(0), x.stride(-2), heads, size,
            power_of_two(size), False, **FUSED, num_warps=_warps(size),
        )  # fmt: skip

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """residual += x, then out = residual / rms(residual) * weight; contiguous [tokens, dim]."""
        size = x.shape[-1]
        _rms_norm[(len(x),)](
            x, residual, weight, out, eps, size, size, 1, size,
            power_of_two(size), True, **FUSED, num_warps=_warps(size),
        )  # fmt: skip

    def rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, target: KVTarget
    ) -> None:
        """Rotate q in place, and store rotated k and v in the pool; see CpuKernels.rope_store."""
        tokens, heads, head_dim = q.shape
        kv_heads, half = k.shape[1], head_dim // 2
        pad = power_of_two
        _rope_store[(tokens, 2)](
            q, k, v, cos, sin, target.k_slots, target.v_slots, target.pool,
            q.stride(0), k.stride(0), v.stride(0),
            heads, pad(heads), kv_heads, pad(kv_heads), half, pad(half), **FUSED, num_warps=4,
        )  # fmt: skip

    def gate_mul(self, gate_up: Tensor, activation: str, out: Tensor) -> None:
        """out = activation(gate) * up; see CpuKernels.gate_mul."""
        kernel, *constants = _GATES[activation]
        tokens, size = out.shape
        step = min(2048, power_of_two(size))
        kernel[(tokens, triton.cdiv(size, step))](
            gate_up, out, gate_up.stride(0), size, step, *constants, **FUSED, num_warps=_warps(step)
        )


# By the names of activations.GATED: a kernel, and the constants that it takes last.
_GATES: dict[str, Any] = {
    "silu": (_gate_mul, False),
    "gelu_pytorch_tanh": (_gate_mul, True),
    "clamped_swiglu": (_clamped_swiglu,),
}


def _warps(size: int) -> int:
    return min(16, max(1, power_of_two(size) // 256))
