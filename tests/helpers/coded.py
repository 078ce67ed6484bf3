"""Weights as codes, made of random bytes."""

from __future__ import annotations

import numpy as np
import torch

from nanoengine.models.stored_codes import FORMATS, CodedRows, CodedWeight

# Bytes of a block where its float16 numbers are.
HALVES = {name: (0,) if name in ("Q4_0", "Q5_0", "Q8_0") else (0, 2) for name in FORMATS}
HALVES |= {"Q6_K": (208,), "MXFP4": ()}


def random_rows(name: str, outputs: int, inputs: int, seed: int = 0) -> CodedRows:
    """All codes and scales that a block can hold; float16 numbers of any sign, some denormal."""
    rng = np.random.default_rng(seed)
    in_block, block_bytes = FORMATS[name]
    blocks = rng.integers(0, 256, (outputs * inputs // in_block, block_bytes), dtype=np.uint8)
    for at in HALVES[name]:
        values = (rng.normal(0, 0.01, len(blocks))).astype(np.float16)
        values[::7] *= np.float16(2.0**-9)
        blocks[:, at : at + 2] = values.view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":  # powers of two around 1, which keep sums within what is compared
        blocks[:, 0] = rng.integers(119, 129, len(blocks))
    return CodedRows(name, torch.from_numpy(blocks.reshape(outputs, -1)))


def random_weight(name: str, outputs: int, inputs: int, dtype: torch.dtype) -> CodedWeight:
    return CodedWeight((random_rows(name, outputs, inputs),), dtype)
