"""Weights as codes, made of random bytes, and checkpoints of them."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from nanoengine.kernels.code_planes import AS_IQ4_XS, AS_Q3_K
from nanoengine.models.stored_codes import (
    CODES_KEY,
    FORMATS,
    INTEGERS,
    LEVELS,
    OF_GGUF,
    CodedRows,
    CodedWeight,
    fp8_rows,
)

# Bytes of a block where its float16 numbers are.
HALVES: dict[str, tuple[int, ...]] = {
    name: (0,) if name in ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL") else (0, 2) for name in FORMATS
}
HALVES |= {"Q6_K": (208,), "INT4": (0,), "INT8": (0,)}
HALVES |= {"Q2_K": (80, 82)} | dict.fromkeys(AS_Q3_K, (108,)) | dict.fromkeys(AS_IQ4_XS, (0,))
HALVES |= dict.fromkeys(("MXFP4", "FP8", "NVFP4", "NF4"), ())


def random_rows(name: str, outputs: int, inputs: int, seed: int = 0) -> CodedRows:
    """All codes and scales that a block can hold, but NaN; float16 numbers of any sign, some
    denormal.
    """
    rng = np.random.default_rng(seed)
    in_block, block_bytes = FORMATS[name]
    blocks = rng.integers(0, 256, (outputs * inputs // in_block, block_bytes), dtype=np.uint8)
    for at in HALVES[name]:
        values = (rng.normal(0, 0.01, len(blocks))).astype(np.float16)
        values[::7] *= np.float16(2.0**-9)
        blocks[:, at : at + 2] = values.view(np.uint8).reshape(-1, 2)
    if name in INTEGERS:
        zeros = rng.integers(0, (1 << INTEGERS[name]) + 1, len(blocks))
        zeros = (zeros - 128 if name == "INT8" else zeros).astype(np.float16)
        blocks[:, 2:4] = zeros.view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":  # powers of two around 1, which keep sums within what is compared
        blocks[:, 0] = rng.integers(119, 129, len(blocks))
    if name == "FP8":
        blocks[blocks & 127 == 127] -= 1
    if name in ("FP8", "NF4"):
        blocks[:, :4] = (
            rng.normal(0, 0.001, len(blocks)).astype("<f4").view(np.uint8).reshape(-1, 4)
        )
    if name == "NVFP4":  # scales of all sizes; wholes that multiply and that divide
        blocks[:, :4][blocks[:, :4] & 127 == 127] -= 1
        wholes = rng.uniform(0.5, 1, len(blocks)).astype("<f4") / 4096
        wholes[::2] = -1 / wholes[::2]
        blocks[:, 4:8] = wholes.view(np.uint8).reshape(-1, 4)
    return CodedRows(name, torch.from_numpy(blocks.reshape(outputs, -1)))


def random_blocks(kind: str, outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Rows of a type of a GGUF file, uint8 [outputs, bytes]: all codes, as in `random_rows`."""
    if OF_GGUF[kind] == kind and kind not in LEVELS:
        return random_rows(kind, outputs, inputs, seed).rows.numpy()
    rng = np.random.default_rng(seed)
    in_block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (outputs * inputs // in_block, block_bytes), dtype=np.uint8)
    halves = rng.normal(0, 0.01, len(blocks)).astype(np.float16)
    halves[::7] *= np.float16(2.0**-9)
    if kind == "IQ1_M":  # 4 bits in each of the last four words
        words = blocks[:, 48:].view(np.uint16)
        pieces = halves.view(np.uint16)[:, None] >> np.arange(0, 16, 4, dtype=np.uint16)
        words[:] = words & 0x0FFF | pieces << 12
    else:
        at = block_bytes - 2 if kind.startswith("TQ") else 0
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(outputs, -1)


def any_quantize(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """As the package gguf does; where it cannot, codes are random, the same for the same row."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        flat = values.reshape(-1, values.shape[-1])
        seeds = [zlib.crc32(row.tobytes()) for row in flat]
        rows = [random_blocks(kind.name, 1, flat.shape[1], seed) for seed in seeds]
        return np.concatenate(rows).reshape(*values.shape[:-1], -1)


def every_e4m3(scale: float) -> tuple[CodedRows, torch.Tensor]:
    """All 256 codes of FP8 as 8 rows, and the numbers that PyTorch makes of them."""
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32).view(torch.float8_e4m3fn)
    return fp8_rows(codes, torch.full((8, 1), scale)), codes.float() * scale


def random_weight(
    name: str, outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0
) -> CodedWeight:
    return CodedWeight((random_rows(name, outputs, inputs, seed),), dtype)


def coded_checkpoint(source: Path, target: Path, formats: Mapping[str, str]) -> tuple[Path, Path]:
    """A checkpoint with random codes for the matrices whose names have these parts (the first of
    them counts) and that have whole blocks, and the same with the numbers that they stand for.
    """
    ours, theirs = target / "codes", target / "numbers"
    for folder in (ours, theirs):
        shutil.copytree(source, folder)
    stored = load_file(source / "model.safetensors")
    plain, held = dict(stored), {}
    for seed, (name, tensor) in enumerate(stored.items()):
        for part, kind in formats.items():
            is_matrix = name.endswith(".weight") and tensor.dim() == 2 and name not in held
            if part in name and is_matrix and tensor.shape[1] % FORMATS[kind][0] == 0:
                coded = of_size(random_rows(kind, len(tensor), tensor.shape[1], seed), 0.1)
                held[name], stored[name] = kind, coded.rows
                plain[name] = coded.numbers(torch.float32)
    assert held
    about = {"format": "pt", CODES_KEY: json.dumps(held)}
    save_file(stored, ours / "model.safetensors", about)
    save_file(plain, theirs / "model.safetensors", {"format": "pt"})
    return ours, theirs


def of_size(coded: CodedRows, size: float) -> CodedRows:
    """With other scales, so that the root mean square of its numbers is about `size`."""
    blocks = coded.rows.view(-1, FORMATS[coded.format][1])
    times = size / coded.numbers(torch.float32).square().mean().sqrt()
    if coded.format == "MXFP4":
        blocks[:, 0] += int(times.log2().round().item()) % 256
    if coded.format in ("FP8", "NF4"):
        blocks[:, :4] = (blocks[:, :4].contiguous().view(torch.float32) * times).view(torch.uint8)
    if coded.format == "NVFP4":
        wholes = blocks[:, 4:8].contiguous().view(torch.float32)
        made = torch.where(wholes < 0, wholes / times, wholes * times)
        blocks[:, 4:8] = made.view(torch.uint8)
    for at in HALVES[coded.format]:
        halves = blocks[:, at : at + 2].contiguous().view(torch.float16)
        blocks[:, at : at + 2] = (halves * times).half().view(torch.uint8)
    return coded
