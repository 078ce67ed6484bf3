"""Types of GGUF files that are held as others: their numbers are those of the package gguf."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from coded import random_blocks, random_weight
from gguf import GGMLQuantizationType as QuantType

from nanoengine.loading.gguf.grids import held_rows
from nanoengine.models.stored_codes import (
    FORMATS,
    LEVELS,
    OF_GGUF,
    CodedRows,
    CodedWeight,
    columns,
)

OTHERS = [kind for kind, held in OF_GGUF.items() if kind != held or kind in LEVELS]


def assert_same_numbers(blocks: np.ndarray, kind: str) -> None:
    held = OF_GGUF[kind]
    rows = held_rows(blocks, kind)
    weights, num_bytes = FORMATS[held]
    in_file = gguf.GGML_QUANT_SIZES[QuantType[kind]]
    assert rows.shape == (len(blocks), blocks.shape[1] // in_file[1] * num_bytes)
    assert rows.dtype == np.uint8 and weights == in_file[0]
    want = torch.from_numpy(gguf.quants.dequantize(blocks, QuantType[kind]))
    torch.testing.assert_close(
        CodedRows(held, torch.from_numpy(rows)).numbers(torch.float32), want, rtol=0, atol=0
    )


@pytest.mark.parametrize("kind", OTHERS)
def test_numbers_are_those_of_the_file(kind: str) -> None:
    """48,000 codes of each, so that few entries of a grid are missed."""
    assert_same_numbers(random_blocks(kind, 12, 16 * 256), kind)


@pytest.mark.parametrize("kind", OTHERS)
def test_the_least_and_the_largest_codes(kind: str) -> None:
    for byte in (0, 0x7B):  # 0x7B7B is a number of 16 bits, 0xFFFF is none
        blocks = np.full_like(random_blocks(kind, 1, 256), byte)
        assert_same_numbers(blocks, kind)


@pytest.mark.parametrize("name", LEVELS)
def test_numbers_of_some_inputs(name: str) -> None:
    """As a rank takes them of a product that is split along its inputs."""
    weight = random_weight(name, 3, 1024, torch.float32)
    part = columns(weight, range(256, 768))
    assert isinstance(part, CodedWeight)
    assert torch.equal(part.numbers(), weight.numbers()[:, 256:768])


def test_what_lies_as_in_the_file_is_not_copied() -> None:
    rows = random_blocks("Q4_K", 3, 512)
    assert held_rows(rows, "Q4_K") is rows


def test_all_that_gguf_can_dequantise_stays_codes() -> None:
    """But for numbers, and NVFP4, whose one scale of a weight is a tensor of its own."""
    found = set()
    for kind, (_, num_bytes) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.quants.dequantize(np.zeros((1, num_bytes), dtype=np.uint8), kind)
        except NotImplementedError:
            continue
        found.add(kind.name)
    assert found - set(OF_GGUF) == {"F32", "F16", "BF16", "NVFP4"}
    assert set(OF_GGUF) <= found
