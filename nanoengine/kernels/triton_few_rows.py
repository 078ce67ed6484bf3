"""Few rows times codes on a GPU: codes become operands of tensor cores in registers.

A word of a plane of int16 (code_planes.py) holds weights that are 16 apart, so each of its fields,
of 16 words, is the operand of an instruction of 16 inputs, and no weight moves between threads.
Codes are multiplied as exact small numbers (levels of NF4 are rounded to the dtype of x), and their
scale multiplies the float32 sum of a block: fewer roundings than of triton_code_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanoengine.kernels.triton_code_fields import (
    _bytes,
    _deep_fields,
    _fields,
    _packed_bytes,
    _packed_deep,
    _packed_fields,
)
from nanoengine.kernels.triton_code_kernels import _half


@triton.jit
def _high_words(high, k, n, is_held, stride, FORMAT: tl.constexpr):
    """The words of the high bits of 128 inputs from k (Q5_K: of 256)."""
    EVERY: tl.constexpr = 8 if FORMAT == "Q6_K" else 16
    w = tl.arange(0, 16)[None, :]
    to = high + (k // EVERY + w).to(tl.int64) * stride + n[:, None]
    return tl.load(to, mask=is_held[:, None], other=0)


@triton.jit
def _weights(
    codes, shared, k, n, is_held, stride, dtype: tl.constexpr, GROUP: tl.constexpr,
    FORMAT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The four operands of 64 inputs from k, [outputs, 16] each. GROUP: which 64 of a block of 256;
    shared: of `_shared`.
    """
    w = tl.arange(0, 16)[None, :]
    EACH: tl.constexpr = 2 if FORMAT == "Q8_0" else 4
    to = codes + (k // EACH + w).to(tl.int64) * stride + n[:, None]
    word = tl.load(to, mask=is_held[:, None], other=0)
    if FORMAT == "Q8_0":
        other = tl.load(to + 16 * stride, mask=is_held[:, None], other=0)
        if PACKED:
            a, b = _packed_bytes(word)
            c, d = _packed_bytes(other)
        else:
            a, b = _bytes(word, dtype)
            c, d = _bytes(other, dtype)
    elif FORMAT == "Q5_K" or FORMAT == "Q6_K":
        BITS: tl.constexpr = 2 if FORMAT == "Q6_K" else 1
        FIRST: tl.constexpr = GROUP % 2 * 8 if FORMAT == "Q6_K" else GROUP * 4
        high = shared[1 + GROUP // 2 if FORMAT == "Q6_K" else 4]
        if PACKED:
            a, b, c, d = _packed_deep(word, high, BITS, FIRST)
        else:
            a, b, c, d = _deep_fields(word, high, dtype, BITS, FIRST)
    elif PACKED:
        a, b, c, d = _packed_fields(word, FORMAT)
    else:
        a, b, c, d = _fields(word, dtype, FORMAT)
    return a, b, c, d


@triton.jit
def _shared(halves, high, scales, k, n, is_held, stride, FORMAT: tl.constexpr):
    """What a block of 256 inputs from k shares: first the word of its numbers of 16 bits. Q6_K: the
    high bits of either half; Q4_K, Q5_K: three words of scales of 6 bits, and Q5_K's high bits.
    """
    if FORMAT == "Q6_K":
        to = halves + k // 256 * (stride // 2) + n // 2
        both = tl.load(to, mask=is_held, other=0) >> n % 2 * 16
        early = _high_words(high, k, n, is_held, stride, FORMAT)
        late = _high_words(high, k + 128, n, is_held, stride, FORMAT)
        return both, early, late
    elif FORMAT == "Q4_K" or FORMAT == "Q5_K":
        both = tl.load(halves + k // 256 * stride + n, mask=is_held, other=0)
        to = scales + k // 256 * 3 * stride + n
        low = tl.load(to, mask=is_held, other=0)
        middle = tl.load(to + stride, mask=is_held, other=0)
        above = tl.load(to + 2 * stride, mask=is_held, other=0)
        late = both
        if FORMAT == "Q5_K":
            late = _high_words(high, k, n, is_held, stride, FORMAT)
        return both, low, middle, above, late
    else:
        return (k,)


@triton.jit
def _one(a, x):
    """a @ x, float32."""
    return tl.dot(a, x, input_precision="ieee")


@triton.jit
def _two(a, b, x, y):
    """a @ x + b @ y, float32."""
    return tl.dot(b, y, _one(a, x), input_precision="ieee")


@triton.jit
def _six_bits(shared, shift):
    """The scale and minimum of a group of 32, in units of those of the block."""
    low, middle, above = shared[1], shared[2], shared[3] >> shift
    scale = (low >> shift & 15) | (above & 3) << 4
    minimum = (middle >> shift & 15) | (above & 12) << 2
    return scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def _times_six_bits(part, weights, rows, shared, GROUP: tl.constexpr):
    """part and 64 inputs of Q4_K or Q5_K: scales of 32 inputs, and minima that their sums take."""
    a, b, c, d = weights
    xa, xb, xc, xd = rows
    both = shared[0]
    ones = tl.full(a.shape, 1.0, a.dtype)
    scale, minimum = _six_bits(shared, GROUP * 8)
    part += (_half(both) * scale)[:, None] * _two(a, b, xa, xb)
    part -= (_half(both >> 16) * minimum)[:, None] * _two(ones, ones, xa, xb)
    scale, minimum = _six_bits(shared, GROUP * 8 + 4)
    part += (_half(both) * scale)[:, None] * _two(c, d, xc, xd)
    part -= (_half(both >> 16) * minimum)[:, None] * _two(ones, ones, xc, xd)
    return part


@triton.jit
def _times_eight_bits(part, weights, rows, both, four):
    """part and 64 inputs of Q6_K: `four` are scales of 16 inputs each."""
    a, b, c, d = weights
    xa, xb, xc, xd = rows
    scale = _half(both)
    part += (scale * (four << 24 >> 24).to(tl.float32))[:, None] * _one(a, xa)
    part += (scale * (four << 16 >> 24).to(tl.float32))[:, None] * _one(b, xb)
    part += (scale * (four << 8 >> 24).to(tl.float32))[:, None] * _one(c, xc)
    part += (scale * (four >> 24).to(tl.float32))[:, None] * _one(d, xd)
    return part


@triton.jit
def _times_word(part, weights, rows, word, FORMAT: tl.constexpr):
    """part and 64 inputs of other formats: one scale of 32 bits, or two of 16."""
    a, b, c, d = weights
    xa, xb, xc, xd = rows
    one, two = _two(a, b, xa, xb), _two(c, d, xc, xd)
    if FORMAT == "NF4":
        part += word.to(tl.float32, bitcast=True)[:, None] * (one + two)
    elif FORMAT == "MXFP4":
        part += (word << 16).to(tl.float32, bitcast=True)[:, None] * one
        part += (word & -0x10000).to(tl.float32, bitcast=True)[:, None] * two
    else:
        part += _half(word)[:, None] * one
        part += _half(word >> 16)[:, None] * two
    return part


@triton.jit(do_not_specialize=["tokens", "num_spans"])
def few_rows(
    x,
    out,
    bias,
    codes,
    high,
    halves,
    scales,
    tokens,
    outputs,
    inputs,
    stride,
    x_row,
    out_row,
    span,
    num_spans,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,
    IS_PART: tl.constexpr,
):
    """As triton_code_kernels.product. GROUPS of 64 inputs a step; blocks of 256: 4."""
    first, last = 0, num_spans
    if IS_PART:
        first = tl.program_id(2)
        last = first + 1
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_held, is_output = (row < tokens)[None, :], n < stride, n < outputs
    x += row.to(tl.int64)[None, :] * x_row + tl.arange(0, 16)[:, None]
    dtype: tl.constexpr = x.dtype.element_ty
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for number in range(first, last):
        part = tl.zeros([OUTPUTS, ROWS], tl.float32)
        end = tl.minimum(number * span + span, inputs)
        for k in tl.range(number * span, end, GROUPS * 64, num_stages=STAGES):
            shared = _shared(halves, high, scales, k, n, is_held, stride, FORMAT)
            for group in tl.static_range(GROUPS):
                at = k + group * 64
                weights = _weights(
                    codes, shared, at, n, is_held, stride, dtype, group, FORMAT, PACKED
                )
                rows = (
                    tl.load(x + at, mask=is_row, other=0.0),
                    tl.load(x + at + 16, mask=is_row, other=0.0),
                    tl.load(x + at + 32, mask=is_row, other=0.0),
                    tl.load(x + at + 48, mask=is_row, other=0.0),
                )
                if FORMAT == "Q6_K":
                    four = tl.load(scales + at // 64 * stride + n, mask=is_held, other=0)
                    part = _times_eight_bits(part, weights, rows, shared[0], four)
                elif FORMAT == "Q4_K" or FORMAT == "Q5_K":
                    part = _times_six_bits(part, weights, rows, shared, group)
                else:
                    word = tl.load(halves + at // 64 * stride + n, mask=is_held, other=0)
                    part = _times_word(part, weights, rows, word, FORMAT)
        total += part
    if IS_PART:
        out += tl.program_id(2).to(tl.int64) * tokens * outputs
    elif bias is not None:
        total += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    to = out + row.to(tl.int64)[None, :] * out_row + n[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_output[:, None] & is_row)
