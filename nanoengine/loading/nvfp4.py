"""Reads checkpoints in NVFP4: numbers of 4 bits (E2M1) with a scale in FP8 for 16 inputs, and one
in float32 for the whole weight.

compressed-tensors writes them, whose float32 divides the scales, and NVIDIA's ModelOpt, whose
float32 multiplies them. A weight becomes blocks of codes (stored_codes.py), or is dequantised as it
is read; activations stay as they are. Others of the checkpoint may be in FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoengine.errors import UnsupportedModelError, WeightMismatchError
from nanoengine.loading import modelopt
from nanoengine.loading.checkpoint import Part
from nanoengine.loading.fp8 import BLOCK, Fp8Reader, fp8_block
from nanoengine.loading.left_out import groups_of
from nanoengine.models.stored_codes import (
    FORMATS,
    NVFP4_GROUP,
    WHOLE_SCALES,
    CodedWeight,
    Weight,
    nvfp4_numbers,
    nvfp4_rows,
)

GROUP = FORMATS["NVFP4"][0]  # inputs of a block of codes
PACKED, PLAIN = "weight_packed", "weight"  # ends of names: compressed-tensors', and all others
SCALES = "weight_scale"
DIVISOR, FACTOR = "weight_global_scale", "weight_scale_2"


def has_nvfp4(config: object) -> bool:
    """Whether this `quantization_config` is of weights in NVFP4, or of some, and others in FP8."""
    if not isinstance(config, dict):
        return False
    if config.get("quant_method") == "compressed-tensors":
        return _is_of_groups(config)
    found = modelopt.algorithms(config)
    group = config.get("group_size", NVFP4_GROUP)
    is_known = found <= {*modelopt.NVFP4, *modelopt.FP8} and group in (None, NVFP4_GROUP)
    return is_known and bool(found.intersection(modelopt.NVFP4))


def _is_of_groups(config: Mapping[str, Any]) -> bool:
    """If all groups of layers in compressed-tensors' config are so."""
    groups, count = groups_of(config), 0
    for group in groups:
        weights = group.get("weights")
        if not isinstance(weights, dict) or weights.get("type") != "float":
            return False
        if weights.get("num_bits") == 4 and weights.get("group_size") == NVFP4_GROUP:
            count += 1
        elif fp8_block({**config, "config_groups": {"": group}}) != BLOCK:
            return False
    return count > 0


@dataclass(frozen=True, slots=True)
class PackedFloats:
    """A weight as the checkpoint has it; see stored_codes.nvfp4_rows. whole: float32 [1, 1]."""

    codes: Tensor
    scales: Tensor
    whole: Tensor

    def numbers(self) -> Tensor:
        """float32 [outputs, inputs]."""
        return nvfp4_numbers(self.codes, self.scales, self.whole)

    def weight(self, dtype: torch.dtype) -> Weight:
        """As codes, if these have whole blocks, and the whole weight's scale is of a usual size."""
        least, most = WHOLE_SCALES
        if self.scales.shape[1] * NVFP4_GROUP % GROUP or not least < self.whole.abs() < most:
            return self.numbers()
        whole = self.whole.flatten().expand(len(self.codes))
        return CodedWeight((nvfp4_rows(self.codes, self.scales, whole),), dtype)


