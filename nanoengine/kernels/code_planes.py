"""Codes of a weight in the layout that a GPU reads: planes of words, outputs side by side.

A file stores an output as blocks, one after the other. Here the same field of all outputs lies side
by side, so that neighbouring threads read neighbouring words: [k / (weights of a word), outputs].
Nothing is rounded, and no byte more is held than in CodedRows.held_bytes, but for the outputs that
fill the last PAD. What the fields of a block are: gguf-py's quants.py and llama.cpp's
ggml-quants.c.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nanoengine.models.stored_codes import FORMATS, CodedRows

PAD = 16  # outputs: every row of a plane begins at a multiple of 16 bytes
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class _Fields:
    """The bytes of a block where each field begins and ends. halves: numbers of 16 bits (MXFP4: a
    power of two, of 8; IN_32_BITS: one of 32); codes: the lowest 4 bits of each weight, 2 of
    IN_TWO_BITS, or all 8, and `run` the weights whose halves of a byte lie side by side; high: the
    others.
    """

    halves: slice
    codes: slice
    run: int = 16
    high: slice | None = None
    scales: slice | None = None


_FIELDS = {
    "Q4_0": _Fields(slice(0, 2), slice(2, 18)),
    "Q4_1": _Fields(slice(0, 4), slice(4, 20)),
    "Q5_0": _Fields(slice(0, 2), slice(6, 22), high=slice(2, 6)),
    "Q5_1": _Fields(slice(0, 4), slice(8, 24), high=slice(4, 8)),
    "Q8_0": _Fields(slice(0, 2), slice(2, 34)),
    "Q4_K": _Fields(slice(0, 4), slice(16, 144), 32, scales=slice(4, 16)),
    "Q5_K": _Fields(slice(0, 4), slice(48, 176), 32, slice(16, 48), slice(4, 16)),
    "Q6_K": _Fields(slice(208, 210), slice(0, 128), 64, slice(128, 192), slice(192, 208)),
    "MXFP4": _Fields(slice(0, 1), slice(1, 17)),
    "INT4": _Fields(slice(0, 4), slice(4, 20)),
    "INT8": _Fields(slice(0, 4), slice(4, 36)),
    "FP8": _Fields(slice(0, 4), slice(4, 36)),
    "NVFP4": _Fields(slice(4, 8), slice(8, 40), scales=slice(0, 4)),
    "NF4": _Fields(slice(0, 4), slice(4, 36)),
    "IQ4_NL": _Fields(slice(0, 2), slice(2, 18)),
    "IQ4_XS": _Fields(slice(0, 4), slice(8, 136), scales=slice(4, 8)),
    "Q2_K": _Fields(slice(80, 84), slice(16, 80), scales=slice(0, 16)),
    "Q3_K": _Fields(slice(108, 110), slice(32, 96), high=slice(0, 32), scales=slice(96, 108)),
}
# Formats with blocks of the first one.
AS_Q3_K, AS_IQ4_XS = ("Q3_K", "IQ2", "IQ1"), ("IQ4_XS", "IQ3_XXS", "IQ3_S")
_FIELDS |= dict.fromkeys(AS_Q3_K, _FIELDS["Q3_K"])
_FIELDS |= dict.fromkeys(AS_IQ4_XS, _FIELDS["IQ4_XS"])
IN_BYTES = ("Q8_0", "INT8", "FP8")  # whose codes are bytes with a sign
IN_SIX_BITS = ("Q4_K", "Q5_K")  # whose scales are
IN_32_BITS = ("FP8", "NVFP4", "NF4")  # whose one number of a block is
IN_TWO_BITS = ("Q2_K", *AS_Q3_K)  # whose lowest bits of a code are two
OF_256 = ("Q4_K", "Q5_K", "Q6_K", *AS_IQ4_XS, *IN_TWO_BITS)  # weights of a block
_LANES = 16  # weights side by side for few rows: the inputs of one instruction


@dataclass(frozen=True, slots=True)
class CodePlanes:
    """Rows of a weight, each plane int32 [rows of the plane, outputs padded], experts one after
    another. A word holds fields of neighbouring weights, the first one lowest.

    codes: words of 8 weights, 4 bits each, or of 4 bytes. If inputs are a multiple of 64, int16:
    16 words hold 64 weights of 4 bits, 128 of 2 or 32 bytes, each word every 16th of them, and the
    block of a NaN is NaN. high: words of the fifth bits of 32 weights; beside codes in int16, int16
    too: 16 words of the fifth of 256 (AS_Q3_K: the third), the last ones filled up, or of Q6_K the
    fifth and sixth of 128. halves: words of the two numbers of 16 bits of a block (IN_32_BITS: the
    one of 32), or where it has one, of two blocks (of AS_Q3_K and Q6_K, of two outputs). scales: 3
    words for a block of Q4_K or Q5_K, see `_six_bits`, or of AS_Q3_K, see `_sixteen`, words of the
    scales of 64 weights of Q2_K, Q6_K or NVFP4, 8 bits each (of Q2_K 4, then 4 of the minimum), or
    one of the lower 4 bits of those of a block as in IQ4_XS, whose upper 2 are the second half.
    """

    format: str
    outputs: int
    inputs: int
    codes: Tensor
    high: Tensor | None
    halves: Tensor
    scales: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The planes."""
        return self.codes, self.high, self.halves, self.scales

    @property
    def stride(self) -> int:
        """Words of a row of a plane."""
        return self.codes.shape[1]


