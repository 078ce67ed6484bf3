"""Reads checkpoints in AWQ, GPTQ, AutoRound and compressed-tensors: integers of 4 or 8 bits in
words of 32.

Weights are dequantised as they are read, or become blocks of codes (stored_codes.py). AWQ (arXiv
2306.00978) and GPTQ (arXiv 2210.17323) hold a matrix [inputs, outputs] as AutoAWQ's "gemm" and
AutoGPTQ pack it, AutoRound (arXiv 2309.05516) as one of the two, compressed-tensors one [outputs,
inputs].
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoengine.errors import UnsupportedModelError, WeightMismatchError
from nanoengine.loading.checkpoint import UNUSED, CheckpointReader, Part
from nanoengine.loading.left_out import (
    DYNAMIC,
    MODULES,
    NUMBERS_OF,
    groups_of,
    stays_16_bits,
)
from nanoengine.models.stored_codes import CodedRows, CodedWeight, Weight, integer_rows
from nanoengine.text.checked_json import MAX_SIZE

AUTO_ROUND = "auto-round"
WORD_BITS, WORD, BITS = 32, "I32", (4, 8)
INPUTS_AT_ONCE = 1024  # that are dequantised
BLOCK = 32  # inputs of a block of codes
# compressed-tensors' `actorder` of a file that lists the group of each input.
BY_INPUT = ("group", "dynamic", True)
# AutoAWQ puts the columns 0, 2, 4, 6, 1, 3, 5, 7 into a word: where each of them is.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How a checkpoint packs. method: of its `quantization_config`; group: inputs that share a
    scale, 0: all of them; zero_offset: what is added to a stored zero (AutoGPTQ's first format has
    them less one); has_zeros: without them the middle of all integers is one; is_sorted: inputs of
    a group lie side by side, as far as config.json says. is_mixed: other weights may have other
    bits, groups and zeros, as their tensors show; these are then of most.
    """

    method: str
    bits: int
    group: int
    zero_offset: int = 0
    has_zeros: bool = True
    is_sorted: bool = True
    is_mixed: bool = False

    @property
    def stays_codes(self) -> bool:
        """Whether a block of inputs has one scale."""
        return self.group % BLOCK == 0 and (self.is_sorted or not self.group)

    @property
    def is_turned(self) -> bool:
        """Whether a matrix, and what belongs to it, is [outputs, inputs]."""
        return self.method == "compressed-tensors"

    @property
    def per_word(self) -> int:
        """Integers of a word."""
        return WORD_BITS // self.bits

    @property
    def names(self) -> tuple[str, str, str, str]:
        """Ends of the names of a weight's integers, scales, zeros and groups of inputs."""
        if self.is_turned:
            return "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"
        return "qweight", "scales", "qzeros", "g_idx"


def packed_format(config: object) -> PackedFormat | None:
    """That of a `quantization_config`; None for another, which is not read here."""
    if not isinstance(config, dict):
        return None
    config = _as_packed(config)
    method, bits = config.get("quant_method"), config.get("bits")
    if method == "compressed-tensors":
        return _of_groups(config) if config.get("format") == "pack-quantized" else None
    group = _group(config.get("group_size"))
    own = _own_packing(config)
    if group is None or own is None:
        return None
    is_gemm = config.get("version", "gemm") in ("gemm", "GEMM")
    if method == "awq" and bits == 4 and is_gemm and not own:
        return PackedFormat(method, 4, group)
    kind = config.get("checkpoint_format", "gptq")
    if method == "gptq" and bits in BITS and kind in ("gptq", "gptq_v2"):
        offset, is_sorted = 1 if kind == "gptq" else 0, not config.get("desc_act")
        return PackedFormat(method, bits, group, offset, is_sorted=is_sorted, is_mixed=own)
    return None


def _as_packed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """AutoRound's config as of GPTQ or AWQ, as which it packs; another as it is."""
    if str(config.get("quant_method")).replace("_", "-").removeprefix("intel/") != AUTO_ROUND:
        return config
    packing = str(config.get("packing_format") or config.get("backend"))
    layout = next((name for name in ("gptq", "awq") if name in packing), "")
    if config.get("data_type", "int") != "int":
        layout = ""
    own = config.get(MODULES)
    if isinstance(own, dict):
        own = {name: each for name, each in own.items() if not stays_16_bits(each)}
    said = {name: config.get(name) for name in ("bits", "group_size")}
    return said | {"quant_method": layout, DYNAMIC: own}


