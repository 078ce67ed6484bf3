"""Recurrent layers on a GPU: a causal convolution, the rule's steps and a gated norm, each one
launch for all sequences of a step.

Every token is one step of the rule, in order, in a prompt as in a decode: by the same compiled
loop, whose sums have an order that the shapes alone fix. So the bits of a row depend on its
sequence alone. A column of a head's matrix depends on the same column of v alone: a program keeps a
block of columns in registers from the first token of a sequence to the last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoengine.config.model import RecurrentConfig
from nanoengine.context import ForwardContext, RecurrentState
from nanoengine.kernels.triton_launch import FUSED, power_of_two
from nanoengine.models.delta_net import DeltaNet, KimiNet
from nanoengine.models.mamba import MambaNet
from nanoengine.models.rules import RecurrentNet
from nanoengine.models.short_conv import ShortConvNet, short_conv

# Numbers of a head's matrix in a program, which is one warp: 32 registers of each thread. With more
# columns a prompt, one program for each block of a head, would leave schedulers without a warp; and
# the sums of one warp need no barrier.
MOST_NUMBERS = 1024


@triton.jit
def _sequence_of(token, query_start, num_seqs):
    """The last sequence that begins at this token or before: its number."""
    low = token * 0
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        is_later = tl.load(query_start + middle) <= token
        low = tl.where(is_later, middle, low)
        high = tl.where(is_later, high, middle)
    return low


@triton.jit
def _run_of(seq, query_start, kv_lens):
    """A sequence's first token in the step, the one past its last, whether its slot holds a state,
    and whether it is to have one: a padding row has no keys.
    """
    first = tl.load(query_start + seq)
    stop = tl.load(query_start + seq + 1)
    kv_len = tl.load(kv_lens + seq)
    return first, stop, kv_len > stop - first, kv_len > 0


@triton.jit
def _inputs_of(
    x, inputs, row, at, mask, first, is_old, slot, x_token,
    KEPT: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Inputs of the convolution in these rows, [rows, 1], and channels, [1, channels]: of the step,
    of the state before its first token, else zeros.
    """
    is_here = row >= first
    is_before = (row < first) & (row >= first - tl.where(is_old, KEPT, 0))
    here = tl.load(x + row.to(tl.int64) * x_token + at, mask=mask & is_here, other=0.0)
    kept = inputs + (slot * KEPT + KEPT + row - first) * CHANNELS + at
    return tl.where(is_here, here, tl.load(kept, mask=mask & is_before, other=0.0))


@triton.jit
def _softplus(x):
    """log(1 + e^x), also where 1 + e^x is 1."""
    e = tl.exp(tl.minimum(x, 20.0))
    above = 1.0 + e
    taken = above - 1.0  # what is left of e
    exact = tl.log(above) * (e / tl.where(taken == 0.0, 1.0, taken))
    return tl.where(x > 20.0, x, tl.where(taken == 0.0, e, exact))


@triton.jit
def _gates(
    ends, token, head, d, decay, dt_bias, gates, step_by, least_rate,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, IS_DELTA: tl.constexpr, IS_KIMI: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
):  # fmt: skip
    """How a head's matrix decays at this token, or each of its rows, and the share of v that it
    learns.
    """
    DECAYS: tl.constexpr = HEADS * KEY_DIM if IS_KIMI else HEADS
    at = head * KEY_DIM + d if IS_KIMI else head
    mask = d < KEY_DIM if IS_KIMI else None
    bias = tl.load(dt_bias + at, mask=mask)
    projected = tl.load(ends + HEADS * IS_DELTA + at, mask=mask).to(tl.float32)
    if not IS_DELTA:
        projected *= step_by
    of_head = tl.load(decay + head)
    if IS_BOUNDED:
        rate = least_rate / (1.0 + tl.exp(of_head * (projected + bias)))
    else:
        rate = _softplus(projected + bias)
    share = rate
    if IS_DELTA:
        b = tl.load(ends + head)
        share = (1.0 / (1.0 + tl.exp(-b.to(tl.float32)))).to(b.dtype).to(tl.float32) * step_by
    to = gates + token.to(tl.int64) * (DECAYS + HEADS)
    tl.store(to + at, tl.exp(rate if IS_BOUNDED else of_head * rate), mask=mask)
    tl.store(to + DECAYS + head, share)


