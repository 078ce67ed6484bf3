"""Q3_K as Q6_K: blocks of the same weights, for which there are kernels.

Both have 256 weights, a scale for each 16 of them and a float16 for all, so no number changes; they
take 6.6 bits each instead of 3.4. What the bytes of a block are: llama.cpp's ggml-quants.c.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
BLOCK_BYTES = 110


def as_six_bits(rows: npt.NDArray[Any]) -> Bytes:
    """uint8 [rows, blocks * 110] -> [rows, blocks * 210]."""
    blocks = rows.reshape(-1, BLOCK_BYTES)
    high, low, scales, whole = np.split(blocks, (32, 96, 108), axis=1)
    made = np.concatenate((*_codes(high, low), _scales(scales), whole), axis=1)
    return made.reshape(len(rows), -1)


def _codes(high: Bytes, low: Bytes) -> tuple[Bytes, Bytes]:
    """The lower 4 bits of codes, and the upper 2. A weight of Q3_K is its code less 4, of Q6_K less
    32.
    """
    shifts = np.arange(4, dtype=np.uint8)[:, None]
    twos = low.reshape(-1, 2, 1, 32) >> 2 * shifts & 3
    fours = high[:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = (twos | fours.reshape(twos.shape) << 2) + 28  # [blocks, halves, 4, 32]
    lower = codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4
    upper = np.bitwise_or.reduce(codes >> 4 << 2 * shifts, axis=2)
    return _bytes(lower, len(low)), _bytes(upper, len(low))


def _scales(held: Bytes) -> Bytes:
    """16 of 6 bits, less 32, as bytes with a sign."""
    low, high = held[:, :8], held[:, 8:]
    shifts = 2 * np.arange(4, dtype=np.uint8)[:, None]
    upper = (high[:, None] >> shifts & 3).reshape(len(held), -1)
    return _bytes(np.concatenate((low & 15, low >> 4), axis=1) + (upper << 4) - 32, len(held))


def _bytes(values: npt.NDArray[Any], num_blocks: int) -> Bytes:
    return values.reshape(num_blocks, -1).astype(np.uint8)
