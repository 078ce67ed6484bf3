"""Reads checkpoints in NF4 of bitsandbytes (QLoRA, arXiv 2305.14314): 4 bits say which of 16 levels
a weight has, and each block of weights has a scale, which may be 8 bits for a level of its own.

A weight becomes blocks of codes (stored_codes.py), or is dequantised as it is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoengine.errors import UnsupportedModelError, WeightMismatchError, shown
from nanoengine.loading.checkpoint import CheckpointReader, Part
from nanoengine.models.stored_codes import FORMATS, NF4_LEVELS, CodedRows, CodedWeight, Weight
from nanoengine.models.stored_codes import nf4_rows as blocks_of

STATE = ".quant_state.bitsandbytes__nf4"  # after a weight's name: JSON
SCALES, LEVELS = ".absmax", ".quant_map"
SCALES_OF_SCALES, LEVELS_OF_SCALES = ".nested_absmax", ".nested_quant_map"
GROUP = FORMATS["NF4"][0]  # inputs of a block of codes


def has_nf4(config: object) -> bool:
    """Whether this `quantization_config` is of weights in NF4."""
    if not isinstance(config, dict) or config.get("quant_method") != "bitsandbytes":
        return False
    is_packed = config.get("load_in_4bit", config.get("_load_in_4bit")) is True
    kind, storage = config.get("bnb_4bit_quant_type"), config.get("bnb_4bit_quant_storage")
    return is_packed and kind == "nf4" and storage in (None, "uint8")


@dataclass(frozen=True, slots=True)
class _State:
    """What is said of a weight: its shape, the weights of a block, the scales of a block of these,
    and what is added to each scale.
    """

    outputs: int
    inputs: int
    block: int
    block_of_scales: int
    offset: float

    @property
    def stays_codes(self) -> bool:
        """Whether blocks of codes have one scale each."""
        return self.inputs % GROUP == 0 and self.block % GROUP == 0


class Nf4Reader(CheckpointReader):
    """Gives weights in NF4 as float32, or as codes, and all others as they are stored."""

    packing = "NF4"
    codes = frozenset(("NF4",))

    def __init__(self, folder: Path, is_wrapped: bool) -> None:
        super().__init__(folder, is_wrapped)
        self._states: dict[str, _State] = {}
        self._packed = {each.removesuffix(STATE) for each in self._file_of if each.endswith(STATE)}
        ends = (STATE, SCALES, LEVELS, SCALES_OF_SCALES, LEVELS_OF_SCALES)
        beside = {stored + end for stored in self._packed for end in ends}
        self._parts = {n: part for n, part in self._parts.items() if part.stored not in beside}

    def shape(self, name: str) -> tuple[int, ...]:
        """As CheckpointReader.shape. Raises WeightMismatchError."""
        part = self._parts[name]
        if part.stored not in self._packed:
            return super().shape(name)
        state = self._state(part.stored)
        return len(range(state.outputs)[slice(*part.rows)]), state.inputs

    def form(self, name: str) -> str:
        """As CheckpointReader.form; of other levels than the usual ones headers say nothing."""
        part = self._parts[name]
        if part.stored not in self._packed:
            return super().form(name)
        return "NF4" if self._state(part.stored).stays_codes else "F32"

    def dtype(self, name: str) -> torch.dtype:
        """As CheckpointReader.dtype; float32 of a weight in NF4. Raises UnsupportedModelError."""
        part = self._parts[name]
        if part.stored not in self._packed:
            return super().dtype(name)
        stored = str(self._slice(part.stored).get_dtype())
        if stored != "U8":
            raise UnsupportedModelError(
                f"{self.folder}: tensor {part.stored!r} is {stored}; NF4 must be U8"
            )
        return torch.float32

    def tensor(self, name: str) -> Tensor:
        """As CheckpointReader.tensor. Raises WeightMismatchError for NF4 without what belongs to
        it.
        """
        part = self._parts[name]
        if part.stored not in self._packed:
            return super().tensor(name)
        codes, scales, state = self._codes_and_scales(name)
        made = self._beside(part, LEVELS, len(NF4_LEVELS))[codes.int()].view(-1, state.block)
        numbers = made.mul_(scales[:, None]).view(state.outputs, state.inputs)
        return numbers[slice(*part.rows)]

    def weight(self, name: str, dtype: torch.dtype) -> Weight:
        """As `tensor`, but a CodedWeight where blocks are whole, and levels the usual ones."""
        part = self._parts[name]
        if part.stored not in self._packed:
            return super().weight(name, dtype)
        levels = self._beside(part, LEVELS, len(NF4_LEVELS))
        if not self._state(part.stored).stays_codes or levels.tolist() != list(NF4_LEVELS):
            return self.tensor(name)
        codes, scales, state = self._codes_and_scales(name)
        scales = scales.repeat_interleave(state.block // GROUP).view(state.outputs, -1)
        rows: CodedRows = blocks_of(codes.view(state.outputs, -1), scales)
        return CodedWeight((rows,), dtype)[slice(*part.rows)]

    def _codes_and_scales(self, name: str) -> tuple[Tensor, Tensor, _State]:
        """uint8 of each weight, float32 of each block."""
        part = self._parts[name]
        self.dtype(name)
        state = self._state(part.stored)
        (held,) = self._stored(name)
        held = held.flatten()
        count = state.outputs * state.inputs
        if 2 * len(held) != count or count % state.block:
            raise WeightMismatchError(
                f"{self.folder}: {part.stored!r} holds {2 * len(held)} weights of 4 bits, not the "
                f"{state.outputs} x {state.inputs} in blocks of {state.block} that its state says"
            )
        codes = torch.stack((held >> 4, held & 15), dim=1).flatten()
        return codes, self._scales_of(part, state, count // state.block), state

    def _scales_of(self, part: Part, state: _State, count: int) -> Tensor:
        scales = self._beside(part, SCALES, count)
        if scales.dtype is not torch.uint8:
            return scales.float()
        each = self._beside(part, SCALES_OF_SCALES, -(-count // state.block_of_scales))
        levels = self._beside(part, LEVELS_OF_SCALES, 256)
        each = each.repeat_interleave(min(state.block_of_scales, count))[:count]
        return levels[scales.int()] * each + state.offset

    def _beside(self, part: Part, end: str, count: int) -> Tensor:
        """What belongs to a weight. Raises WeightMismatchError if it is not so many numbers."""
        stored = part.stored + end
        found = self._whole(stored).flatten() if stored in self._file_of else None
        if found is None or len(found) != count:
            raise WeightMismatchError(
                f"{self.folder}: {stored!r} "
                + ("is missing" if found is None else f"has {len(found)} numbers, not {count}")
            )
        if not (found.is_floating_point() or (end == SCALES and found.dtype is torch.uint8)):
            raise WeightMismatchError(f"{self.folder}: {stored!r} is {found.dtype}, no floats")
        return found

    def _state(self, stored: str) -> _State:
        if stored not in self._states:
            held = self._whole(stored + STATE)
            if held.dtype is not torch.uint8:
                raise WeightMismatchError(
                    f"{self.folder}: {stored + STATE!r} is {held.dtype}, not uint8"
                )
            text = bytes(held.flatten().tolist())
            self._states[stored] = _read_state(self.folder / (stored + STATE), text)
        return self._states[stored]

    def _read(self, part: Part, stored: str) -> Tensor:
        """Of a weight in NF4, all: no row begins at a row of the stored tensor."""
        return super()._read(Part(stored) if stored in self._packed else part, stored)


def _read_state(path: Path, text: bytes) -> _State:
    """Raises WeightMismatchError."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    content = content if isinstance(content, dict) else {}
    shape, offset = content.get("shape"), content.get("nested_offset", 0.0)
    outputs, inputs = shape if isinstance(shape, list) and len(shape) == 2 else (0, 0)
    state = _State(
        *(outputs, inputs, content.get("blocksize", 0), content.get("nested_blocksize", 1), offset)
    )
    *sizes, offset = astuple(state)
    is_good = all(type(size) is int and size > 0 for size in sizes)
    if not is_good or not isinstance(offset, float) or not math.isfinite(offset):
        raise WeightMismatchError(
            f"{path}: {shown(_shortened(content))} is not the state of a matrix in NF4"
        )
    return state


def _shortened(content: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("shape", "blocksize", "nested_blocksize", "nested_offset")
    return {key: content[key] for key in keys if key in content}