def planes_of(experts: list[CodedRows]) -> CodePlanes:
    """The planes of weights of one format and shape, on the device of their rows."""
    first = experts[0]
    outputs, inputs = first.shape
    held, made = -(-outputs // PAD) * PAD, dict[str, Tensor]()
    for index, expert in enumerate(experts):
        for start in range(0, held, _ROWS_AT_ONCE):
            rows = expert.rows[start : start + _ROWS_AT_ONCE]
            width = min(held - start, _ROWS_AT_ONCE)
            pieces = _pieces(first.format, functional.pad(rows, (0, 0, 0, width - len(rows))))
            for plane, piece in pieces.items():
                if plane not in made:
                    made[plane] = piece.new_empty(len(experts), piece.shape[1], held)
                made[plane][index, :, start : start + width] = piece.T
    planes = {name: plane.flatten(0, 1) for name, plane in made.items()}
    planes["halves"] = planes["halves"].view(torch.int32)
    return CodePlanes(
        *(first.format, outputs, inputs, planes["codes"], planes.get("high")),
        *(planes["halves"], planes.get("scales")),
    )


def _pieces(name: str, rows: Tensor) -> dict[str, Tensor]:
    """Each plane of some rows, [outputs, rows of the plane], by its name in CodePlanes."""
    fields, blocks = _FIELDS[name], rows.view(len(rows), -1, FORMATS[name][1])
    codes = blocks[..., fields.codes]
    if name in IN_BYTES:
        bits, values = 8, codes.flatten(1)
    elif name in IN_TWO_BITS:
        bits, values = 2, _twos(codes)
    else:
        bits, values = 4, _low(codes, fields.run)
    is_in_lanes = values.shape[1] % 64 == 0
    if is_in_lanes:
        words = _in_lanes(values, bits)
    else:
        words = _as_words(codes) if bits == 8 else _packed(values, bits)
    pieces = {"codes": words, "halves": _halves(name, blocks[..., fields.halves])}
    if is_in_lanes and name in ("FP8", "NVFP4"):
        is_nan = (blocks[..., fields.scales or fields.codes] & 127 == 127).any(2)
        pieces["halves"].masked_fill_(is_nan, 0x7FC00000)
    if fields.high is not None:
        high = _high(name, blocks[..., fields.high])
        if is_in_lanes:
            whole = functional.pad(high, (0, -high.shape[1] % 256))
            pieces["high"] = _in_lanes(whole, 2 if name == "Q6_K" else 1)
        else:
            pieces["high"] = _packed(high, 1)
    if fields.scales is not None:
        scales = blocks[..., fields.scales]
        makes = _six_bits if name in IN_SIX_BITS else _sixteen if name in AS_Q3_K else _as_words
        pieces["scales"] = makes(scales)
    return pieces


def _in_lanes(values: Tensor, bits: int) -> Tensor:
    """Values of so many bits [outputs, inputs] -> int16 words, each of every 16th value."""
    groups = values.view(len(values), -1, 2, 8 // bits, _LANES)
    held = groups[:, :, :, 0].clone()
    for index in range(1, 8 // bits):
        held |= groups[:, :, :, index] << bits * index
    return held.transpose(2, 3).contiguous().flatten(1).view(torch.int16)


def _low(codes: Tensor, run: int) -> Tensor:
    """The lowest 4 bits of each weight, [outputs, inputs]."""
    runs = codes.reshape(*codes.shape[:2], -1, run)
    return torch.cat((runs & 15, runs >> 4), dim=3).flatten(1)


def _high(name: str, held: Tensor) -> Tensor:
    """The bits above these."""
    if name == "Q6_K":
        return _twos(held)
    shifts = torch.arange(8, dtype=torch.uint8, device=held.device)
    if name in (*AS_Q3_K, "Q5_K"):
        return torch.flatten(held.unsqueeze(2) >> shifts[:, None] & 1, 1)
    return torch.flatten(held.unsqueeze(3) >> shifts & 1, 1)


def _twos(held: Tensor) -> Tensor:
    """Two bits of each weight of a block of 256, [outputs, inputs]."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=held.device)[:, None]
    return torch.flatten(held.reshape(*held.shape[:2], -1, 1, 32) >> shifts & 3, 1)


def _sixteen(held: Tensor) -> Tensor:
    """16 scales of 6 bits as three words: the lower 4 bits of 8, those of the others, and the upper
    2 bits of all.
    """
    low, high = torch.split(held, [8, 4], dim=2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=held.device)[:, None]
    lower = _packed(torch.cat((low & 15, low >> 4), dim=2).flatten(1), 4)
    upper = _packed(torch.flatten(high.unsqueeze(2) >> shifts & 3, 1), 2)
    return torch.cat((lower.view(len(lower), -1, 2), upper[..., None]), dim=2).flatten(1)


def _six_bits(held: Tensor) -> Tensor:
    """The scales and minima of 6 bits of 8 groups as three words of 4 bits a group: their lowest 4
    bits, and the 2 highest of the scale and of the minimum.
    """
    low, middle, high = torch.split(held, 4, dim=2)
    scales = torch.cat((low & 63, (high & 15) | low >> 6 << 4), dim=2)
    minima = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), dim=2)
    words = torch.stack((scales & 15, minima & 15, scales >> 4 | minima >> 4 << 2), dim=2)
    return _packed(words.flatten(1), 4)


def _as_words(held: Tensor) -> Tensor:
    """Bytes as int32 words, the first byte lowest."""
    return held.contiguous().flatten(1).view(torch.int32)


def _packed(values: Tensor, bits: int) -> Tensor:
    """Values of so many bits [outputs, inputs] -> int32 words, the first value lowest."""
    each = values.view(len(values), -1, 8 // bits)
    held = each[..., 0].clone()
    for index in range(1, 8 // bits):
        held |= each[..., index] << bits * index
    return held.view(torch.int32)


def _halves(name: str, held: Tensor) -> Tensor:
    if name == "MXFP4":
        halves = held.flatten(1).to(torch.int16) << 7
        halves.masked_fill_(halves == 0, 0x40).masked_fill_(halves == 255 << 7, 0x7FC0)
    else:
        halves = held.contiguous().flatten(1).view(torch.int16)
    if name in (*AS_Q3_K, "Q6_K"):  # becomes words across outputs
        return halves
    return functional.pad(halves, (0, halves.shape[1] % 2)).view(torch.int32)
