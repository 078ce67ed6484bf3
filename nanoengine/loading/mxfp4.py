"""Reads MXFP4, the 4-bit floats with a scale for each 32 of gpt-oss's experts: as numbers, or as
codes in the blocks of a GGUF file.

The format is the OCP's Microscaling Formats (MX) 1.0: a value is E2M1, a scale a power of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32  # values that share a scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS, _NO_NUMBER = 127, 255


def unpack_mxfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 [rows, groups * 32], which holds every such number exactly.

    codes   uint8 [rows, groups, 16]: two values a byte, the lower half first
    scales  uint8 [rows, groups]: exponents of 2, plus 127
    """
    values = torch.tensor([*_MAGNITUDES, *(-x for x in _MAGNITUDES)])
    of_byte = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1)
    powers = torch.tensor([2.0 ** (code - _SCALE_BIAS) for code in range(_NO_NUMBER)] + [torch.nan])
    pairs = torch.embedding(of_byte.bfloat16(), codes.int())
    return pairs.mul_(powers.bfloat16()[scales.int()][..., None, None]).flatten(1)


def mxfp4_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """uint8 [rows, groups * 17], llama.cpp's blocks: a scale, then bytes whose lower
    halves are the first 16 values. Shapes as of `unpack_mxfp4`.
    """
    values = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(2)
    first, last = values.chunk(2, dim=2)
    return torch.cat((scales[..., None], first | last << 4), dim=2).flatten(1)
