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
    _joined_bits,
    _low_fields,
    _packed_bytes,
    _packed_deep,
    _packed_fields,
    _packed_low,
)
from nanoengine.kernels.triton_code_kernels import _bias, _chosen_rows
from nanoengine.kernels.triton_code_numbers import _half
from nanoengine.kernels.triton_few_scales import _scale_words, _times_scales


@triton.jit
def _first_words(expert, inputs, stride, FORMAT: tl.constexpr):
    """Where an expert begins in each plane: codes, high, halves, scales."""
    IS_BYTE: tl.constexpr = FORMAT == "Q8_0" or FORMAT == "INT8" or FORMAT == "FP8"
    IS_PACKED: tl.constexpr = FORMAT == "INT4" or FORMAT == "INT8"
    place = expert * stride
    codes, high = place * (inputs // (2 if IS_BYTE else 4)), place * tl.cdiv(inputs, 256) * 16
    halves, scales = place * (inputs // 64), place * (inputs // 64)
    if FORMAT == "Q6_K":
        high = place * (inputs // 8)
        halves = place // 2 * (inputs // 256)
    elif FORMAT == "Q4_K" or FORMAT == "Q5_K":
        halves = place * (inputs // 256)
        scales = halves * 3
    elif FORMAT == "Q2_K":
        codes, halves = place * (inputs // 8), place * (inputs // 256)
        scales = place * (inputs // 64)
    elif FORMAT == "Q3_K":
        codes, halves = place * (inputs // 8), place // 2 * (inputs // 256)
        scales = place * (inputs // 256 * 3)
    elif FORMAT == "IQ4_XS":
        halves = place * (inputs // 256)
        scales = halves
    elif FORMAT == "Q4_1" or FORMAT == "Q5_1" or IS_PACKED or FORMAT == "FP8":
        halves = place * (inputs // 32)
    return codes, high, halves, scales


@triton.jit
def _high_words(high, k, n, is_held, stride, FORMAT: tl.constexpr):
    """The words of the sixth and fifth bits of 128 inputs from k, or of the fifth of 256. Of Q2_K
    those of 2 bits of 128.
    """
    EVERY: tl.constexpr = 8 if FORMAT == "Q6_K" or FORMAT == "Q2_K" else 16
    w = tl.arange(0, 16)[None, :]
    to = high + (k // EVERY + w).to(tl.int64) * stride + n[:, None]
    return tl.load(to, mask=is_held[:, None], other=0)


@triton.jit
def _weights_of_words(
    codes, words, shared, k, n, is_held, stride, dtype: tl.constexpr, GROUP: tl.constexpr,
    FORMAT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """`_weights` whose codes nothing else shares."""
    w = tl.arange(0, 16)[None, :]
    IS_BYTE: tl.constexpr = FORMAT == "Q8_0" or FORMAT == "INT8" or FORMAT == "FP8"
    to = codes + (k // (2 if IS_BYTE else 4) + w).to(tl.int64) * stride + n[:, None]
    word = tl.load(to, mask=is_held[:, None], other=0)
    early = tl.full(word.shape, 8.0 if FORMAT == "Q4_0" else 0.0, tl.float32)
    late = early
    if FORMAT == "INT4" or FORMAT == "INT8":
        early = tl.broadcast_to(_half(words[0] >> 16)[:, None], word.shape)
        late = tl.broadcast_to(_half(words[1] >> 16)[:, None], word.shape)
    if IS_BYTE:
        other = tl.load(to + 16 * stride, mask=is_held[:, None], other=0)
        if PACKED:
            a, b = _packed_bytes(word, early, FORMAT)
            c, d = _packed_bytes(other, late, FORMAT)
        else:
            a, b = _bytes(word, early, dtype, FORMAT)
            c, d = _bytes(other, late, dtype, FORMAT)
    elif FORMAT == "Q5_0" or FORMAT == "Q5_1" or FORMAT == "Q5_K" or FORMAT == "Q6_K":
        BITS: tl.constexpr = 2 if FORMAT == "Q6_K" else 1
        LESS: tl.constexpr = 32 if FORMAT == "Q6_K" else 16 if FORMAT == "Q5_0" else 0
        FIRST: tl.constexpr = GROUP % 2 * 8 if FORMAT == "Q6_K" else GROUP * 4
        high = shared[0] if FORMAT != "Q6_K" or GROUP < 2 else shared[1]
        if PACKED:
            a, b, c, d = _packed_deep(word, high, BITS, FIRST, LESS)
        else:
            a, b, c, d = _deep_fields(word, high, dtype, BITS, FIRST, LESS)
    elif PACKED:
        a, b, c, d = _packed_fields(word, (early, late), FORMAT)
    else:
        a, b, c, d = _fields(word, (early, late), dtype, FORMAT)
    return a, b, c, d


@triton.jit
def _low_weights(
    shared, dtype: tl.constexpr, GROUP: tl.constexpr, FORMAT: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """`_weights` of Q2_K and blocks as in Q3_K, whose codes `shared` has."""
    word, high = shared[0] if GROUP < 2 else shared[1], shared[2]
    FIRST: tl.constexpr = GROUP % 2 * 8
    LESS: tl.constexpr = 4 if FORMAT == "Q3_K" else 0
    if FORMAT == "IQ2" or FORMAT == "IQ1":
        code = _joined_bits(word, high, FIRST, GROUP * 4)
        if PACKED:
            fields = _packed_fields(code, (0.0, 0.0), FORMAT)
        else:
            fields = _fields(code, (0.0, 0.0), dtype, FORMAT)
    elif PACKED:
        fields = _packed_low(word, high, FIRST, GROUP * 4, LESS)
    else:
        fields = _low_fields(word, high, dtype, FIRST, GROUP * 4, LESS)
    return fields


@triton.jit
def _weights(
    codes, words, shared, k, n, is_held, stride, dtype: tl.constexpr, GROUP: tl.constexpr,
    FORMAT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The four operands of 64 inputs from k, [outputs, 16] each. GROUP: which 64 of a block of 256;
    shared: of `_shared`; words: of `_scale_words`.
    """
    if FORMAT == "Q2_K" or FORMAT == "Q3_K" or FORMAT == "IQ2" or FORMAT == "IQ1":
        fields = _low_weights(shared, dtype, GROUP, FORMAT, PACKED)
    else:
        fields = _weights_of_words(
            codes, words, shared, k, n, is_held, stride, dtype, GROUP, FORMAT, PACKED
        )
    return fields


@triton.jit
def _shared(codes, halves, high, scales, k, n, is_held, stride, FORMAT: tl.constexpr):
    """What 256 inputs from k share: first the high bits, of Q6_K of either half, and of Q2_K and
    blocks as in Q3_K all codes of either half, then the high bits. Last the word of the numbers of
    16 bits of formats of 256; before it three or one of scales of 6 bits.
    """
    if FORMAT == "Q6_K":
        to = halves + k // 256 * (stride // 2) + n // 2
        both = tl.load(to, mask=is_held, other=0) >> n % 2 * 16
        early = _high_words(high, k, n, is_held, stride, FORMAT)
        late = _high_words(high, k + 128, n, is_held, stride, FORMAT)
        return early, late, both
    elif FORMAT == "Q4_K" or FORMAT == "Q5_K":
        both = tl.load(halves + k // 256 * stride + n, mask=is_held, other=0)
        to = scales + k // 256 * 3 * stride + n
        low = tl.load(to, mask=is_held, other=0)
        middle = tl.load(to + stride, mask=is_held, other=0)
        above = tl.load(to + 2 * stride, mask=is_held, other=0)
        fifth = both
        if FORMAT == "Q5_K":
            fifth = _high_words(high, k, n, is_held, stride, FORMAT)
        return fifth, low, middle, above, both
    elif FORMAT == "IQ4_XS":
        at = k // 256 * stride + n
        low = tl.load(scales + at, mask=is_held, other=0)
        return low, tl.load(halves + at, mask=is_held, other=0)
    elif FORMAT == "Q2_K":
        early = _high_words(codes, k, n, is_held, stride, FORMAT)
        late = _high_words(codes, k + 128, n, is_held, stride, FORMAT)
        both = tl.load(halves + k // 256 * stride + n, mask=is_held, other=0)
        return early, late, early, both  # it has no high bits
    elif FORMAT == "Q3_K":
        early = _high_words(codes, k, n, is_held, stride, "Q2_K")
        late = _high_words(codes, k + 128, n, is_held, stride, "Q2_K")
        third = _high_words(high, k, n, is_held, stride, FORMAT)
        to = halves + k // 256 * (stride // 2) + n // 2
        both = tl.load(to, mask=is_held, other=0) >> n % 2 * 16
        to = scales + k // 256 * 3 * stride + n
        low = tl.load(to, mask=is_held, other=0)
        other = tl.load(to + stride, mask=is_held, other=0)
        above = tl.load(to + 2 * stride, mask=is_held, other=0)
        return early, late, third, low, other, above, both
    elif FORMAT == "Q5_0" or FORMAT == "Q5_1":
        return (_high_words(high, k, n, is_held, stride, FORMAT),)
    else:
        return (k,)


@triton.jit(do_not_specialize=["tokens", "num_spans"])
def few_rows(
    x,
    out,
    bias,
    codes,
    high,
    halves,
    scales,
    experts,
    starts,
    ends,
    places,
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
    EACH: tl.constexpr,
    PACKED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_PART: tl.constexpr,
):
    """As triton_code_kernels.product. GROUPS of 64 inputs a step: 4 where 256 share words, see
    `_shared`. IS_EVEN: no step ends behind the inputs. LAYOUT: whose blocks FORMAT has.
    """
    IS_3: tl.constexpr = FORMAT == "IQ2" or FORMAT == "IQ1"
    IS_4: tl.constexpr = FORMAT == "IQ3_XXS" or FORMAT == "IQ3_S"
    LAYOUT: tl.constexpr = "Q3_K" if IS_3 else "IQ4_XS" if IS_4 else FORMAT
    first = tl.program_id(2) if IS_PART else 0
    last = first + 1 if IS_PART else num_spans
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    if EACH:
        tiles = experts, starts, ends, places
        x_at, out_at, is_row, expert = _chosen_rows(tl.program_id(1), tiles, ROWS, EACH)
        if expert < 0:  # a tile beyond those that rows fill
            last = first
        expert = tl.maximum(expert, 0)
        place = _first_words(expert, inputs, stride, LAYOUT)
        codes += place[0]
        if high is not None:
            high += place[1]
        halves += place[2]
        if scales is not None:
            scales += place[3]
        if bias is not None:
            bias += expert * outputs
    else:
        x_at = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        out_at, is_row = x_at, x_at < tokens
    is_row, is_held, is_output = is_row[None, :], n < stride, n < outputs
    x += x_at[None, :] * x_row + tl.arange(0, 16)[:, None]
    dtype: tl.constexpr = x.dtype.element_ty
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    if bias is not None:
        total += _bias(bias, n, is_output, first)[:, None]
    for number in range(first, last):
        part = tl.zeros([OUTPUTS, ROWS], tl.float32)
        end = tl.minimum(number * span + span, inputs)
        for k in tl.range(number * span, end, GROUPS * 64, num_stages=STAGES):
            shared = _shared(codes, halves, high, scales, k, n, is_held, stride, LAYOUT)
            for group in tl.static_range(GROUPS):
                at, is_here, is_value = k + group * 64, is_held, is_row
                if not IS_EVEN:
                    is_here = is_held & (n * 0 + at < inputs)
                    is_value = is_row & (x_at[None, :] * 0 + at < inputs)
                words = _scale_words(halves, scales, at, n, is_here, stride, LAYOUT)
                weights = _weights(
                    codes, words, shared, at, n, is_here, stride, dtype, group, FORMAT, PACKED
                )
                rows = (
                    tl.load(x + at, mask=is_value, other=0.0),
                    tl.load(x + at + 16, mask=is_value, other=0.0),
                    tl.load(x + at + 32, mask=is_value, other=0.0),
                    tl.load(x + at + 48, mask=is_value, other=0.0),
                )
                part = _times_scales(part, weights, rows, shared, words, group, LAYOUT)
        total += part
    if IS_PART:
        out += tl.program_id(2).to(tl.int64) * tokens * outputs
    to = out + out_at[None, :] * out_row + n[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_output[:, None] & is_row)
