"""Mamba-2 (arXiv 2405.21060) in PyTorch, token by token.

A head holds a matrix S. For each token S decays by e^(dt A), and learns dt x at B; C reads it, and
D x is added. In the words of RecurrentConfig C is the query, B the key and x the value.
transformers computes a prompt in chunks, which is the same up to rounding, and there alone raises
dt to `time_step_min`; its decodes, vLLM and this do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nanoengine.config.model import RecurrentConfig
from nanoengine.context import ForwardContext, RecurrentState
from nanoengine.models.recurrence import convolve, each_step, new_sequences

# What becomes of a head's results and the gate: both multiplied, then normed; normed, then
# multiplied; or multiplied alone.
NORMS = ("after gate", "before gate", "none")


@dataclass(frozen=True, slots=True)
class MambaNet:
    """The weights of a layer between its projections.

    conv        fp32 [conv_size, channels], the oldest token first
    conv_bias   fp32 [channels]
    decay       fp32 [value_heads]: A; dt is the softplus of what is projected + dt_bias
    dt_bias     fp32 [value_heads]
    skip        fp32 [value_heads]: D
    norm        fp32 [value_size]: of the heads that a key head serves; eps: of this norm. Without
                one results are multiplied by it nevertheless
    gate_by, step_by: what z and dt are multiplied by
    """

    shape: RecurrentConfig
    conv: Tensor
    conv_bias: Tensor
    decay: Tensor
    dt_bias: Tensor
    skip: Tensor
    norm: Tensor
    eps: float
    gate_by: float = 1.0
    step_by: float = 1.0


def flat_rows(rows: Tensor, shape: RecurrentConfig) -> Tensor:
    """The rows of a layer's projection, z; x, B, C; dt, in the order of RecurrentConfig.sizes. Of
    the convolution, too, which has x, B, C alone.
    """
    keys = shape.key_size
    ends = len(rows) - shape.channels
    z = rows[: shape.value_size if ends else 0]
    parts = [shape.value_size, keys, keys, ends - len(z)]
    x, b, c, dt = rows[len(z) :].split_with_sizes(parts)
    return torch.cat([c, b, x, z, dt])


def mamba(x: Tensor, net: MambaNet, state: RecurrentState, ctx: ForwardContext) -> Tensor:
    """[tokens, sum(shape.sizes)] -> [tokens, value_heads x value_dim]. Replaces the state.

    Rounds after the convolution, after silu, and the result.
    """
    shape, tokens = net.shape, len(x)
    mixed, z, dt = x.split_with_sizes(shape.sizes, dim=1)
    is_new = new_sequences(ctx)
    mixed = functional.silu(convolve(mixed, net.conv, state, ctx, is_new, net.conv_bias))
    keys = shape.key_size
    q, k, v = mixed.float().split_with_sizes([keys, keys, shape.value_size], dim=1)
    group = shape.num_value_heads // shape.num_key_heads
    q, k = (each.view(tokens, -1, shape.key_dim) for each in (q, k))
    q, k = (each.repeat_interleave(group, dim=1) for each in (q, k))
    v = v.view(tokens, -1, shape.value_dim)
    step_size = functional.softplus(dt.float() * net.step_by + net.dt_bias)
    decay = (net.decay * step_size).exp()
    learnt = v * step_size.unsqueeze(-1)
    read = torch.empty_like(v)

    def step(rows: Tensor, memory: Tensor) -> Tensor:
        now = memory * decay[rows, :, None, None]
        now = now + k[rows].unsqueeze(-1) * learnt[rows].unsqueeze(-2)
        read[rows] = (now * q[rows].unsqueeze(-1)).sum(-2)
        return now

    each_step(state, ctx, is_new, step)
    read += net.skip[:, None] * v
    gate = functional.silu(z.float() * net.gate_by)
    return gated_norm(read.view(tokens, -1), gate, net).to(x.dtype)


def gated_norm(read: Tensor, gate: Tensor, net: MambaNet) -> Tensor:
    """What heads give and the gate's silu, fp32 [tokens, value_size] -> one of NORMS of both."""
    kind = net.shape.norm
    made = read * gate if kind != "before gate" else read
    if kind != "none":
        groups = made.view(len(made), net.shape.num_key_heads, -1)
        scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + net.eps)
        made = (groups * scale).view(made.shape)
    made = made * net.norm
    return made * gate if kind == "before gate" else made
