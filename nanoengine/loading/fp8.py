"""Reads checkpoints whose weights are FP8 (E4M3, arXiv 2209.05433) with scales beside them.

A weight becomes blocks of codes (stored_codes.py), or is dequantised as it is read. Activations
stay as they are: other engines round these to 8 bits, too. A scale is of the whole weight or of a
row (compressed-tensors, ModelOpt, FBGEMM), or of a block of rows and columns (DeepSeek-V3, arXiv
2412.19437).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoengine.errors import UnsupportedModelError, WeightMismatchError
from nanoengine.loading.checkpoint import DTYPES, UNUSED, CheckpointReader, Part
from nanoengine.loading.left_out import groups_of
from nanoengine.loading.modelopt import FP8, algorithms
from nanoengine.models.stored_codes import FORMATS, FP8_SCALES, CodedWeight, Weight, fp8_rows

SCALES = ("_scale_inv", "_scale")  # after the weight's name; both multiply
METHODS = ("fp8", "fbgemm_fp8")
BLOCK = (128, 128)
GROUP = FORMATS["FP8"][0]  # inputs of a block of codes


def fp8_block(config: object) -> tuple[int, int] | None:
    """Rows and columns of a block, if this `quantization_config` is of FP8 weights; else None."""
    if not isinstance(config, dict):
        return None
    method, block = config.get("quant_method"), config.get("weight_block_size")
    if method == "compressed-tensors":
        block = _block_of_groups(config)
    elif method not in METHODS and not _is_of_modelopt(config):
        return None
    if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return block[0], block[1]
    return BLOCK if block is None else None


def _is_of_modelopt(config: Mapping[str, Any]) -> bool:
    found = algorithms(config)
    return bool(found) and found.issubset(FP8)


def _block_of_groups(config: Mapping[str, Any]) -> object:
    """The `block_structure` of compressed-tensors' groups, None if no group has one; "" if not all
    groups are FP8, or if they differ in it. Older files have "128x128" for [128, 128].
    """
    groups, blocks = groups_of(config), list[object]()
    for group in groups:
        each = group.get("weights")
        if not isinstance(each, dict) or (each.get("type"), each.get("num_bits")) != ("float", 8):
            return ""
        block = each.get("block_structure")
        if isinstance(block, str):
            block = [int(size) for size in re.findall(r"\d{1,9}", block)]
        if block is not None and block not in blocks:
            blocks.append(block)
    if not groups or len(blocks) > 1:
        return ""
    return blocks[0] if blocks else None


class Fp8Reader(CheckpointReader):
    """Gives the weights of a checkpoint in FP8 as float32, or as codes, and the others as they are
    stored.
    """

    dtypes = DTYPES | {"F8_E4M3": torch.float8_e4m3fn}
    packing = "FP8"
    codes = frozenset(("FP8",))

    def __init__(self, folder: Path, is_wrapped: bool, block: tuple[int, int]) -> None:
        """block: rows and columns that share a scale, where not all do."""
        super().__init__(folder, is_wrapped)
        self._block = block

    def names(self) -> set[str]:
        """Names of all tensors of the model but scales, which have the name of a weight in theirs:
        a model may have weights whose own names end like those of scales.
        """
        stored = {name: part.stored for name, part in self._parts.items()}
        scales = {each + suffix for each in stored.values() for suffix in SCALES}
        left_out = {name for name, each in stored.items() if each in scales}
        return {name for name in stored.keys() - left_out if not name.endswith(UNUSED)}

    def form(self, name: str) -> str:
        """As CheckpointReader.form; of scales that are too large for codes headers say nothing."""
        if self.dtype(name) is not torch.float8_e4m3fn:
            return super().form(name)
        _, (_, columns) = self._blocks(name)
        return "F32" if columns % GROUP or self.shape(name)[1] % GROUP else "FP8"

    def tensor(self, name: str) -> Tensor:
        """As CheckpointReader.tensor. Raises WeightMismatchError for an FP8 weight without a scale
        or with one of another shape.
        """
        weight = super().tensor(name)
        if weight.dtype is not torch.float8_e4m3fn:
            return weight
        scales, columns = self._scales(name)
        return weight.float() * _repeated(scales, 1, columns, weight.shape[1])

    def weight(self, name: str, dtype: torch.dtype) -> Weight:
        """As `tensor`, but an FP8 weight is a CodedWeight where a scale is of whole blocks."""
        if self.dtype(name) is not torch.float8_e4m3fn:
            return super().weight(name, dtype)
        weight = super().tensor(name)
        scales, columns = self._scales(name)
        outputs, inputs = weight.shape
        if columns % GROUP or inputs % GROUP or not scales.abs().max() < FP8_SCALES:
            return self.tensor(name)
        scales = _repeated(scales, 1, columns // GROUP, inputs // GROUP)
        return CodedWeight((fp8_rows(weight, scales.expand(outputs, inputs // GROUP)),), dtype)

    def _scales(self, name: str) -> tuple[Tensor, int]:
        """Scales of an FP8 weight, float32 [its rows or 1, blocks], and the columns that share one.
        Raises as _blocks.
        """
        part = self._parts[name]
        stored, (rows, columns) = self._blocks(name)
        scales = self._whole(stored)
        scales = (scales if part.index is None else scales[part.index]).float()
        scales = scales.reshape(_rows_and_columns(tuple(scales.shape)))
        scales = _repeated(scales, 0, rows, self._entry(part, part.stored)[0])
        return scales if len(scales) == 1 else scales[slice(*part.rows)], columns

    def _entry(self, part: Part, stored: str) -> tuple[int, ...]:
        """The shape of a tensor, or of each of its entries if `part` is in one."""
        shape = tuple(self._slice(stored).get_shape())
        return shape if part.index is None else shape[1:]

    def _blocks(self, name: str) -> tuple[str, tuple[int, int]]:
        """Of an FP8 weight: the name of its scales, and the rows and columns that share one. Raises
        WeightMismatchError and UnsupportedModelError.
        """
        part = self._parts[name]
        shape = self._entry(part, part.stored)
        if part.is_turned:
            raise UnsupportedModelError(
                f"{self.folder}: {part.stored!r} holds all experts of a layer in FP8 with the "
                "inputs first, which is not supported; take a checkpoint with a tensor for each "
                "expert"
            )
        if len(shape) != 2:
            raise UnsupportedModelError(
                f"{self.folder}: {part.stored!r} is FP8 and no matrix, which is not supported"
            )
        names = [part.stored + suffix for suffix in SCALES if part.stored + suffix in self._file_of]
        if not names:
            raise WeightMismatchError(f"{self.folder}: {part.stored!r} is FP8 and has no scale")
        stored, whole = (tuple(self._slice(each).get_shape()) for each in (names[0], part.stored))
        scales = _rows_and_columns(self._entry(part, names[0]))
        rows, columns = (
            _repeats(size, num, most)
            for size, num, most in zip(shape, scales, self._block, strict=True)
        )
        if rows is None or columns is None or stored[: len(whole) - 2] != whole[:-2]:
            raise WeightMismatchError(
                f"{self.folder}: {names[0]!r} is {list(stored)}, no scales for blocks of "
                f"{list(self._block)} of {list(whole)}"
            )
        return names[0], (rows, columns)


def _rows_and_columns(scales: tuple[int, ...]) -> tuple[int, int]:
    """The shape of scales, of which ModelOpt's have a 1 behind each of the two."""
    if len(scales) == 4 and scales[1] == scales[3] == 1:
        return scales[0], scales[2]
    return (scales[0], scales[1]) if len(scales) == 2 else (math.prod(scales), 1)


def _repeats(size: int, num_scales: int, block: int) -> int | None:
    """How many of `size` rows or columns share a scale; None if so many scales cannot be."""
    if num_scales in (1, size):
        return size // num_scales
    return block if -(-size // block) == num_scales else None


def _repeated(scales: Tensor, dim: int, repeat: int, size: int) -> Tensor:
    """Each of them `repeat` times, `size` in all; one stays one."""
    if scales.shape[dim] == 1:
        return scales
    return scales.repeat_interleave(repeat, dim).narrow(dim, 0, size)
