"""The gated delta rule (arXiv 2412.06464) in PyTorch, token by token.

A value head holds a matrix S. For each token: S decays by e^g, forgets beta of what it says of the
key, and learns beta of the value there; the query reads it. transformers computes a prompt in
chunks of 64 tokens, which is the same up to rounding. Here every token is a step of its own: so the
bits of a row depend on its history alone, however that was cut into steps. In Kimi Delta Attention
(arXiv 2510.26692) each row of S, a channel of the key, has a decay of its own; Ling 3.0's, as in
FLA's kda_gate with a lower bound, are e^(bound times a sigmoid).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nanoengine.config.model import RecurrentConfig
from nanoengine.context import ForwardContext, RecurrentState
from nanoengine.models.recurrence import convolve, each_step, new_sequences


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The weights of a layer between its projections.

    conv        fp32 [conv_size, channels], the oldest token first
    decay       fp32 [value_heads]: g is `decay` times the softplus of a + dt_bias
    dt_bias     fp32 [value_heads]
    norm        fp32 [value_dim]: of what a head gives; eps: of this norm
    step_by: what beta is multiplied by
    """

    shape: RecurrentConfig
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    step_by: float = 1.0


class KimiNet(DeltaNet):
    """The same of Kimi Delta Attention. dt_bias is [value_heads x key_dim]. If shape.least_rate is
    not 0, g is that times the sigmoid of -decay x (a + dt_bias).
    """

    __slots__ = ()


def flat_projections(stored: Mapping[str, Tensor], shape: RecurrentConfig) -> list[Tensor]:
    """The rows of a layer's projections in the order of RecurrentConfig.sizes.

    stored: by name. "qkvz" and "ba" hold those of a key head and its value heads together.
    """
    if "qkvz" not in stored:
        return list(stored.values())
    heads, values = shape.num_key_heads, shape.value_size // shape.num_key_heads
    sizes = [shape.key_dim, shape.key_dim, values, values]
    grouped = [
        *stored["qkvz"].view(heads, sum(sizes), -1).split_with_sizes(sizes, dim=1),
        *stored["ba"].view(heads, 2 * shape.num_value_heads // heads, -1).chunk(2, dim=1),
    ]
    return [part.flatten(0, 1) for part in grouped]


def gated_delta(x: Tensor, net: DeltaNet, state: RecurrentState, ctx: ForwardContext) -> Tensor:
    """[tokens, sum(shape.sizes)] -> [tokens, value_heads x value_dim]. Replaces the state.

    Rounds where transformers does: after the convolution, silu, sigmoid, the rule and the norm; of
    Kimi's norm the result alone.
    """
    shape, tokens = net.shape, len(x)
    mixed, z, b, a = x.split_with_sizes(shape.sizes, dim=1)
    is_new = new_sequences(ctx)
    mixed = functional.silu(convolve(mixed, net.conv, state, ctx, is_new))
    keys = shape.num_key_heads * shape.key_dim
    q, k, v = mixed.float().split_with_sizes([keys, keys, shape.value_size], dim=1)
    group = shape.num_value_heads // shape.num_key_heads
    q, k = (_unit(each.view(tokens, -1, shape.key_dim)) for each in (q, k))
    q, k = (each.repeat_interleave(group, dim=1) for each in (q * shape.key_dim**-0.5, k))
    v = v.view(tokens, -1, shape.value_dim)
    beta = b.sigmoid().float() * net.step_by
    rates = (a.float() + net.dt_bias).view(tokens, shape.num_value_heads, -1)
    if shape.least_rate:
        decay = (shape.least_rate * (-net.decay[:, None] * rates).sigmoid()).exp()
    else:
        decay = (net.decay[:, None] * functional.softplus(rates)).exp()
    read = torch.empty_like(v)

    def step(rows: Tensor, memory: Tensor) -> Tensor:
        now = memory * decay[rows].unsqueeze(-1)
        key = k[rows].unsqueeze(-1)
        change = (v[rows] - (now * key).sum(-2)) * beta[rows].unsqueeze(-1)
        now = now + key * change.unsqueeze(-2)
        read[rows] = (now * q[rows].unsqueeze(-1)).sum(-2)
        return now

    each_step(state, ctx, is_new, step)
    return _gated_norm(read.to(x.dtype), z.reshape(v.shape), net).reshape(tokens, -1)


def _unit(x: Tensor) -> Tensor:
    """x / |x|, as the kernels for this rule have it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _gated_norm(x: Tensor, gate: Tensor, net: DeltaNet) -> Tensor:
    """RMSNorm of each head times silu, or Kimi's sigmoid, of its gate."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + net.eps)
    if isinstance(net, KimiNet):
        return (net.norm * normed * gate.float().sigmoid()).to(x.dtype)
    weighted = (net.norm * normed.to(x.dtype).float()).to(x.dtype)
    return (weighted * functional.silu(gate.float())).to(x.dtype)