@triton.jit(do_not_specialize=["num_seqs"])
def mix(
    x, conv, conv_bias, decay, dt_bias, inputs, slots, query_start, kv_lens, mixed, gates,
    num_seqs, x_token, q_scale, step_by, least_rate,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CONV_SIZE: tl.constexpr, CONV_PAD: tl.constexpr, PAD: tl.constexpr,
    IS_DELTA: tl.constexpr, IS_KIMI: tl.constexpr, IS_BOUNDED: tl.constexpr,
):  # fmt: skip
    """One token in one head: of q, of k, or of v with its gates."""
    token, part = tl.program_id(0), tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    KEPT: tl.constexpr = CONV_SIZE - 1
    seq = _sequence_of(token, query_start, num_seqs)
    first, _, is_old, _ = _run_of(seq, query_start, kv_lens)
    slot = tl.load(slots + seq)
    head = part - 2 * KEY_HEADS
    is_value = head >= 0
    d = tl.arange(0, PAD)
    at = tl.where(is_value, 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM, part * KEY_DIM) + d
    mask = d < tl.where(is_value, VALUE_DIM, KEY_DIM)
    place = tl.arange(0, CONV_PAD)[:, None]
    is_tap = (place < CONV_SIZE) & mask[None, :]
    value = _inputs_of(
        x, inputs, token - KEPT + place, at[None, :], is_tap, first, is_old, slot, x_token,
        KEPT, CHANNELS,
    )  # fmt: skip
    weight = tl.load(conv + place * CHANNELS + at[None, :], mask=is_tap, other=0.0)
    summed = tl.sum(value.to(tl.float32) * weight, 0)
    if not IS_DELTA:
        summed += tl.load(conv_bias + at, mask=mask, other=0.0)
    dtype = x.dtype.element_ty
    y = summed.to(dtype).to(tl.float32)
    y = (y / (1.0 + tl.exp(-y))).to(dtype).to(tl.float32)
    if IS_DELTA:
        unit = y * tl.rsqrt(tl.sum(y * y, 0) + 1e-6)
        y = tl.where(is_value, y, tl.where(part < KEY_HEADS, unit * q_scale, unit))
    tl.store(mixed + token.to(tl.int64) * CHANNELS + at, y, mask=mask)
    if is_value:
        ends = x + token.to(tl.int64) * x_token + CHANNELS + HEADS * VALUE_DIM
        _gates(
            ends, token, head, d, decay, dt_bias, gates, step_by, least_rate, HEADS, KEY_DIM,
            IS_DELTA, IS_KIMI, IS_BOUNDED,
        )  # fmt: skip


@triton.jit
def _keep_inputs(
    x, inputs, channel, first, stop, is_old, is_kept, slot, x_token,
    KEPT: tl.constexpr, KEPT_PAD: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The last inputs of a sequence take the place of those before the step."""
    place, at = tl.arange(0, KEPT_PAD)[:, None], channel[None, :]
    mask = (place < KEPT) & (at < tl.where(is_kept, CHANNELS, 0))
    row = stop - KEPT + place
    last = _inputs_of(
        x, inputs, row, at, mask, first, is_old, slot, x_token, KEPT, CHANNELS
    )  # fmt: skip
    tl.store(inputs + (slot * KEPT + place) * CHANNELS + at, last, mask=mask)


@triton.jit
def scan(
    x, inputs, memory, slots, query_start, kv_lens, mixed, gates, skip, x_token,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEPT: tl.constexpr, KEY_PAD: tl.constexpr, KEPT_PAD: tl.constexpr, BLOCK: tl.constexpr,
    SHARE: tl.constexpr, IS_DELTA: tl.constexpr, IS_KIMI: tl.constexpr,
):  # fmt: skip
    """All tokens of a sequence in a block of columns of a head's matrix: what it gives takes the
    place of v. And SHARE channels of the inputs that the next step needs.
    """
    block, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    first, stop, is_old, is_kept = _run_of(seq, query_start, kv_lens)
    slot = tl.load(slots + seq)
    channel = (head * tl.num_programs(0) + block) * SHARE + tl.arange(0, SHARE)
    _keep_inputs(
        x, inputs, channel, first, stop, is_old, is_kept, slot, x_token, KEPT, KEPT_PAD, CHANNELS
    )
    d, column = tl.arange(0, KEY_PAD), block * BLOCK + tl.arange(0, BLOCK)
    is_key, is_column = d < KEY_DIM, column < VALUE_DIM
    place = (slot * HEADS + head) * (KEY_DIM * VALUE_DIM)
    state_at = memory + place + d[:, None] * VALUE_DIM + column[None, :]
    is_read = (d < tl.where(is_old, KEY_DIM, 0))[:, None] & is_column[None, :]
    state = tl.load(state_at, mask=is_read, other=0.0)
    factor = 0.0 if IS_DELTA else tl.load(skip + head)
    rows = mixed + first.to(tl.int64) * CHANNELS
    q_at = rows + head // (HEADS // KEY_HEADS) * KEY_DIM + d
    v_at = rows + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
    DECAYS: tl.constexpr = HEADS * KEY_DIM if IS_KIMI else HEADS
    gates_at = gates + first.to(tl.int64) * (DECAYS + HEADS)
    for _ in tl.range(first, stop, num_stages=4):
        q = tl.load(q_at, mask=is_key, other=0.0)[:, None]
        k = tl.load(q_at + KEY_HEADS * KEY_DIM, mask=is_key, other=0.0)[:, None]
        v = tl.load(v_at, mask=is_column, other=0.0)
        by = tl.load(gates_at + DECAYS + head)
        if IS_KIMI:
            state *= tl.load(gates_at + head * KEY_DIM + d, mask=is_key, other=0.0)[:, None]
        else:
            state *= tl.load(gates_at + head)
        learnt = (v - tl.sum(state * k, 0)) * by if IS_DELTA else v * by
        state += k * learnt[None, :]
        read = tl.sum(state * q, 0)
        if not IS_DELTA:
            read += factor * v
        tl.store(v_at, read, mask=is_column)
        q_at += CHANNELS
        v_at += CHANNELS
        gates_at += DECAYS + HEADS
    is_written = (d < tl.where(is_kept, KEY_DIM, 0))[:, None] & is_column[None, :]
    tl.store(state_at, state, mask=is_written)


@triton.jit
def gated_norm(
    x, mixed, weight, out, eps, gate_by, x_token,
    FIRST: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    PAD: tl.constexpr, IS_DELTA: tl.constexpr, IS_KIMI: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One token in one head of a delta rule, or in the heads of one key head of Mamba-2, whose
    norm is one of NORMS. x holds the gates, `mixed` what the heads give, from column FIRST on.
    """
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, PAD)
    mask, at = d < SIZE, group * SIZE + d
    gate = tl.load(x + token * x_token + CHANNELS + at, mask=mask, other=0.0).to(tl.float32)
    gate *= gate_by
    gate = (1.0 if IS_KIMI else gate) / (1.0 + tl.exp(-gate))
    wide = tl.load(mixed + token * CHANNELS + FIRST + at, mask=mask, other=0.0)
    dtype = out.dtype.element_ty
    if IS_DELTA:
        wide = wide.to(dtype).to(tl.float32)
        weights = tl.load(weight + d, mask=mask, other=0.0)
    else:
        wide = wide if NORM == "before gate" else wide * gate
        weights = tl.load(weight + at, mask=mask, other=0.0)
    normed = wide
    if NORM != "none":
        normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    if IS_KIMI:
        result = normed * weights * gate
    elif IS_DELTA:
        weighted = (weights * normed.to(dtype).to(tl.float32)).to(dtype)
        result = weighted.to(tl.float32) * gate
    else:
        result = normed * weights
        result = result * gate if NORM == "before gate" else result
    tl.store(out + token * (GROUPS * SIZE) + at, result.to(dtype), mask=mask)


