"""The kernels of triton_codes.py: codes become numbers in the tile that is multiplied."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _fields(words, first, n, is_output, stride, inputs_left, BITS: tl.constexpr, K: tl.constexpr):
    """Fields of BITS bits of the K weights from word `first` on, [outputs, K / 32, 32]."""
    w = tl.arange(0, K * BITS // 32)
    mask = is_output[:, None] & (w * (32 // BITS) < inputs_left)[None, :]
    held = tl.load(words + first * stride + w[None, :] * stride + n[:, None], mask=mask, other=0)
    fields = held[:, :, None] >> (tl.arange(0, 32 // BITS) * BITS)[None, None, :]
    return tl.reshape(fields & ((1 << BITS) - 1), [n.shape[0], K // 32, 32])


@triton.jit
def _e2m1(code):
    """Numbers of 4 bits: a sign, 2 bits of exponent, 1 of mantissa."""
    size = code & 7
    bits = tl.where(size < 2, size * 0x3F000000, (size << 22) + 0x3F000000)
    return (bits | (code & 8) << 28).to(tl.float32, bitcast=True)


@triton.jit
def _half(words, row, n, is_held, stride, IS_POWER: tl.constexpr):
    """Numbers of 16 bits in a plane of them, as float32: float16, or bfloat16 that is a power of
    two. Words are loaded, which can be copied ahead of a loop, and halves of them cannot.
    """
    word = tl.load(words + row * (stride // 2) + n // 2, mask=is_held, other=0)
    half = word >> (n % 2 * 16).to(tl.int32)
    if IS_POWER:
        return (half << 16).to(tl.float32, bitcast=True)
    return (half & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _six_bits(words, n, is_output, stride, g):
    """The 6-bit scales and minima of groups g that Q4_K and Q5_K keep in 3 words, as float32."""
    low = tl.load(words + n, mask=is_output, other=0)[:, None]
    middle = tl.load(words + stride + n, mask=is_output, other=0)[:, None]
    high = tl.load(words + 2 * stride + n, mask=is_output, other=0)[:, None]
    shift = (g % 4 * 8).to(tl.int32)[None, :]
    low, middle, high = low >> shift, middle >> shift, high >> shift
    is_first = (g < 4)[None, :]
    scale = tl.where(is_first, low & 63, (high & 15) | (low >> 6 & 3) << 4)
    minimum = tl.where(is_first, middle & 63, (high >> 4 & 15) | (middle >> 6 & 3) << 4)
    return scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def _code(codes, high, n, is_output, k, left, stride, FORMAT: tl.constexpr, K: tl.constexpr):
    """The codes of `_numbers`, int32 [outputs, K / 32, 32]."""
    if FORMAT == "Q8_0" or FORMAT == "INT8":
        d = tl.arange(0, K)
        mask = is_output[:, None] & (d < left)[None, :]
        held = tl.load(codes + k * stride + d[None, :] * stride + n[:, None], mask=mask, other=0)
        return tl.reshape(held, [n.shape[0], K // 32, 32]).to(tl.int32)
    code = _fields(codes, k // 8, n, is_output, stride, left, 4, K)
    if FORMAT == "Q5_0" or FORMAT == "Q5_1" or FORMAT == "Q5_K":
        code |= _fields(high, k // 32, n, is_output, stride, left, 1, K) << 4
    if FORMAT == "Q6_K":
        code |= _fields(high, k // 16, n, is_output, stride, left, 2, K) << 4
    return code


@triton.jit
def _numbers(planes, n, is_output, k, left, stride, FORMAT: tl.constexpr, K: tl.constexpr):
    """Weights [k, k + K) of outputs n, float32 [outputs, K]. k counts on from expert to expert, and
    is int64; those from the input k + left on are anything finite.
    """
    codes, high, halves, scales = planes
    code = _code(codes, high, n, is_output, k, left, stride, FORMAT, K)
    number = code.to(tl.float32)
    group = tl.arange(0, K // 32)
    if FORMAT == "Q4_K" or FORMAT == "Q5_K":
        block = k // 256
        d = _half(halves, block * 2, n, is_output, stride, False)[:, None]
        m = _half(halves, block * 2 + 1, n, is_output, stride, False)[:, None]
        words = scales + block * 3 * stride
        scale, minimum = _six_bits(words, n, is_output, stride, k % 256 // 32 + group)
        weights = (d * scale)[:, :, None] * number - (m * minimum)[:, :, None]
    elif FORMAT == "Q6_K":
        d = _half(halves, k // 256, n, is_output, stride, False)[:, None]
        half_group = tl.arange(0, K // 16)
        held = is_output[:, None] & (half_group * 16 < left)[None, :]
        at = (k // 16 + half_group)[None, :] * (stride // 4) + (n // 4)[:, None]
        four = tl.load(scales + at, mask=held, other=0) >> (n % 4 * 8).to(tl.int32)[:, None]
        scale = d * (four << 24 >> 24).to(tl.float32)
        number = tl.reshape(number, [n.shape[0], K // 16, 16])
        weights = scale[:, :, None] * (number - 32.0)
    else:
        IS_PAIR: tl.constexpr = (
            FORMAT == "Q4_1" or FORMAT == "Q5_1" or FORMAT == "INT4" or FORMAT == "INT8"
        )
        NUM: tl.constexpr = 2 if IS_PAIR else 1
        held = is_output[:, None] & (group * 32 < left)[None, :]
        row = ((k // 32 + group) * NUM)[None, :]
        scale = _half(halves, row, n[:, None], held, stride, FORMAT == "MXFP4")[:, :, None]
        if IS_PAIR:
            other = _half(halves, row + 1, n[:, None], held, stride, False)[:, :, None]
            if FORMAT == "INT4" or FORMAT == "INT8":
                weights = scale * (number - other)
            else:
                weights = scale * number + other
        elif FORMAT == "MXFP4":
            weights = scale * _e2m1(code)
        elif FORMAT == "Q4_0":
            weights = scale * (number - 8.0)
        elif FORMAT == "Q5_0":
            weights = scale * (number - 16.0)
        else:
            weights = scale * number
    return tl.reshape(weights, [n.shape[0], K])


@triton.jit
def _chosen_rows(tile, tiles, ROWS: tl.constexpr, EACH: tl.constexpr):
    """The rows of a tile: of x, of out, which are there, and their expert. A row of out is a
    choice, of which each row of x makes EACH; tiles: of ChosenTiles.
    """
    experts, starts, ends, places = tiles
    index = tl.load(starts + tile) + tl.arange(0, ROWS)
    is_row = index < tl.load(ends + tile)
    place = tl.load(places + index, mask=is_row, other=0)
    return place // EACH, place, is_row, tl.load(experts + tile)


@triton.jit(do_not_specialize=["tokens", "num_spans"])  # one code for steps of one size
def product(
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
    K: tl.constexpr,
    EACH: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_PART: tl.constexpr,
):
    """ROWS rows of x times OUTPUTS outputs. IS_PART: one span, float32 [spans, tokens, outputs].
    EACH: the choices of each row of x; 0: there are no experts.
    """
    first, last = 0, num_spans
    if IS_PART:
        first = tl.program_id(2)
        last = first + 1
    if EACH:
        tiles = experts, starts, ends, places
        x_at, out_at, is_row, expert = _chosen_rows(tl.program_id(0), tiles, ROWS, EACH)
        if expert < 0:  # a tile beyond those that rows fill
            last = 0
    else:
        x_at = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        out_at, is_row = x_at, x_at < tokens
    planes = codes, high, halves, scales
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = n < outputs
    x += x_at[None, :] * x_row
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    d = tl.arange(0, K)
    for number in range(first, last):
        part = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for k in range(number * span, tl.minimum(number * span + span, inputs), K):
            left = inputs - k
            if IS_EVEN:
                left = K
            at = tl.cast(k, tl.int64)
            if EACH:
                at += expert * inputs
            weights = _numbers(planes, n, n < stride, at, left, stride, FORMAT, K)
            mask = is_row[None, :] & (d < left)[:, None]
            values = tl.load(x + (k + d)[:, None], mask=mask, other=0.0)
            part = tl.dot(weights.to(values.dtype), values, part, input_precision="ieee")
        total += part
    if IS_PART:
        out += tl.program_id(2).to(tl.int64) * tokens * outputs
    elif bias is not None:
        if EACH:
            bias += expert * outputs
        total += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    to = out + out_at[None, :] * out_row + n[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["tokens", "num_spans"])
def merge(parts, out, bias, tokens, outputs, out_row, num_spans, STEP: tl.constexpr):
    """The sum of the parts of one row, in order."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * STEP + tl.arange(0, STEP)
    mask = n < outputs
    parts += row * outputs + n
    total = tl.zeros([STEP], tl.float32)
    for _ in range(num_spans):
        total += tl.load(parts, mask=mask, other=0.0)
        parts += tl.cast(tokens, tl.int64) * outputs
    if bias is not None:
        total += tl.load(bias + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + n, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gather(
    ids, out, codes, high, halves, scales, inputs, stride, FORMAT: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """K inputs of the row of one token."""
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * K
    n = tl.load(ids + token) + tl.arange(0, 1)
    k = first + tl.arange(0, K)
    planes = codes, high, halves, scales
    weights = _numbers(
        planes, n, n >= 0, tl.cast(first, tl.int64), inputs - first, stride, FORMAT, K
    )
    to = out + token * inputs + k[None, :]
    tl.store(to, weights.to(out.dtype.element_ty), mask=(k < inputs)[None, :])
