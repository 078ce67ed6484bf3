"""What the sums of few rows times codes are multiplied by: the scales of a block, its minimum."""

from __future__ import annotations

import triton
import triton.language as tl

from nanoengine.kernels.triton_code_numbers import _half


@triton.jit
def _scale_words(halves, scales, k, n, is_held, stride, FORMAT: tl.constexpr):
    """The words of the scales of 64 inputs from k, which are not of `_shared`: first those of
    halves.
    """
    TWO: tl.constexpr = FORMAT == "Q4_1" or FORMAT == "Q5_1" or FORMAT == "INT4" or FORMAT == "INT8"
    if TWO or FORMAT == "FP8":
        to = halves + k // 32 * stride + n
        word = tl.load(to, mask=is_held, other=0)
        return word, tl.load(to + stride, mask=is_held, other=0)
    elif FORMAT == "Q6_K" or FORMAT == "Q2_K":
        return (tl.load(scales + k // 64 * stride + n, mask=is_held, other=0),)
    elif FORMAT == "Q4_K" or FORMAT == "Q5_K" or FORMAT == "IQ4_XS" or FORMAT == "Q3_K":
        return (k,)
    else:
        word = tl.load(halves + k // 64 * stride + n, mask=is_held, other=0)
        four = word
        if FORMAT == "NVFP4":
            four = tl.load(scales + k // 64 * stride + n, mask=is_held, other=0)
        return word, four


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
    both = shared[4]
    ones = tl.full(a.shape, 1.0, a.dtype)
    scale, minimum = _six_bits(shared, GROUP * 8)
    part += (_half(both) * scale)[:, None] * _two(a, b, xa, xb)
    part -= (_half(both >> 16) * minimum)[:, None] * _two(ones, ones, xa, xb)
    scale, minimum = _six_bits(shared, GROUP * 8 + 4)
    part += (_half(both) * scale)[:, None] * _two(c, d, xc, xd)
    part -= (_half(both >> 16) * minimum)[:, None] * _two(ones, ones, xc, xd)
    return part


@triton.jit
def _times_levels(part, weights, rows, low, both, GROUP: tl.constexpr):
    """part and 64 inputs of IQ4_XS: scales of 32 inputs, whose upper bits are beside the half."""
    a, b, c, d = weights
    xa, xb, xc, xd = rows
    scale = (low >> GROUP * 8 & 15 | (both >> 16 + GROUP * 4 & 3) << 4) - 32
    part += (_half(both) * scale.to(tl.float32))[:, None] * _two(a, b, xa, xb)
    scale = (low >> GROUP * 8 + 4 & 15 | (both >> 18 + GROUP * 4 & 3) << 4) - 32
    part += (_half(both) * scale.to(tl.float32))[:, None] * _two(c, d, xc, xd)
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
def _times_two_bits(part, weights, rows, both, four):
    """part and 64 inputs of Q2_K: `four` are scales and minima of 16 inputs each."""
    a, b, c, d = weights
    xa, xb, xc, xd = rows
    scale, minimum = _half(both), _half(both >> 16)
    ones = tl.full(a.shape, 1.0, a.dtype)
    part += (scale * (four & 15).to(tl.float32))[:, None] * _one(a, xa)
    part -= (minimum * (four >> 4 & 15).to(tl.float32))[:, None] * _one(ones, xa)
    part += (scale * (four >> 8 & 15).to(tl.float32))[:, None] * _one(b, xb)
    part -= (minimum * (four >> 12 & 15).to(tl.float32))[:, None] * _one(ones, xb)
    part += (scale * (four >> 16 & 15).to(tl.float32))[:, None] * _one(c, xc)
    part -= (minimum * (four >> 20 & 15).to(tl.float32))[:, None] * _one(ones, xc)
    part += (scale * (four >> 24 & 15).to(tl.float32))[:, None] * _one(d, xd)
    part -= (minimum * (four >> 28 & 15).to(tl.float32))[:, None] * _one(ones, xd)
    return part


@triton.jit
def _times_sixteen(part, weights, rows, shared, GROUP: tl.constexpr):
    """part and 64 inputs of Q3_K: scales of 16 inputs each, 6 bits less 32."""
    a, b, c, d = weights
    xa, xb, xc, xd = rows
    scale = _half(shared[6])
    low = (shared[3] if GROUP < 2 else shared[4]) >> GROUP % 2 * 16
    high = shared[5] >> GROUP * 8
    part += (scale * ((low & 15 | (high & 3) << 4) - 32).to(tl.float32))[:, None] * _one(a, xa)
    part += (scale * ((low >> 4 & 15 | (high & 12) << 2) - 32).to(tl.float32))[:, None] * _one(
        b, xb
    )
    part += (scale * ((low >> 8 & 15 | (high & 48)) - 32).to(tl.float32))[:, None] * _one(c, xc)
    part += (scale * ((low >> 12 & 15 | (high & 192) >> 2) - 32).to(tl.float32))[:, None] * _one(
        d, xd
    )
    return part


@triton.jit
def _times_e4m3(part, weights, rows, whole, four):
    """part and 64 inputs of NVFP4: `four` are scales of 16 inputs each in FP8, whose bits are those
    of float16 but for the exponent; whole: multiplies them, or if below 0 divides them.
    """
    a, b, c, d = weights
    xa, xb, xc, xd = rows
    scale = whole.to(tl.float32, bitcast=True)
    divisor = tl.where(scale < 0, -scale, 1.0)
    scale = 256 * tl.div_rn(tl.where(scale < 0, 1.0, scale), divisor)
    even = (four & 0x007F007F) << 7 | (four & 0x00800080) << 8
    odd = (four >> 8 & 0x007F007F) << 7 | four & -0x7FFF8000
    part += (scale * _half(even))[:, None] * _one(a, xa)
    part += (scale * _half(odd))[:, None] * _one(b, xb)
    part += (scale * _half(even >> 16))[:, None] * _one(c, xc)
    part += (scale * _half(odd >> 16))[:, None] * _one(d, xd)
    return part


@triton.jit
def _times_words(part, weights, rows, words, FORMAT: tl.constexpr):
    """part and 64 inputs of other formats: one scale of 32 bits, two of either size, or two of 16
    bits and two minima, which sums of inputs take.
    """
    a, b, c, d = weights
    xa, xb, xc, xd = rows
    word, other = words
    one, two = _two(a, b, xa, xb), _two(c, d, xc, xd)
    if FORMAT == "NF4":
        part += word.to(tl.float32, bitcast=True)[:, None] * (one + two)
    elif FORMAT == "FP8":
        part += word.to(tl.float32, bitcast=True)[:, None] * one
        part += other.to(tl.float32, bitcast=True)[:, None] * two
    elif FORMAT == "MXFP4":
        part += (word << 16).to(tl.float32, bitcast=True)[:, None] * one
        part += (word & -0x10000).to(tl.float32, bitcast=True)[:, None] * two
    elif FORMAT == "Q4_0" or FORMAT == "Q5_0" or FORMAT == "Q8_0" or FORMAT == "IQ4_NL":
        part += _half(word)[:, None] * one
        part += _half(word >> 16)[:, None] * two
    else:
        part += _half(word)[:, None] * one
        part += _half(other)[:, None] * two
        if FORMAT == "Q4_1" or FORMAT == "Q5_1":
            ones = tl.full(a.shape, 1.0, a.dtype)
            part += _half(word >> 16)[:, None] * _two(ones, ones, xa, xb)
            part += _half(other >> 16)[:, None] * _two(ones, ones, xc, xd)
    return part


@triton.jit
def _times_scales(
    part, weights, rows, shared, words, GROUP: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """part and 64 inputs, by their scales. shared: of triton_few_rows.py; words: of
    `_scale_words`.
    """
    if FORMAT == "Q6_K":
        part = _times_eight_bits(part, weights, rows, shared[2], words[0])
    elif FORMAT == "Q4_K" or FORMAT == "Q5_K":
        part = _times_six_bits(part, weights, rows, shared, GROUP)
    elif FORMAT == "IQ4_XS":
        part = _times_levels(part, weights, rows, shared[0], shared[1], GROUP)
    elif FORMAT == "Q2_K":
        part = _times_two_bits(part, weights, rows, shared[3], words[0])
    elif FORMAT == "Q3_K":
        part = _times_sixteen(part, weights, rows, shared, GROUP)
    elif FORMAT == "NVFP4":
        part = _times_e4m3(part, weights, rows, words[0], words[1])
    else:
        part = _times_words(part, weights, rows, words, FORMAT)
    return part
