"""Fields of words become numbers of 16 bits without their scale: operands of triton_few_rows.py.

Each twice: in Triton, and for bfloat16 in PTX that makes two numbers in a register.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from nanoengine.kernels.triton_code_numbers import _e2m1, _e4m3, _level
from nanoengine.models.stored_codes import LEVELS, NF4_LEVELS


@triton.jit
def _fields(word, zeros, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """The numbers of the four fields of words, lowest first, without their scale. zeros: of the
    first two and of the others, [outputs, 16], which INT4 takes off.
    """
    code = word.to(tl.int32)
    return (
        _number(code & 15, zeros[0], dtype, FORMAT),
        _number(code >> 4 & 15, zeros[0], dtype, FORMAT),
        _number(code >> 8 & 15, zeros[1], dtype, FORMAT),
        _number(code >> 12 & 15, zeros[1], dtype, FORMAT),
    )


@triton.jit
def _number(code, zero, dtype: tl.constexpr, FORMAT: tl.constexpr):
    if FORMAT == "MXFP4" or FORMAT == "NVFP4":
        number = _e2m1(code)
    elif FORMAT == "Q4_0" or FORMAT == "Q4_1" or FORMAT == "Q4_K" or FORMAT == "INT4":
        number = code.to(tl.float32) - zero
    else:
        number = _level(code, FORMAT)
    return number.to(dtype)


@triton.jit
def _bytes(word, zero, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """The numbers of the two bytes of words; zero: what INT8 takes off, [outputs, 16]."""
    code = word.to(tl.int32)
    low, above = code << 24 >> 24, code >> 8
    if FORMAT == "FP8":
        a, b = _e4m3(low), _e4m3(above)
    else:
        a, b = low.to(tl.float32) - zero, above.to(tl.float32) - zero
    return a.to(dtype), b.to(dtype)


@triton.jit
def _packed_bytes(word, zero, FORMAT: tl.constexpr):
    """`_bytes` as bfloat16, two in a register."""
    if FORMAT == "FP8":
        pair = _packed_e4m3(word)
    elif FORMAT == "INT8":
        pair = _packed_less(word, zero.to(tl.bfloat16))
    else:
        pair = _packed_signed(word)
    return pair


@triton.jit
def _packed_signed(word):
    """Bytes with a sign as bfloat16: 0x4300 | c is 128 + c, for c below 128."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 s, t, u, v;
        mov.b32 s, 0xBF80BF80;
        lop3.b32 t, $2, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 u, $2, 0x00800080, 0x43004300, 0xEA;
        shr.u32 v, $2, 8;
        fma.rn.bf16x2 $0, u, s, t;
        lop3.b32 t, v, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 u, v, 0x00800080, 0x43004300, 0xEA;
        fma.rn.bf16x2 $1, u, s, t;
        }
        """,
        "=&r,=&r,r", [word], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _packed_less(word, zero):
    """`_packed_signed` less a zero: of at most 256, so exact."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 s, t, u, v;
        mov.b32 s, 0xBF80BF80;
        lop3.b32 t, $2, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 u, $2, 0x00800080, 0x43004300, 0xEA;
        shr.u32 v, $2, 8;
        fma.rn.bf16x2 t, u, s, t;
        fma.rn.bf16x2 $0, $3, s, t;
        lop3.b32 t, v, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 u, v, 0x00800080, 0x43004300, 0xEA;
        fma.rn.bf16x2 t, u, s, t;
        fma.rn.bf16x2 $1, $3, s, t;
        }
        """,
        "=&r,=&r,r,r", [word, zero], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _packed_e4m3(word):
    """Numbers of 8 bits have the bits of bfloat16, but for the exponent."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 s, t, u, z;
        mov.b32 s, 0x7B807B80;
        mov.b32 z, 0x80008000;
        shl.b32 t, $2, 4;
        and.b32 t, t, 0x07F007F0;
        shl.b32 u, $2, 8;
        lop3.b32 t, u, 0x80008000, t, 0xEA;
        fma.rn.bf16x2 $0, t, s, z;
        shr.u32 t, $2, 4;
        and.b32 t, t, 0x07F007F0;
        mov.b32 u, $2;
        lop3.b32 t, u, 0x80008000, t, 0xEA;
        fma.rn.bf16x2 $1, t, s, z;
        }
        """,
        "=&r,=&r,r", [word], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


def _look_up(levels: Sequence[float]) -> tl.constexpr:
    """PTX that looks up the lower and the upper bytes of 16 numbers: prmt, among 8 at a time."""
    numbers = torch.tensor(levels, dtype=torch.bfloat16).view(torch.uint8).view(16, 2)
    low, high = (
        [f"0x{bytes(row)[::-1].hex()}" for row in half.view(4, 4)]
        for half in numbers.T.contiguous()
    )

    def of_four(made: str, mask: str, codes: str, words: list[str]) -> str:
        return f"""
        prmt.b32 a, {words[0]}, {words[1]}, {codes};
        prmt.b32 b, {words[2]}, {words[3]}, {codes};
        lop3.b32 {made}, {mask}, b, a, 0xCA;"""

    return tl.constexpr(f"""
        {{
        .reg .b32 s0, s1, m0, m1, a, b, l0, h0, l1, h1, p, q, r, t;
        and.b32 s0, $4, 0x77777777;
        shr.b32 s1, s0, 16;
        shr.b32 t, $4, 1;
        and.b32 t, t, 0x44444444;
        prmt.b32 m0, 0, -1, t;
        shr.b32 t, t, 16;
        prmt.b32 m1, 0, -1, t;
        {of_four("l0", "m0", "s0", low)}
        {of_four("h0", "m0", "s0", high)}
        {of_four("l1", "m1", "s1", low)}
        {of_four("h1", "m1", "s1", high)}
        prmt.b32 p, l0, h0, 0x5140;
        prmt.b32 q, l0, h0, 0x7362;
        prmt.b32 r, l1, h1, 0x5140;
        prmt.b32 t, l1, h1, 0x7362;
        prmt.b32 $0, p, r, 0x5410;
        prmt.b32 $1, p, r, 0x7632;
        prmt.b32 $2, q, t, 0x5410;
        prmt.b32 $3, q, t, 0x7632;
        }}
        """)


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_NF4_LEVELS, _IQ4_LEVELS = _look_up(NF4_LEVELS), _look_up(_IQ4)
_IQ3_XXS_LEVELS, _IQ3_S_LEVELS = _look_up(LEVELS["IQ3_XXS"]), _look_up(LEVELS["IQ3_S"])
_IQ2_LEVELS, _IQ1_LEVELS = _look_up(LEVELS["IQ2"] * 2), _look_up(LEVELS["IQ1"] * 2)


@triton.jit
def _packed_levels(word, LEVELS: tl.constexpr):
    """Levels as bfloat16; those of NF4 are rounded."""
    return tl.inline_asm_elementwise(
        LEVELS, "=&r,=&r,=&r,=&r,r", [word],
        (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _packed_e2m1(word):
    """Numbers of 4 bits have the bits of bfloat16, but for the exponent."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 s, t, u, z;
        mov.b32 s, 0x7E807E80;
        mov.b32 z, 0x80008000;
        shl.b32 t, $4, 6;
        and.b32 t, t, 0x01C001C0;
        shl.b32 u, $4, 12;
        lop3.b32 t, u, 0x80008000, t, 0xEA;
        fma.rn.bf16x2 $0, t, s, z;
        shl.b32 t, $4, 2;
        and.b32 t, t, 0x01C001C0;
        shl.b32 u, $4, 8;
        lop3.b32 t, u, 0x80008000, t, 0xEA;
        fma.rn.bf16x2 $1, t, s, z;
        shr.u32 t, $4, 2;
        and.b32 t, t, 0x01C001C0;
        shl.b32 u, $4, 4;
        lop3.b32 t, u, 0x80008000, t, 0xEA;
        fma.rn.bf16x2 $2, t, s, z;
        shr.u32 t, $4, 6;
        and.b32 t, t, 0x01C001C0;
        mov.b32 u, $4;
        lop3.b32 t, u, 0x80008000, t, 0xEA;
        fma.rn.bf16x2 $3, t, s, z;
        }
        """,
        "=&r,=&r,=&r,=&r,r", [word], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _packed_integers(word, early, late):
    """Codes less a zero; see `_packed_signed`. early, late: 128 + zero of two fields each."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 s, t, u;
        mov.b32 s, 0xBF80BF80;
        lop3.b32 t, $4, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, $5, s, t;
        shr.u32 u, $4, 4;
        lop3.b32 t, u, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $1, $5, s, t;
        shr.u32 u, $4, 8;
        lop3.b32 t, u, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $2, $6, s, t;
        shr.u32 u, $4, 12;
        lop3.b32 t, u, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $3, $6, s, t;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r", [word, early, late],
        (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _packed_fields(word, zeros, FORMAT: tl.constexpr):
    """`_fields` as bfloat16, two in a register."""
    if FORMAT == "NF4":
        fields = _packed_levels(word, _NF4_LEVELS)
    elif FORMAT == "IQ4_NL" or FORMAT == "IQ4_XS":
        fields = _packed_levels(word, _IQ4_LEVELS)
    elif FORMAT == "IQ3_XXS":
        fields = _packed_levels(word, _IQ3_XXS_LEVELS)
    elif FORMAT == "IQ3_S":
        fields = _packed_levels(word, _IQ3_S_LEVELS)
    elif FORMAT == "IQ2":
        fields = _packed_levels(word, _IQ2_LEVELS)
    elif FORMAT == "IQ1":
        fields = _packed_levels(word, _IQ1_LEVELS)
    elif FORMAT == "MXFP4" or FORMAT == "NVFP4":
        fields = _packed_e2m1(word)
    else:
        early, late = zeros
        fields = _packed_integers(
            word, (early + 128.0).to(tl.bfloat16), (late + 128.0).to(tl.bfloat16)
        )
    return fields


@triton.jit
def _deep_fields(
    word, high, dtype: tl.constexpr, BITS: tl.constexpr, FIRST: tl.constexpr, LESS: tl.constexpr
):  # fmt: skip
    """`_fields` of codes less LESS, whose BITS high bits lie in other words, from bit FIRST on."""
    MASK: tl.constexpr = (1 << BITS) - 1
    code, high = word.to(tl.int32), high.to(tl.int32) >> FIRST
    a = (code & 15 | (high & MASK) << 4) - LESS
    b = (code >> 4 & 15 | (high >> BITS & MASK) << 4) - LESS
    c = (code >> 8 & 15 | (high >> 2 * BITS & MASK) << 4) - LESS
    d = (code >> 12 & 15 | (high >> 3 * BITS & MASK) << 4) - LESS
    return (
        a.to(tl.float32).to(dtype),
        b.to(tl.float32).to(dtype),
        c.to(tl.float32).to(dtype),
        d.to(tl.float32).to(dtype),
    )


@triton.jit
def _packed_deep(word, high, BITS: tl.constexpr, FIRST: tl.constexpr, LESS: tl.constexpr):
    """`_deep_fields` as bfloat16, two in a register; see `_packed_signed`."""
    bits = tl.full(word.shape, BITS, tl.int32)
    first = tl.full(word.shape, FIRST, tl.int32)
    mask = tl.full(word.shape, 0x00300030 if BITS == 2 else 0x00100010, tl.int32)
    offset = tl.full(word.shape, 128 + LESS, tl.bfloat16)
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 s, t, u, h;
        mov.b32 s, 0xBF80BF80;
        shr.u32 h, $5, $8;
        shl.b32 h, h, 4;
        lop3.b32 t, $4, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 t, h, $10, t, 0xEA;
        fma.rn.bf16x2 $0, $12, s, t;
        shr.u32 h, h, $6;
        shr.u32 u, $4, 4;
        lop3.b32 t, u, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 t, h, $10, t, 0xEA;
        fma.rn.bf16x2 $1, $12, s, t;
        shr.u32 h, h, $6;
        shr.u32 u, $4, 8;
        lop3.b32 t, u, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 t, h, $10, t, 0xEA;
        fma.rn.bf16x2 $2, $12, s, t;
        shr.u32 h, h, $6;
        shr.u32 u, $4, 12;
        lop3.b32 t, u, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 t, h, $10, t, 0xEA;
        fma.rn.bf16x2 $3, $12, s, t;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r", [word, high, bits, first, mask, offset],
        (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _joined_bits(word, high, FIRST: tl.constexpr, HIGH: tl.constexpr):
    """Codes of 3 bits in the four fields of words of 16 bits: 2 bits from bit FIRST on, and one of
    `high` from HIGH on.
    """
    code, above = word.to(tl.int32) >> FIRST & 255, high.to(tl.int32) >> HIGH & 15
    code = (code | code << 4) & 0x0F0F
    above = (above | above << 6) & 0x0303
    return (((code | code << 2) & 0x3333) | ((above | above << 3) & 0x1111) << 2).to(tl.int16)


@triton.jit
def _low_fields(
    word, high, dtype: tl.constexpr, FIRST: tl.constexpr, HIGH: tl.constexpr, LESS: tl.constexpr
):  # fmt: skip
    """`_fields` of codes less LESS: 2 bits from bit FIRST on and, if LESS, one of `high` from HIGH
    on.
    """
    code, high = word.to(tl.int32) >> FIRST, high.to(tl.int32) >> HIGH
    a, b, c, d = code & 3, code >> 2 & 3, code >> 4 & 3, code >> 6 & 3
    if LESS:
        a |= (high & 1) << 2
        b |= (high & 2) << 1
        c |= high & 4
        d |= (high & 8) >> 1
    return (
        (a - LESS).to(tl.float32).to(dtype),
        (b - LESS).to(tl.float32).to(dtype),
        (c - LESS).to(tl.float32).to(dtype),
        (d - LESS).to(tl.float32).to(dtype),
    )


@triton.jit
def _packed_low(word, high, FIRST: tl.constexpr, HIGH: tl.constexpr, LESS: tl.constexpr):
    """`_low_fields` as bfloat16, two in a register; see `_packed_signed`."""
    first = tl.full(word.shape, FIRST, tl.int32)
    above = tl.full(word.shape, HIGH, tl.int32)
    mask = tl.full(word.shape, 0x00040004 if LESS else 0, tl.int32)
    offset = tl.full(word.shape, 128 + LESS, tl.bfloat16)
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 s, t, u, h;
        mov.b32 s, 0xBF80BF80;
        shr.u32 u, $4, $6;
        shr.u32 h, $5, $8;
        shl.b32 h, h, 2;
        lop3.b32 t, u, 0x00030003, 0x43004300, 0xEA;
        lop3.b32 t, h, $10, t, 0xEA;
        fma.rn.bf16x2 $0, $12, s, t;
        shr.u32 u, u, 2;
        shr.u32 h, h, 1;
        lop3.b32 t, u, 0x00030003, 0x43004300, 0xEA;
        lop3.b32 t, h, $10, t, 0xEA;
        fma.rn.bf16x2 $1, $12, s, t;
        shr.u32 u, u, 2;
        shr.u32 h, h, 1;
        lop3.b32 t, u, 0x00030003, 0x43004300, 0xEA;
        lop3.b32 t, h, $10, t, 0xEA;
        fma.rn.bf16x2 $2, $12, s, t;
        shr.u32 u, u, 2;
        shr.u32 h, h, 1;
        lop3.b32 t, u, 0x00030003, 0x43004300, 0xEA;
        lop3.b32 t, h, $10, t, 0xEA;
        fma.rn.bf16x2 $3, $12, s, t;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r", [word, high, first, above, mask, offset],
        (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip
