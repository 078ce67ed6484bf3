"""Codes in planes become numbers, in the registers of a program: for triton_code_kernels.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _half(word):
    """The lower 16 bits, a float16, as float32."""
    return (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _e2m1(code):
    """Numbers of 4 bits: a sign, 2 bits of exponent, 1 of mantissa."""
    size = code & 7
    bits = tl.where(size < 2, size * 0x3F000000, (size << 22) + 0x3F000000)
    return (bits | (code & 8) << 28).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(code):
    """Numbers of 8 bits with a sign: of 4 bits of exponent, 3 of mantissa."""
    size = code & 127
    bits = tl.where(size == 127, 0x7FC00000, size << 20) | (code & -0x80000000)
    return bits.to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def _nf4(code):
    """The levels of NF4."""
    is_odd = (code & 1) != 0
    a = tl.where(is_odd, -0.6961928009986877, -1.0)
    b = tl.where(is_odd, -0.39491748809814453, -0.5250730514526367)
    c = tl.where(is_odd, -0.18477343022823334, -0.28444138169288635)
    d = tl.where(is_odd, 0.0, -0.09105003625154495)
    e = tl.where(is_odd, 0.16093020141124725, 0.07958029955625534)
    f = tl.where(is_odd, 0.33791524171829224, 0.24611230194568634)
    g = tl.where(is_odd, 0.5626170039176941, 0.44070982933044434)
    h = tl.where(is_odd, 1.0, 0.7229568362236023)
    return _one_of_eight(code, (a, b, c, d, e, f, g, h))


@triton.jit
def _iq4(code):
    """The levels of IQ4_NL and IQ4_XS."""
    is_odd = (code & 1) != 0
    a, b = tl.where(is_odd, -104.0, -127.0), tl.where(is_odd, -65.0, -83.0)
    c, d = tl.where(is_odd, -35.0, -49.0), tl.where(is_odd, -10.0, -22.0)
    e, f = tl.where(is_odd, 13.0, 1.0), tl.where(is_odd, 38.0, 25.0)
    g, h = tl.where(is_odd, 69.0, 53.0), tl.where(is_odd, 113.0, 89.0)
    return _one_of_eight(code, (a, b, c, d, e, f, g, h))


@triton.jit
def _iq3(code, LAST: tl.constexpr):
    """The levels of IQ3_XXS and IQ3_S, of which LAST is the highest."""
    is_odd = (code & 1) != 0
    a, b = tl.where(is_odd, 3.0, 1.0), tl.where(is_odd, 7.0, 5.0)
    c, d = tl.where(is_odd, 11.0, 9.0), tl.where(is_odd, LAST, 13.0)
    return _one_of_eight(code, (a, b, c, d, -a, -b, -c, -d))


@triton.jit
def _iq2(code):
    """The levels of IQ2, by codes of 3 bits."""
    size = 1.0 + 2.125 * (code & 1).to(tl.float32) + 2.1875 * (code & 2).to(tl.float32)
    return tl.where((code & 4) != 0, -size, size)


@triton.jit
def _iq1(code):
    """The levels of IQ1, by codes of 3 bits: -1, 0 or 1, and an eighth above or below."""
    return (code & 3).to(tl.float32) + tl.where((code & 4) != 0, -1.125, -0.875)


@triton.jit
def _level(code, FORMAT: tl.constexpr):
    """What codes of formats with levels stand for."""
    if FORMAT == "IQ3_XXS":
        number = _iq3(code, 15.5)
    elif FORMAT == "IQ3_S":
        number = _iq3(code, 15.0)
    elif FORMAT == "IQ2":
        number = _iq2(code)
    elif FORMAT == "IQ1":
        number = _iq1(code)
    elif FORMAT == "NF4":
        number = _nf4(code)
    else:
        number = _iq4(code)
    return number


@triton.jit
def _one_of_eight(code, levels):
    """By one bit of the code after the other, from the second on."""
    a, b, c, d, e, f, g, h = levels
    is_second = (code & 2) != 0
    a, b = tl.where(is_second, b, a), tl.where(is_second, d, c)
    c, d = tl.where(is_second, f, e), tl.where(is_second, h, g)
    is_second = (code & 4) != 0
    a, b = tl.where(is_second, b, a), tl.where(is_second, d, c)
    return tl.where((code & 8) != 0, b, a)


@triton.jit
def _spread(word, STEP: tl.constexpr):
    """The 8 fields of each word of [outputs, words] that lie STEP bits apart, the first one lowest,
    and what is above them: [outputs, words, 8]. Each thread keeps the fields of its words.
    """
    word = tl.join(word, word >> 4 * STEP)
    word = tl.join(word, word >> 2 * STEP)
    word = tl.join(word, word >> STEP)
    return tl.reshape(word, [word.shape[0], word.shape[1], 8])


@triton.jit
def _words(plane, n, is_output, at, stride, PER: tl.constexpr, C: tl.constexpr, K: tl.constexpr):
    """The words of a plane that the words of C codes belong to, [outputs, K / C or 1]; `at`: the
    expert, its inputs, the first of K and how many are left. A row of the plane is of PER weights.
    """
    expert, inputs, k, left = at
    first = plane + (expert * tl.cdiv(inputs, PER) + k // PER).to(tl.int64) * stride
    found = tl.load(first + n, mask=is_output, other=0)[:, None]
    which = (tl.arange(0, K // C) * C // PER)[None, :]
    for row in tl.static_range(1, K // PER):
        is_left = (left - row * PER + n * 0) > 0  # a block: the interpreter takes no scalar here
        other = tl.load(first + row * stride + n, mask=is_output & is_left, other=0)[:, None]
        found = tl.where(which == row, other, found)
    return found


@triton.jit
def _scale_of_levels(
    halves, scales, n, is_output, at, stride, C: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Of blocks as in IQ4_XS, for each word of C codes, float32: 6 bits less 32, the upper two
    beside a half.
    """
    group = ((at[2] % 256 // 8 + tl.arange(0, K // C)) // 4)[None, :]
    both = _words(halves, n, is_output, at, stride, 256, C, K)
    low = _words(scales, n, is_output, at, stride, 256, C, K)
    scale = (low >> 4 * group & 15 | (both >> 16 + 2 * group & 3) << 4) - 32
    return _half(both) * scale.to(tl.float32)


@triton.jit
def _scales_of_six_bits(
    halves, scales, n, is_output, at, stride, C: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Scales and minima of Q4_K and Q5_K, for each word of C codes."""
    expert, inputs, k, _ = at
    both = _words(halves, n, is_output, at, stride, 256, C, K)
    first = scales + (expert * (inputs // 256) + k // 256).to(tl.int64) * (3 * stride) + n
    shift = (k % 256 // 8 + tl.arange(0, K // C)) // 4 * 4
    low = tl.load(first, mask=is_output, other=0)[:, None] >> shift[None, :]
    middle = tl.load(first + stride, mask=is_output, other=0)[:, None] >> shift[None, :]
    above = tl.load(first + 2 * stride, mask=is_output, other=0)[:, None] >> shift[None, :]
    d = _half(both) * ((low & 15) | (above & 3) << 4).to(tl.float32)
    return d, _half(both >> 16) * ((middle & 15) | (above & 12) << 2).to(tl.float32)


@triton.jit
def _scales_of_nibbles(
    halves, scales, n, is_output, at, stride, C: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Scales and minima of Q2_K, for each word of C codes: 4 bits each."""
    both = _words(halves, n, is_output, at, stride, 256, C, K)
    shift = tl.arange(0, K // C) // 2 % 4 * 8
    four = _words(scales, n, is_output, at, stride, 64, C, K) >> shift[None, :]
    d = _half(both) * (four & 15).to(tl.float32)
    return d, _half(both >> 16) * (four >> 4 & 15).to(tl.float32)


@triton.jit
def _scale_of_sixteen(
    halves, scales, n, is_output, at, stride, C: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Scales of blocks as in Q3_K, for each word of C codes: 6 bits less 32, see
    code_planes._sixteen.
    """
    expert, inputs, k, _ = at
    both = _words(halves, n // 2, is_output, at, stride // 2, 256, C, K)
    first = scales + (expert * (inputs // 256) + k // 256).to(tl.int64) * (3 * stride) + n
    which = ((k % 256 // 8 + tl.arange(0, K // C)) // 2)[None, :]
    low = tl.load(first, mask=is_output, other=0)[:, None]
    low = tl.where(which < 8, low, tl.load(first + stride, mask=is_output, other=0)[:, None])
    above = tl.load(first + 2 * stride, mask=is_output, other=0)[:, None] >> 2 * which
    scale = ((low >> which % 8 * 4 & 15) | (above & 3) << 4) - 32
    return _half(both >> (n % 2 * 16).to(tl.int32)[:, None]) * scale.to(tl.float32)


@triton.jit
def _scale_of_four(halves, scales, n, is_output, at, stride, K: tl.constexpr):
    """Of NVFP4, for each word of 8 codes, of which two share a scale: in FP8, times a float32, or
    divided by one that is held below 0.
    """
    shift = tl.arange(0, K // 16) % 4 * 8
    four = _words(scales, n, is_output, at, stride, 64, 16, K) >> shift[None, :]
    whole = _words(halves, n, is_output, at, stride, 64, 16, K).to(tl.float32, bitcast=True)
    d, divisor = _e4m3(four << 24 >> 24), tl.where(whole < 0, -whole, 1.0)
    d = tl.where(whole < 0, tl.div_rn(d, divisor), d * whole)
    return tl.reshape(tl.join(d, d), [n.shape[0], K // 8])


@triton.jit
def _bits_in_lanes(
    plane, n, is_output, at, stride, BITS: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Of a plane of int16 with BITS of each weight, 1 or 2: [outputs, K / 4, 2, 2]."""
    EVERY: tl.constexpr = 16 // BITS
    expert, inputs, k, left = at
    w = tl.arange(0, K // 4)
    mask = is_output[:, None] & (w // 16 * 64 < left)[None, :]
    lane = k // 16 + w // 16 * 4
    row = expert * (tl.cdiv(inputs, 256) * 16 * BITS) + lane // EVERY * 16 + w % 16
    to = plane + row.to(tl.int64)[None, :] * stride + n[:, None]
    word = tl.load(to, mask=mask, other=0).to(tl.int32) >> (lane % EVERY * BITS)[None, :]
    word = tl.join(word, word >> 2 * BITS)
    return tl.join(word, word >> BITS) & (1 << BITS) - 1


@triton.jit
def _in_lanes(
    codes, high, n, is_output, at, stride,
    EACH: tl.constexpr, HIGH: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """`_code` of a plane of int16: 16 words of EACH weights, 16 apart. HIGH: bits above."""
    expert, inputs, k, left = at
    w = tl.arange(0, K // EACH)
    mask = is_output[:, None] & (w // 16 * 16 * EACH < left)[None, :]
    first = codes + (expert * (inputs // EACH) + k // EACH).to(tl.int64) * stride
    word = tl.load(first + w[None, :] * stride + n[:, None], mask=mask, other=0).to(tl.int32)
    word = tl.join(word, word >> 8)
    code = tl.join(word, word >> 4) & 15 if EACH == 4 else word << 24 >> 24
    if HIGH:
        code |= _bits_in_lanes(high, n, is_output, at, stride, HIGH, K) << 4
    code = tl.reshape(code, [n.shape[0], K // EACH // 16, 16, EACH])
    return tl.reshape(tl.permute(code, (0, 1, 3, 2)), [n.shape[0], K // C, C])


@triton.jit
def _in_two_bits(codes, high, n, is_output, at, stride, K: tl.constexpr):
    """`_code` of Q2_K, and of blocks as in Q3_K, which have high bits."""
    code = _bits_in_lanes(codes, n, is_output, at, stride, 2, K)
    if high is not None:
        code |= _bits_in_lanes(high, n, is_output, at, stride, 1, K) << 2
    code = tl.reshape(code, [n.shape[0], K // 64, 16, 4])
    return tl.reshape(tl.permute(code, (0, 1, 3, 2)), [n.shape[0], K // 8, 8])


@triton.jit
def _in_words(codes, high, n, is_output, at, stride, FORMAT: tl.constexpr, K: tl.constexpr):
    """`_code` of a plane of int32."""
    expert, inputs, k, left = at
    IS_BYTE: tl.constexpr = FORMAT == "Q8_0" or FORMAT == "INT8" or FORMAT == "FP8"
    C: tl.constexpr = 4 if IS_BYTE else 8
    w = tl.arange(0, K // C)
    mask = is_output[:, None] & (w * C < left)[None, :]
    first = codes + (expert * (inputs // C) + k // C).to(tl.int64) * stride
    word = tl.load(first + w[None, :] * stride + n[:, None], mask=mask, other=0)
    if IS_BYTE:
        word = tl.join(word, word >> 16)
        code = tl.reshape(tl.join(word, word >> 8), [word.shape[0], K // C, C]) << 24 >> 24
    else:
        code = _spread(word, 4) & 15
    if FORMAT == "Q5_0" or FORMAT == "Q5_1":
        above = _words(high, n, is_output, at, stride, 32, C, K) >> (w % 4 * 8)[None, :]
        code |= (_spread(above, 1) & 1) << 4
    return code


@triton.jit
def _code(codes, high, n, is_output, at, stride, FORMAT: tl.constexpr, K: tl.constexpr):
    """The codes of `_numbers`, int32 [outputs, words, codes of a word]."""
    if codes.dtype.element_ty == tl.int32:
        code = _in_words(codes, high, n, is_output, at, stride, FORMAT, K)
    elif FORMAT == "Q8_0" or FORMAT == "INT8" or FORMAT == "FP8":
        code = _in_lanes(codes, high, n, is_output, at, stride, 2, 0, 4, K)
    elif FORMAT == "Q2_K" or FORMAT == "Q3_K" or FORMAT == "IQ2" or FORMAT == "IQ1":
        code = _in_two_bits(codes, high, n, is_output, at, stride, K)
    else:
        IS_5: tl.constexpr = FORMAT == "Q5_0" or FORMAT == "Q5_1" or FORMAT == "Q5_K"
        HIGH: tl.constexpr = 2 if FORMAT == "Q6_K" else 1 if IS_5 else 0
        code = _in_lanes(codes, high, n, is_output, at, stride, 4, HIGH, 8, K)
    return code


@triton.jit
def _numbers(planes, n, is_output, at, stride, FORMAT: tl.constexpr, K: tl.constexpr):
    """Weights of outputs n, float32 [outputs, K]; `at` as of `_words`. Those that are not left are
    anything finite. What scales a word of codes is made once for the word.
    """
    codes, high, halves, scales = planes
    code = _code(codes, high, n, is_output, at, stride, FORMAT, K)
    number = code.to(tl.float32)
    C: tl.constexpr = 4 if FORMAT == "Q8_0" or FORMAT == "INT8" or FORMAT == "FP8" else 8
    w = tl.arange(0, K // C)
    if FORMAT == "Q4_K" or FORMAT == "Q5_K":
        d, m = _scales_of_six_bits(halves, scales, n, is_output, at, stride, C, K)
        weights = d[:, :, None] * number - m[:, :, None]
    elif FORMAT == "Q6_K":
        both = _words(halves, n // 2, is_output, at, stride // 2, 256, C, K)
        four = _words(scales, n, is_output, at, stride, 64, C, K) >> (w // 2 % 4 * 8)[None, :]
        d = _half(both >> (n % 2 * 16).to(tl.int32)[:, None])
        weights = (d * (four << 24 >> 24).to(tl.float32))[:, :, None] * (number - 32.0)
    elif FORMAT == "Q2_K":
        d, m = _scales_of_nibbles(halves, scales, n, is_output, at, stride, C, K)
        weights = d[:, :, None] * number - m[:, :, None]
    elif FORMAT == "Q3_K":
        d = _scale_of_sixteen(halves, scales, n, is_output, at, stride, C, K)
        weights = d[:, :, None] * (number - 4.0)
    elif FORMAT == "IQ2" or FORMAT == "IQ1":
        d = _scale_of_sixteen(halves, scales, n, is_output, at, stride, C, K)
        weights = d[:, :, None] * _level(code, FORMAT)
    elif FORMAT == "Q4_1" or FORMAT == "Q5_1" or FORMAT == "INT4" or FORMAT == "INT8":
        both = _words(halves, n, is_output, at, stride, 32, C, K)
        d, other = _half(both)[:, :, None], _half(both >> 16)[:, :, None]
        if FORMAT == "INT4" or FORMAT == "INT8":
            weights = d * (number - other)
        else:
            weights = d * number + other
    elif FORMAT == "FP8":
        d = _words(halves, n, is_output, at, stride, 32, C, K).to(tl.float32, bitcast=True)
        weights = d[:, :, None] * _e4m3(code)
    elif FORMAT == "NVFP4":
        d = _scale_of_four(halves, scales, n, is_output, at, stride, K)
        weights = d[:, :, None] * _e2m1(code)
    elif FORMAT == "NF4":
        d = _words(halves, n, is_output, at, stride, 64, C, K).to(tl.float32, bitcast=True)
        weights = d[:, :, None] * _level(code, FORMAT)
    elif FORMAT == "IQ4_XS" or FORMAT == "IQ3_XXS" or FORMAT == "IQ3_S":
        d = _scale_of_levels(halves, scales, n, is_output, at, stride, C, K)
        weights = d[:, :, None] * _level(code, FORMAT)
    else:
        half = _words(halves, n, is_output, at, stride, 64, C, K) >> (w * C // 32 % 2 * 16)[None, :]
        if FORMAT == "MXFP4":
            weights = (half << 16).to(tl.float32, bitcast=True)[:, :, None] * _e2m1(code)
        elif FORMAT == "Q4_0":
            weights = _half(half)[:, :, None] * (number - 8.0)
        elif FORMAT == "Q5_0":
            weights = _half(half)[:, :, None] * (number - 16.0)
        elif FORMAT == "IQ4_NL":
            weights = _half(half)[:, :, None] * _level(code, FORMAT)
        else:
            weights = _half(half)[:, :, None] * number
    return tl.reshape(weights, [n.shape[0], K])
