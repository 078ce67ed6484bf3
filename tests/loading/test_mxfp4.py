"""MXFP4 against transformers' conversion of gpt-oss, bit for bit, and against gguf's quantiser."""

from __future__ import annotations

import numpy as np
import torch
from gguf.quants import MXFP4
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nanoengine.loading.mxfp4 import GROUP, unpack_mxfp4


def test_every_code_with_every_scale_as_in_transformers() -> None:
    """Of every scale that is a number: 255 means none."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(255, -1, -1).contiguous()
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(-1, 16).contiguous()
    ours = unpack_mxfp4(codes, scales)
    assert ours.shape == (255, 16 * GROUP)
    for dtype in (torch.bfloat16, torch.float32):
        theirs = convert_moe_packed_tensors(codes[None].clone(), scales[None], dtype=dtype)
        assert torch.equal(ours.to(dtype), theirs[0].T)


def test_what_gguf_quantised() -> None:
    """Its blocks hold the first 16 values in the lower halves of the bytes."""
    x = np.random.default_rng(0).standard_normal((5, 3 * GROUP), dtype=np.float32)
    blocks = MXFP4.quantize_blocks(x.reshape(-1, GROUP))
    halves = torch.from_numpy(blocks[:, 1:].copy())
    values = torch.stack((halves & 15, halves >> 4), dim=1).view(-1, 16, 2)
    codes = (values[..., 0] | values[..., 1] << 4).view(5, 3, 16)
    # gguf doubles the values, and halves the scales.
    scales = torch.from_numpy(blocks[:, 0].copy()).view(5, 3)
    wanted = torch.from_numpy(MXFP4.dequantize_blocks(blocks)).view(5, -1)
    assert torch.equal(unpack_mxfp4(codes, scales).float(), wanted)