def recurrence(x: Tensor, net: RecurrentNet, state: RecurrentState, ctx: ForwardContext) -> Tensor:
    """As rules.recurrence; the rows of x may have a stride.

    A short convolution has no steps: a few operators of PyTorch, whatever the length of a prompt.
    """
    if isinstance(net, ShortConvNet):
        return short_conv(x, net, state, ctx)
    out = x.new_empty(len(x), net.shape.value_size)
    shape, is_delta, is_kimi = net.shape, isinstance(net, DeltaNet), isinstance(net, KimiNet)
    bias, skip, gate_by = None, None, 1.0
    if isinstance(net, MambaNet):
        bias, skip, gate_by = net.conv_bias, net.skip, net.gate_by
    heads = shape.num_key_heads, shape.num_value_heads, shape.key_dim, shape.value_dim
    tokens, num_seqs, pad = len(x), len(ctx.kv_lens), power_of_two
    mixed = x.new_empty(tokens, shape.channels, dtype=torch.float32)
    num_gates = shape.num_decays + shape.num_value_heads
    gates = x.new_empty(tokens, num_gates, dtype=torch.float32)
    step = state.slots, ctx.query_start, ctx.kv_lens
    widest = pad(max(shape.key_dim, shape.value_dim))
    mix[(tokens, 2 * shape.num_key_heads + shape.num_value_heads)](
        x, net.conv, bias, net.decay, net.dt_bias, state.inputs, *step, mixed, gates,
        num_seqs, x.stride(0), shape.key_dim**-0.5, net.step_by, shape.least_rate, *heads,
        shape.conv_size, pad(shape.conv_size), widest, is_delta, is_kimi, bool(shape.least_rate),
        **FUSED, num_warps=1,
    )  # fmt: skip
    block, blocks = blocks_of(shape)
    share = pad(triton.cdiv(shape.channels, blocks * shape.num_value_heads))
    kept = shape.conv_size - 1
    scan[(blocks, shape.num_value_heads, num_seqs)](
        x, state.inputs, state.memory, *step, mixed, gates, skip, x.stride(0),
        *heads, kept, pad(shape.key_dim), pad(kept), block, share, is_delta, is_kimi,
        **FUSED, num_warps=1,
    )  # fmt: skip
    groups = shape.num_value_heads if is_delta else shape.num_key_heads
    size = shape.value_size // groups
    gated_norm[(tokens, groups)](
        x, mixed, net.norm, out, net.eps, gate_by, x.stride(0), shape.channels - shape.value_size,
        shape.channels, groups, size, pad(size), is_delta, is_kimi, shape.norm,
        **FUSED, num_warps=min(16, max(1, pad(size) // 256)),
    )  # fmt: skip
    return out


def blocks_of(shape: RecurrentConfig) -> tuple[int, int]:
    """The columns of a block, and how many blocks there are in a head."""
    most = max(1, MOST_NUMBERS // power_of_two(shape.key_dim))
    block = min(power_of_two(shape.value_dim), most)
    return block, int(triton.cdiv(shape.value_dim, block))