def _own_packing(config: Mapping[str, Any]) -> bool | None:
    """Whether modules have bits or groups of their own, by the rules of GPTQ or AutoRound; None:
    others than are read here. A rule for a module that stays numbers does not count.
    """
    rules = config.get(DYNAMIC)
    listed = rules if isinstance(rules, dict) else {} if rules is None else {"": rules}
    own = [rule for name, rule in listed.items() if not name.startswith(NUMBERS_OF) and rule != {}]
    for rule in own:
        if not isinstance(rule, dict) or rule.get("bits", 4) not in BITS:
            return None
        if _group(rule.get("group_size", -1)) is None or rule.get("data_type", "int") != "int":
            return None
    return bool(own)


def _group(size: object) -> int | None:
    """PackedFormat's; -1 says that all inputs share a scale."""
    if type(size) is not int or not (size == -1 or 1 <= size <= MAX_SIZE):
        return None
    return max(size, 0)


def _of_groups(config: Mapping[str, Any]) -> PackedFormat | None:
    """Of compressed-tensors' groups of layers."""
    found: dict[tuple[int, int, bool, bool], None] = {}
    for each in groups_of(config):
        weights = each.get("weights")
        if not isinstance(weights, dict) or weights.get("type") != "int":
            return None
        group = 0 if weights.get("strategy") == "channel" else _group(weights.get("group_size"))
        bits, is_symmetric = weights.get("num_bits"), weights.get("symmetric", True)
        if not isinstance(is_symmetric, bool) or bits not in BITS or group is None:
            return None
        found[bits, group, not is_symmetric, weights.get("actorder") not in BY_INPUT] = None
    if not found:
        return None
    (bits, group, has_zeros, _), *others = found
    are_sorted = all(is_sorted for *_, is_sorted in found)
    return PackedFormat(
        "compressed-tensors", bits, group, 0, has_zeros, are_sorted, is_mixed=bool(others)
    )


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """A weight is scale * (integer - zero).

    integers: int32 [inputs, outputs], from 0. zeros: int32, scales: [groups, outputs]. groups: of
    each input, int64 [inputs].
    """

    integers: Tensor
    zeros: Tensor
    scales: Tensor
    groups: Tensor

    def numbers(self) -> Tensor:
        """float32 [outputs, inputs]."""
        weight = torch.empty(self.integers.shape[::-1])
        for inputs in torch.split(torch.arange(len(self.groups)), INPUTS_AT_ONCE):
            at = self.groups[inputs]
            centred = self.integers[inputs] - self.zeros[at]
            weight[:, inputs] = (centred * self.scales[at].float()).T
        return weight

    def rows(self, bits: int) -> CodedRows | None:
        """The same as blocks of codes; None where a block of inputs has not one scale, or scales
        are more exact than float16.
        """
        scales = self.scales.half()
        is_exact = torch.equal(scales.float(), self.scales.float())
        if len(self.groups) % BLOCK or not is_exact or not _has_blocks(self.groups):
            return None
        of_block = self.groups[::BLOCK]
        codes = self.integers.T.reshape(-1, len(of_block), BLOCK)
        return integer_rows(codes, self.zeros[of_block].T, scales[of_block].T, bits)


def _has_blocks(groups: Tensor) -> bool:
    """Whether all inputs of a block are of one group. groups: of each input, whole blocks."""
    blocks = groups.view(-1, BLOCK)
    return torch.equal(blocks, blocks[:, :1].expand_as(blocks))


