"""Types of a GGUF file that are held as another format: IQ1, IQ2, IQ3 and TQ.

A code of IQ1 to IQ3 chooses 4 or 8 weights at once, from a grid. Here each weight gets a code of
its own, which says its level (stored_codes.LEVELS), in a block of IQ4_XS or Q3_K: 4.25 or 3.44
bits, where the file has 1.6 to 3.4. TQ has the integers -1 to 1, which are Q2_K's. No number
changes. The grids are the package gguf's, which also says what the fields of a block are
(quants.py), as llama.cpp's ggml-quants.c does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[Any]  # of any unsigned dtype
_WEIGHTS = 256  # of a block


def held_rows(data: Bytes, kind: str) -> Bytes:
    """Rows of a type of the file as the format that OF_GGUF says; [rows, bytes of a row] both."""
    if kind not in CHANGED:
        return data
    num_bytes, change = CHANGED[kind]
    return change(data.reshape(-1, num_bytes)).reshape(len(data), -1)


def _of_iq3_xxs(blocks: Bytes) -> Bytes:
    halves, entries, held = np.split(blocks, (2, 66), axis=1)
    words = np.ascontiguousarray(held).view(np.uint32)
    codes = _chosen("IQ3_XXS", entries) | _signs(_seven_bits(words)) << 3
    return _as_iq4_xs(halves, words >> 28, codes)


def _of_iq3_s(blocks: Bytes) -> Bytes:
    halves, low, high, signs, scales = np.split(blocks, (2, 66, 74, 106), axis=1)
    entries = low | np.unpackbits(high, axis=1, bitorder="little").astype(np.uint16) << 8
    return _as_iq4_xs(halves, _nibbles(scales), _chosen("IQ3_S", entries) | _signs(signs) << 3)


def _of_iq2_xxs(blocks: Bytes) -> Bytes:
    halves, held = np.split(blocks, (2,), axis=1)
    pairs = np.ascontiguousarray(held).view(np.uint32).reshape(len(blocks), 8, 2)
    entries = np.ascontiguousarray(pairs[..., 0]).view(np.uint8)
    codes = _chosen("IQ2_XXS", entries) | _signs(_seven_bits(pairs[..., 1])) << 2
    return _as_q3_k(halves, (pairs[..., 1] >> 28).repeat(2, axis=1), codes)


def _of_iq2_xs(blocks: Bytes) -> Bytes:
    halves, held, scales = np.split(blocks, (2, 66), axis=1)
    words = np.ascontiguousarray(held).view(np.uint16)
    codes = _chosen("IQ2_XS", words & 511) | _signs(_parity_signs()[words >> 9]) << 2
    return _as_q3_k(halves, _nibbles(scales), codes)


def _of_iq2_s(blocks: Bytes) -> Bytes:
    halves, low, signs, high, scales = np.split(blocks, (2, 34, 66, 74), axis=1)
    entries = low | _fields(high, 2, 4).astype(np.uint16) << 8
    return _as_q3_k(halves, _nibbles(scales), _chosen("IQ2_S", entries) | _signs(signs) << 2)


def _of_iq1_s(blocks: Bytes) -> Bytes:
    halves, low, held = np.split(blocks, (2, 34), axis=1)
    words = np.ascontiguousarray(held).view(np.uint16)
    entries = low | _fields(words, 3, 4) << 8
    is_below = (words >> 15).repeat(4, axis=1) * 255
    codes = _chosen("IQ1_S", entries) | _signs(is_below) << 2
    return _as_q3_k(halves, (words >> 12 & 7).repeat(2, axis=1), codes)


def _of_iq1_m(blocks: Bytes) -> Bytes:
    low, high, held = np.split(blocks, (32, 48), axis=1)
    words = np.ascontiguousarray(held).view(np.uint16)
    pieces = words >> 12 << np.arange(0, 16, 4, dtype=np.uint16)  # of the number of 16 bits
    halves = np.bitwise_or.reduce(pieces, axis=1, keepdims=True).view(np.uint8)
    above = _nibbles(high)
    entries = low | (above & 7).astype(np.uint16) << 8
    codes = _chosen("IQ1_S", entries) | _signs((above >> 3) * 255) << 2
    return _as_q3_k(halves, _fields(words, 3, 4), codes)


def _of_tq1_0(blocks: Bytes) -> Bytes:
    held = np.split(blocks, (32, 48, 52), axis=1)
    powers = np.array([1, 3, 9, 27, 81], dtype=np.uint8)[:, None]
    # Of the last four bytes the highest digit is no weight.
    digits = [(part[:, None] * powers).reshape(len(blocks), -1) for part in held[:3]]
    scaled = np.concatenate(digits, axis=1)[:, :_WEIGHTS].astype(np.uint16)
    return _as_q2_k(held[3], _in_pairs((scaled * 3 >> 8).astype(np.uint8)))


def _of_tq2_0(blocks: Bytes) -> Bytes:
    codes, halves = np.split(blocks, (64,), axis=1)
    return _as_q2_k(halves, codes)


CHANGED: Mapping[str, tuple[int, Callable[[Bytes], Bytes]]] = {  # bytes of a block in the file
    "IQ3_XXS": (98, _of_iq3_xxs),
    "IQ3_S": (110, _of_iq3_s),
    "IQ2_XXS": (66, _of_iq2_xxs),
    "IQ2_XS": (74, _of_iq2_xs),
    "IQ2_S": (82, _of_iq2_s),
    "IQ1_S": (50, _of_iq1_s),
    "IQ1_M": (56, _of_iq1_m),
    "TQ1_0": (54, _of_tq1_0),
    "TQ2_0": (66, _of_tq2_0),
}

# ---- what a file has -----------------------------------------------------------------------------


@cache
def _grid(kind: str) -> Bytes:
    """[entries, weights of one]: which of the levels above 0, or of -1, 0 and 1."""
    import gguf  # 0.3 s, needed only the first time a GGUF is used

    stored = getattr(gguf.quants, kind)
    stored.init_grid()
    grid: Bytes = np.searchsorted(stored.grid_map, stored.grid[0, 0]).astype(np.uint8)
    return grid


def _chosen(kind: str, entries: Integers) -> Bytes:
    """The codes of the weights of a grid's entries, [blocks, 256]."""
    grid = _grid(kind)
    words = grid.view(f"u{grid.shape[1]}")[:, 0]  # an entry at a time
    chosen: Bytes = words[entries].view(np.uint8)
    return chosen