class Nvfp4Reader(Fp8Reader):
    """Gives weights in NVFP4 as float32, or as codes, under the names that they have in other
    checkpoints, and all others as Fp8Reader does.
    """

    def __init__(self, folder: Path, is_wrapped: bool) -> None:
        super().__init__(folder, is_wrapped, BLOCK)
        self._packed = {stored for stored in self._file_of if self._is_packed(stored)}
        self.packing, self.codes = "NVFP4", frozenset(("FP8", "NVFP4"))
        stems = {_stem(stored) for stored in self._packed}
        both = sorted(stored for stored in self._packed if self._has_numbers_too(stored))
        if both:
            self.close()
            raise WeightMismatchError(f"{folder}: {both[0]!r} is there as numbers, too")
        self._parts = {
            name.removesuffix(PACKED) + PLAIN if name.endswith(PACKED) else name: part
            for name, part in self._parts.items()
            if not self._is_scale(part.stored, stems)
        }

    def _is_packed(self, stored: str) -> bool:
        """ModelOpt's weights have the names of others, and another dtype."""
        if stored.endswith(f".{PACKED}"):
            return True
        is_weight = stored.endswith(f".{PLAIN}") and _stem(stored) + SCALES in self._file_of
        return is_weight and str(self._slice(stored).get_dtype()) == "U8"

    def _has_numbers_too(self, stored: str) -> bool:
        return stored.endswith(PACKED) and _stem(stored) + PLAIN in self._file_of

    @staticmethod
    def _is_scale(stored: str, stems: set[str]) -> bool:
        ends = (SCALES, DIVISOR, FACTOR)
        return any(stored.endswith(end) and stored.removesuffix(end) in stems for end in ends)

    def shape(self, name: str) -> tuple[int, ...]:
        """As CheckpointReader.shape."""
        shape = super().shape(name)
        is_packed = self._parts[name].stored in self._packed and len(shape) == 2
        return (shape[0], 2 * shape[1]) if is_packed else shape

    def form(self, name: str) -> str:
        """As CheckpointReader.form; of a whole weight's scale headers say nothing."""
        if self._parts[name].stored not in self._packed:
            return super().form(name)
        return "F32" if self.shape(name)[-1] % GROUP else "NVFP4"

    def dtype(self, name: str) -> torch.dtype:
        """As CheckpointReader.dtype; float32 of a weight in NVFP4. Raises UnsupportedModelError."""
        part = self._parts[name]
        if part.stored not in self._packed:
            return super().dtype(name)
        stored = self._slice(part.stored)
        if str(stored.get_dtype()) != "U8" or len(stored.get_shape()) != 2:
            raise UnsupportedModelError(
                f"{self.folder}: tensor {part.stored!r} is {stored.get_dtype()} "
                f"{list(stored.get_shape())}; NVFP4 must be U8, and a matrix for each layer and "
                "each expert"
            )
        return torch.float32

    def tensor(self, name: str) -> Tensor:
        """As CheckpointReader.tensor. Raises WeightMismatchError for NVFP4 without its scales."""
        part = self._parts[name]
        return self._floats(name).numbers() if part.stored in self._packed else super().tensor(name)

    def weight(self, name: str, dtype: torch.dtype) -> Weight:
        """As `tensor`, but a CodedWeight where blocks are whole."""
        if self._parts[name].stored not in self._packed:
            return super().weight(name, dtype)
        return self._floats(name).weight(dtype)

    def _floats(self, name: str) -> PackedFloats:
        """Raises WeightMismatchError."""
        part = self._parts[name]
        (codes,) = self._stored(name)
        return PackedFloats(codes, self._scales_of(part), self._whole_of(part))

    def _scales_of(self, part: Part) -> Tensor:
        """float8_e4m3fn [rows of the part, inputs / 16]."""
        stored = _stem(part.stored) + SCALES
        rows, half = self._slice(part.stored).get_shape()
        if 2 * half % NVFP4_GROUP:
            raise WeightMismatchError(
                f"{self.folder}: {part.stored!r} has {2 * half} inputs, and {NVFP4_GROUP} share a "
                "scale"
            )
        wanted, found = ["F8_E4M3", [rows, 2 * half // NVFP4_GROUP]], None
        if stored in self._file_of:
            found = [str(self._slice(stored).get_dtype()), list(self._slice(stored).get_shape())]
        if found != wanted:
            is_there = f"is {found[0]} {found[1]}" if found else "is missing"
            raise WeightMismatchError(
                f"{self.folder}: {stored!r} {is_there}; the scales of {part.stored!r} "
                f"{[rows, half]} are F8_E4M3 {wanted[1]}, one for {NVFP4_GROUP} inputs"
            )
        return self._read(part, stored)

    def _whole_of(self, part: Part) -> Tensor:
        """float32 [1, 1], below 0 if it divides."""
        names = [_stem(part.stored) + end for end in (DIVISOR, FACTOR)]
        found = [name for name in names if name in self._file_of]
        if len(found) != 1:
            raise WeightMismatchError(
                f"{self.folder}: {part.stored!r} is NVFP4 and needs {names[0]!r} or {names[1]!r}; "
                f"it has {'both' if found else 'neither'}"
            )
        whole, divides = self._whole(found[0]).float(), found[0].endswith(DIVISOR)
        if whole.numel() != 1 or not (whole > 0 if divides else whole >= 0):
            raise WeightMismatchError(
                f"{self.folder}: {found[0]!r} is {whole.flatten()[:3].tolist()}, not one number "
                "above 0"
            )
        return (-whole if divides else whole).view(1, 1)


def _stem(stored: str) -> str:
    """A packed weight's name without its end."""
    return stored.removesuffix(PACKED).removesuffix(PLAIN)
