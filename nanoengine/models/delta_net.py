"""The gated delta rule (arXiv 2412.06464) in PyTorch, token by token.

A value head holds a matrix S. For each token: S decays by e^g, forgets beta of what it says of the
key, and learns beta of the value there; the query reads it. transformers computes a prompt in
chunks of 64 tokens, which is the same up to rounding. Here every token is a step of its own: so the
bits of a row depend on its history alone, however that was cut into steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nanoengine.config.model import DeltaConfig
from nanoengine.context import ForwardContext, RecurrentState


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The weights of a layer between its projections.

    conv        fp32 [conv_size, channels], the oldest token first
    decay       fp32 [value_heads]: g is `decay` times the softplus of a + dt_bias
    dt_bias     fp32 [value_heads]
    norm        fp32 [value_dim]: of what a head gives; eps: of this norm
    """

    shape: DeltaConfig
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float

    @property
    def sizes(self) -> list[int]:
        """Numbers of a token that it takes: q, k and v; the gate z; b and a."""
        heads = self.shape.num_value_heads
        return [self.shape.channels, self.shape.value_size, heads, heads]


def flat_projections(stored: Mapping[str, Tensor], shape: DeltaConfig) -> list[Tensor]:
    """The rows of a layer's projections in the order of DeltaNet.sizes.

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
    """[tokens, sum(net.sizes)] -> [tokens, value_heads x value_dim]. Replaces the state.

    Rounds where transformers does: after the convolution, silu, sigmoid, the rule and the norm.
    """
    shape, tokens = net.shape, len(x)
    mixed, z, b, a = x.split_with_sizes(net.sizes, dim=1)
    starts = ctx.query_start[:-1].long()
    is_new = ctx.kv_lens == ctx.query_start.diff()
    mixed = _convolve(mixed, net, state, ctx, is_new)
    keys = shape.num_key_heads * shape.key_dim
    q, k, v = mixed.float().split_with_sizes([keys, keys, shape.value_size], dim=1)
    group = shape.num_value_heads // shape.num_key_heads
    q, k = (_unit(each.view(tokens, -1, shape.key_dim)) for each in (q, k))
    q, k = (each.repeat_interleave(group, dim=1) for each in (q * shape.key_dim**-0.5, k))
    v = v.view(tokens, -1, shape.value_dim)
    beta = b.sigmoid().float()
    decay = (net.decay * functional.softplus(a.float() + net.dt_bias)).exp()
    memory = state.memory[state.slots].masked_fill(is_new.view(-1, 1, 1, 1), 0.0)
    read = torch.empty_like(v)
    counts = [count for count, _ in ctx.lengths]
    longest_first = _longest_first(counts, x.device)
    for step in range(max(counts)):
        num = sum(count > step for count in counts)
        at = None if num == len(counts) else longest_first[:num]
        rows = (starts if at is None else starts[at]) + step
        now = (memory if at is None else memory[at]) * decay[rows, :, None, None]
        key = k[rows].unsqueeze(-1)
        change = (v[rows] - (now * key).sum(-2)) * beta[rows].unsqueeze(-1)
        now = now + key * change.unsqueeze(-2)
        read[rows] = (now * q[rows].unsqueeze(-1)).sum(-2)
        memory = now if at is None else memory.index_copy(0, at, now)
    state.memory.index_copy_(0, state.slots, memory)
    return _gated_norm(read.to(x.dtype), z.reshape(v.shape), net).reshape(tokens, -1)


def _longest_first(counts: list[int], device: torch.device) -> Tensor:
    """The sequences, those with most tokens first, int64 [n]; the host does not wait. Of a decode
    nothing goes to the device, so that it can be a CUDA graph.
    """
    if min(counts) == max(counts):
        return torch.empty(0, dtype=torch.int64)
    order = torch.tensor(sorted(range(len(counts)), key=counts.__getitem__, reverse=True))
    if device.type != "cpu":
        order = order.pin_memory()
    return order.to(device, non_blocking=True)


def _convolve(
    x: Tensor, net: DeltaNet, state: RecurrentState, ctx: ForwardContext, is_new: Tensor
) -> Tensor:
    """silu of the causal convolution of x, [tokens, channels]; keeps the last inputs."""
    starts, stops = ctx.query_start[:-1].long(), ctx.query_start[1:].long()
    before = state.inputs[state.slots].masked_fill(is_new.view(-1, 1, 1), 0.0)
    num_seqs, kept, _ = before.shape
    rows = torch.arange(len(x), device=x.device)
    seqs = torch.searchsorted(stops, rows, right=True)
    both = torch.cat((before.flatten(0, 1), x))
    summed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for place, weight in enumerate(net.conv):
        ago = kept - place
        is_earlier = rows - ago < starts[seqs]
        earlier = seqs * kept + rows - starts[seqs] + place
        summed += both[torch.where(is_earlier, earlier, num_seqs * kept + rows - ago)] * weight
    places = torch.arange(kept, device=x.device)
    last = stops[:, None] - kept + places
    earlier = torch.arange(num_seqs, device=x.device)[:, None] * kept + places
    earlier = earlier + (stops - starts)[:, None]
    last = torch.where(last < starts[:, None], earlier, num_seqs * kept + last)
    state.inputs.index_copy_(0, state.slots, both[last])
    return functional.silu(summed.to(x.dtype))


def _unit(x: Tensor) -> Tensor:
    """x / |x|, as the kernels for this rule have it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _gated_norm(x: Tensor, gate: Tensor, net: DeltaNet) -> Tensor:
    """RMSNorm of each head times silu of its gate."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + net.eps)
    weighted = (net.norm * normed.to(x.dtype).float()).to(x.dtype)
    return (weighted * functional.silu(gate.float())).to(x.dtype)