@cache
def _parity_signs() -> Bytes:
    """[128]: 7 signs and an eighth one, so that an even number of them is set."""
    import gguf

    return np.frombuffer(gguf.quants.IQ2_XXS.ksigns, dtype=np.uint8)


def _seven_bits(words: Integers) -> Bytes:
    """The signs of 32 weights in each word, [blocks, 32]."""
    return _parity_signs()[_fields(words, 7, 4)]


def _signs(held: Integers) -> Bytes:
    """One bit of each weight, [blocks, 256]; held: bits of 8 weights, the first one lowest."""
    return np.unpackbits(held.astype(np.uint8), axis=1, bitorder="little")


def _fields(held: Integers, bits: int, count: int) -> Integers:
    """The lowest `count` fields of each item [blocks, items], the first one lowest."""
    shifts = np.arange(0, bits * count, bits, dtype=held.dtype)
    fields: Integers = held[:, :, None] >> shifts & ((1 << bits) - 1)
    return fields.reshape(len(held), -1)


def _nibbles(held: Bytes) -> Integers:
    return _fields(held, 4, 2)


# ---- blocks that are held ------------------------------------------------------------------------


def _joined(fields: Integers, bits: int) -> Bytes:
    """Fields [blocks, n, ...] in the bytes [blocks, ...], the first one lowest."""
    held: Bytes = fields[:, 0].copy()
    for index in range(1, fields.shape[1]):
        held |= fields[:, index] << np.uint8(bits * index)
    return held


def _six_bits(scales: Integers) -> Bytes:
    """Scales that are 2 s + 1 times a block's number, for blocks that have scales less 32."""
    return (2 * scales + 33).astype(np.uint8)


def _as_iq4_xs(halves: Bytes, scales: Integers, codes: Integers) -> Bytes:
    """scales: [blocks, 8]; codes: of 4 bits, [blocks, 256]."""
    six, count = _six_bits(scales), len(codes)
    low = _joined((six & 15).reshape(count, 4, 2).swapaxes(1, 2), 4)
    high = _joined((six >> 4).reshape(count, 2, 4).swapaxes(1, 2), 2)
    kept = _joined(codes.reshape(count, 8, 2, 16).swapaxes(1, 2), 4).reshape(count, -1)
    return np.concatenate((halves, high, low, kept), axis=1)


def _as_q3_k(halves: Bytes, scales: Integers, codes: Integers) -> Bytes:
    """scales: [blocks, 16]; codes: of 3 bits, [blocks, 256]."""
    six, count = _six_bits(scales), len(codes)
    low = _joined((six & 15).reshape(count, 2, 8), 4)
    high = _joined((six >> 4).reshape(count, 4, 4), 2)
    third = _joined((codes >> 2).reshape(count, 8, 32), 1)
    return np.concatenate((third, _in_pairs(codes & 3), low, high, halves), axis=1)


def _as_q2_k(halves: Bytes, codes: Integers) -> Bytes:
    """Whose scales and minima are 1; codes: in bytes."""
    ones = np.full((len(codes), 16), 0x11, dtype=np.uint8)
    return np.concatenate((ones, codes, halves, halves), axis=1)


def _in_pairs(codes: Integers) -> Bytes:
    """Codes of 2 bits [blocks, 256] in bytes, as Q2_K and Q3_K have them."""
    count = len(codes)
    return _joined(codes.reshape(count, 2, 4, 32).swapaxes(1, 2), 2).reshape(count, -1)