class PackedReader(CheckpointReader):
    """Gives packed weights as float32, under the names that they have in other checkpoints, and all
    others as they are stored.
    """

    def __init__(self, folder: Path, is_wrapped: bool, packed: PackedFormat) -> None:
        super().__init__(folder, is_wrapped)
        self._format = packed
        bits = BITS if packed.is_mixed else (packed.bits,)
        self.packing = f"{packed.method} in {' and '.join(map(str, bits))} bits"
        self.codes = frozenset(f"INT{each}" for each in bits)
        integers, *others = packed.names
        ends = tuple(f".{name}" for name in (*others, "weight_shape"))
        packs = {name.removesuffix(integers) for name in self._parts if name.endswith(integers)}
        if both := sorted(f"{stem}weight" for stem in packs if f"{stem}weight" in self._parts):
            self.close()
            raise WeightMismatchError(f"{folder}: {both[0]!r} is there packed, and as numbers, too")
        self._parts = {
            f"{name.removesuffix(integers)}weight" if name.endswith(integers) else name: part
            for name, part in self._parts.items()
            if not (name.endswith(ends) and name.rpartition(".")[0] + "." in packs)
            and not name.endswith(UNUSED)
        }

    def _stem(self, part: Part) -> str:
        """What comes before the ends of a packed weight's names; "" of one that is not packed."""
        integers = self._format.names[0]
        return part.stored.removesuffix(integers) if part.stored.endswith(integers) else ""

    def _of(self, part: Part) -> PackedFormat:
        """Of one weight: where weights differ, as its tensors show."""
        of, stem = self._format, self._stem(part)
        words, scales, zeros, _ = (self._size(stem + name) for name in of.names)
        if not of.is_mixed or len(words) != 2 or len(scales) != 2:
            return of
        if of.is_turned:
            shape = self._read(part, f"{stem}weight_shape").tolist()
            per_word, num_groups = -(-shape[1] // words[1]), scales[1]
        else:
            per_word, num_groups = -(-scales[1] // max(zeros[-1:], default=1)), scales[0]
        of = replace(of, bits=4 if per_word > WORD_BITS // 8 else 8, has_zeros=bool(zeros))
        inputs = self._shape_of(part, of)[1]
        sizes = (1 << power for power in range(4, 31))  # the last group may be smaller
        fits = (size for size in sizes if -(-inputs // size) == num_groups)
        return replace(of, group=next(fits, inputs // max(num_groups, 1)))

    def _size(self, stored: str) -> tuple[int, ...]:
        return tuple(self._slice(stored).get_shape()) if stored in self._file_of else ()

    def leave_out_zero_biases(self, needed: Container[str]) -> None:
        """Forget the biases of packed weights that are not `needed`, of which AutoGPTQ stores one
        for each weight. Raises WeightMismatchError if one is not zero.
        """
        integers = self._format.names[0]
        for name, part in list(self._parts.items()):
            stem = part.stored.removesuffix("bias")
            if name in needed or stem == part.stored or stem + integers not in self._file_of:
                continue
            if self.tensor(name).any():
                raise WeightMismatchError(
                    f"{self.folder}: {part.stored!r} is not all zeros, and the model that "
                    "config.json describes has no bias there"
                )
            del self._parts[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, read from the header only."""
        part = self._parts[name]
        shape = self._shape_of(part, self._of(part)) if self._stem(part) else super().shape(name)
        if not self._stem(part) or len(shape) != 2:
            return shape
        return len(range(shape[0])[slice(*part.rows)]), shape[1]

    def _shape_of(self, part: Part, of: PackedFormat) -> tuple[int, ...]:
        """[outputs, inputs] of a packed weight of which `part` may be some rows."""
        shape = self._size(part.stored)
        if len(shape) != 2:
            return shape
        first, second = shape
        if of.is_turned:
            return first, second * of.per_word
        is_awq = of.method == "awq"
        return (second * of.per_word, first) if is_awq else (second, first * of.per_word)

    def form(self, name: str) -> str:
        """As CheckpointReader.form; of scales that no code can have headers say nothing. Reads the
        groups of inputs where they need not lie side by side.
        """
        part = self._parts[name]
        if not self._stem(part):
            return super().form(name)
        inputs, of = self.shape(name)[-1], self._of(part)
        given = None if of.is_sorted else self._companion(part, 3)
        is_coded = inputs % BLOCK == 0 and _has_blocks(self._groups(inputs, given, of))
        return f"INT{of.bits}" if is_coded else "F32"

    def dtype(self, name: str) -> torch.dtype:
        """As CheckpointReader.dtype; float32 of a packed weight."""
        part = self._parts[name]
        if not self._stem(part):
            return super().dtype(name)
        stored = str(self._slice(part.stored).get_dtype())
        if stored != WORD:
            raise UnsupportedModelError(
                f"{self.folder}: tensor {part.stored!r} is {stored}; packed integers must be {WORD}"
            )
        return torch.float32

    def tensor(self, name: str) -> Tensor:
        """As CheckpointReader.tensor. Raises WeightMismatchError for a packed weight without scales
        and zeros of its shape.
        """
        if not self._stem(self._parts[name]):
            return super().tensor(name)
        return self._packed(name).numbers()

    def weight(self, name: str, dtype: torch.dtype) -> Weight:
        """As `tensor`, but a packed weight is a CodedWeight if its blocks can be."""
        if not self._stem(self._parts[name]):
            return super().weight(name, dtype)
        packed = self._packed(name)
        rows = packed.rows(self._of(self._parts[name]).bits)
        return packed.numbers() if rows is None else CodedWeight((rows,), dtype)

    def _packed(self, name: str) -> PackedIntegers:
        """A packed weight. Raises WeightMismatchError."""
        part = self._parts[name]
        of, (words,) = self._of(part), self._stored(name)
        scales, zeros, given = (self._companion(part, place) for place in (1, 2, 3))
        outputs, inputs = self._shape_of(part, of)
        groups = self._groups(inputs, given, of)
        wanted = (int(groups.max()) + 1, outputs)
        if scales is not None and of.is_turned:
            scales = scales.T
        zeros = _zeros(zeros, wanted, of)
        if scales is None or scales.shape != wanted or zeros is None or zeros.shape != wanted:
            raise WeightMismatchError(
                f"{self.folder}: {part.stored!r} has no scales and zeros of {wanted[1]} outputs in "
                f"{wanted[0]} groups of inputs"
            )
        lies_by_inputs = of.method == "gptq"
        integers = _unpacked(words.T if lies_by_inputs else words, of)
        integers = integers.T if lies_by_inputs or of.is_turned else integers
        rows = slice(*part.rows)
        return PackedIntegers(integers[:, rows], zeros[:, rows], scales[:, rows], groups)

    def _read(self, part: Part, stored: str) -> Tensor:
        """Of a packed weight, all: its rows lie differently in each tensor."""
        return super()._read(Part(stored) if self._stem(part) else part, stored)

    def _companion(self, part: Part, place: int) -> Tensor | None:
        """A weight's tensor of this place in PackedFormat.names, if it is there."""
        name = self._stem(part) + self._format.names[place]
        return self._read(part, name) if name in self._file_of else None

    def _groups(self, inputs: int, given: Tensor | None, of: PackedFormat) -> Tensor:
        """The group of each input, int64 [inputs]. given: as the checkpoint lists them."""
        group = of.group or inputs
        groups = torch.arange(inputs) // group
        # compressed-tensors fills a list that it does not use with -1.
        if given is None or torch.equal(given.long(), torch.full_like(groups, -1)):
            return groups
        if not torch.equal(given.long().sort().values, groups):
            raise WeightMismatchError(
                f"{self.folder}: the groups of inputs are not {int(groups.max()) + 1} of {group}"
            )
        return given.long()


def _zeros(stored: Tensor | None, shape: tuple[int, int], of: PackedFormat) -> Tensor | None:
    """int32 [groups, outputs], of which `shape` has how many; None for what cannot be zeros."""
    if not of.has_zeros or (stored is None and not of.is_turned):
        return torch.full(shape, 1 << (of.bits - 1), dtype=torch.int32)
    if stored is None or stored.dim() != 2 or stored.dtype is not torch.int32:
        return None
    rows = _unpacked(stored.T if of.is_turned else stored, of)
    return rows[:, : shape[1]] + of.zero_offset & (1 << of.bits) - 1


def _unpacked(words: Tensor, of: PackedFormat) -> Tensor:
    """int32 words as the integers in them, the lowest bits first; rows grow."""
    shifts = torch.arange(0, WORD_BITS, of.bits, dtype=torch.int32)
    if of.method == "awq":
        shifts = shifts[list(AWQ_ORDER)]
    parts = words.unsqueeze(2) >> shifts & (1 << of.bits) - 1
    return parts.flatten(1)
