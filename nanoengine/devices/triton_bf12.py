"""Host KV in 12 bits, read by a GPU: the inverse of Bf12Codec.encode, as a Triton kernel.

Pinned memory has an address on the GPU, so the kernel reads it over the link itself: of a token
only what its numbers need, which no copy could know.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, int16

# Tokens that are on their way at one time: some hundred KiB hide the link's latency, and the cores
# that wait for it are few.
PROGRAMS = 256


@triton.jit
def _unpack_bf12(
    rows, bits, num_tokens,
    SIZE: tl.constexpr, PAD: tl.constexpr, ROW: tl.constexpr, READ: tl.constexpr,
    HEADER: tl.constexpr, ZERO: tl.constexpr, OTHER: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Program i of n decodes tokens i, i + n, ... READ: bytes of a token that is not whole."""
    at = tl.arange(0, PAD)
    pair = tl.arange(0, PAD // 2)
    is_pair = pair < SIZE // 2
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        row = rows + tl.cast(token, tl.int64) * ROW
        signs = tl.load(row + at, mask=at < SIZE, other=0).to(tl.int32)
        packed = tl.load(row + SIZE + pair, mask=is_pair, other=0).to(tl.int32)
        header = row + READ - HEADER
        largest = tl.load(header).to(tl.int32)
        count = tl.load(header + 1).to(tl.int32)
        codes = tl.interleave(packed & 15, packed >> 4)
        exponents = tl.where(codes == ZERO, 0, largest - codes)
        if count == WHOLE:
            odd = tl.load(row + READ + pair, mask=is_pair, other=0).to(tl.int32)
            exponents = tl.interleave(packed, odd)
        elif count > 0:
            is_other = codes == OTHER
            place = tl.cumsum(is_other.to(tl.int32), 0) + 1
            others = tl.load(header + place, mask=is_other, other=0).to(tl.int32)
            exponents = tl.where(is_other, others, exponents)
        number = (signs & 0x80) << 8 | exponents << 7 | signs & 0x7F
        target = bits + tl.cast(token, tl.int64) * SIZE + at
        tl.store(target, number.to(tl.int16), mask=at < SIZE)


def unpack_bf12(dst: Tensor, src: Tensor, **marks: int) -> None:
    """Decode `src` [..., bytes of a token], uint8 in pinned memory, to `dst` [..., kv_heads,
    head_dim], bfloat16 on the GPU; both are contiguous. marks: HEADER, ZERO, OTHER and WHOLE of
    kv_codec.py.
    """
    row = src.shape[-1]
    size = (row - marks["HEADER"]) // 2
    num_tokens = src.numel() // row
    _unpack_bf12[(min(num_tokens, PROGRAMS),)](
        src,
        dst.view(int16),
        num_tokens,
        SIZE=size,
        PAD=triton.next_power_of_2(size),
        ROW=row,
        READ=row - size // 2,
        **marks,
        enable_fp_fusion=True,  # without a word about it Triton warns
    )
