"""Reads the tensors of a safetensors checkpoint and checks their names and shapes."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nanoengine.config.engine import in_gib
from nanoengine.config.model import ModelConfig
from nanoengine.errors import (
    CorruptModelError,
    ModelLoadError,
    ModelNotFoundError,
    UnsupportedModelError,
    WeightMismatchError,
    is_one_of,
    shown,
)
from nanoengine.loading.mxfp4 import GROUP, mxfp4_rows, unpack_mxfp4
from nanoengine.loading.refused import about_file, about_folder
from nanoengine.loading.steady_file import SteadyFile
from nanoengine.loading.wrappers import text_names
from nanoengine.models.architecture import MTP_JOIN
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.models.stored_codes import (
    CODES_KEY,
    FORMATS,
    CodedRows,
    CodedWeight,
    Weight,
    numbers_of,
)
from nanoengine.text.checked_json import MAX_REASON, has_file, read_json

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CODE_DTYPES = {"U8": torch.uint8}
INTEGER_DTYPES = ("I64", "I32")
PACKED_DTYPES = {"U8": torch.bfloat16}  # of MXFP4, and what it becomes
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Heads that guess further tokens; the model does not need them (mtp_names.py says who does).
GUESSING_HEADS = ("mtp.", "model.mtp_")
HEADS_PART = f"{MTP_JOIN}.weight"
# Buffers in old checkpoints, which models compute themselves.
COMPUTED_BUFFERS = ("rotary_emb.inv_freq",)
# Ends of the names of scales that quantised checkpoints hold for other engines.
UNUSED = (
    *(".input_scale", ".activation_scale", "_proj_activation_scale"),  # of activations
    *(".input_scale_ub", ".output_scale"),
    ".input_global_scale",
    *(".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".prob_scale"),  # of attention in 8 bits
)
MAX_FILE_NAME = 255  # characters, the limit of file systems
NUM_SHOWN = 5
REMAP_BYTES = 64 << 20


Rows = tuple[int | None, int | None, int | None]
ALL_ROWS: Rows = (None, None, None)


@dataclass(frozen=True, slots=True)
class Part:
    """Where a tensor lies in a stored one: it is all, or some rows of it or of entry `index`.

    rows: (first, last, step), as slice takes them.
    is_turned: the entry is [columns, rows]. scales: the tensor with those of an entry in MXFP4.
    is_flat: it is all of one dimension, whatever the stored one has.
    """

    stored: str
    index: int | None = None
    rows: Rows = ALL_ROWS
    is_turned: bool = False
    scales: str = ""
    is_flat: bool = False


def header_bytes(header: Mapping[str, Any]) -> bytes:
    """The beginning of a safetensors file: uint64 length, then JSON, padded to 8 bytes."""
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded


class CheckpointReader:
    """Tensors of a folder's safetensors file or shards, read by name on demand.

    Opening it checks that every shard is complete and matches the index, and that no name appears
    twice. Tensors are views of the mapped file: copy them before writing and before `close`. Files
    are mapped anew from time to time, because pages read so far count as the process's memory while
    they are mapped, beside the weights made from them.

    others: tensors of a wrapper that are not its text model's. dtypes: those that are read, by
    their names in a file. packing: of weights that are dequantised, in words; "": none are.
    codes: the formats that packed weights may get, keys of FORMATS; beside those of code_format.
    """

    dtypes: Mapping[str, torch.dtype] = DTYPES
    packing = ""
    codes: frozenset[str] = frozenset()

    def __init__(self, folder: Path, is_wrapped: bool = False) -> None:
        """is_wrapped: there is a text model with others beside; its tensors get the names that they
        would have alone. Raises ModelNotFoundError without safetensors, CorruptModelError for a
        damaged shard.
        """
        self.folder = folder
        self.others: set[str] = set()
        self._files: dict[str, Any] = {}
        self._steady: dict[str, SteadyFile] = {}
        self._file_of: dict[str, str] = {}
        self._parts: dict[str, Part] = {}
        self._formats: dict[str, str] = {}
        self._num_read = 0
        try:
            weight_map = _weight_map(folder)
            for file_name in _shard_names(folder, weight_map):
                self._open(file_name)
            self._check_index(weight_map)
            stored = text_names(self._file_of) if is_wrapped else {n: n for n in self._file_of}
            self._parts = {name: Part(its) for name, its in stored.items()}
            self.others = self._file_of.keys() - stored.values()
        except ModelLoadError:
            self.close()
            raise

    def _open(self, file_name: str) -> None:
        if not has_file(self.folder / file_name):
            raise CorruptModelError(
                f"{self.folder}: {file_name[:MAX_REASON]} is missing, but the index names it"
            )
        self._steady[file_name] = SteadyFile(self.folder / file_name)
        for name in self._map(file_name):
            if name in self._file_of:
                raise CorruptModelError(
                    f"tensor {name!r} is in {self._file_of[name]} and in {file_name} "
                    f"of {self.folder}"
                )
            self._file_of[name] = file_name

    def _map(self, file_name: str) -> list[str]:
        """Map the file, or map it anew; returns its tensor names."""
        path = self.folder / file_name
        try:
            file = safe_open(str(path), framework="pt", device="cpu")
            names: list[str] = list(file.keys())  # type: ignore[no-untyped-call]
            about = file.metadata() or {}  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError, ValueError) as error:
            reason = str(error)[:MAX_REASON]  # the error may quote the whole header
            hint = about_file(path) if path.is_file() else ""
            raise CorruptModelError(f"{path} is truncated or damaged: {reason}{hint}") from error
        self._files[file_name] = file
        if CODES_KEY in about:
            self._formats |= _read_formats(path, about[CODES_KEY])
        return names

    def _check_index(self, weight_map: Mapping[str, str]) -> None:
        for name, file_name in weight_map.items():
            if self._file_of.get(name) != file_name:
                raise CorruptModelError(
                    f"{self.folder / file_name} lacks tensor {name!r}, which the index places there"
                )

    def rename(self, parts: Mapping[str, Part]) -> None:
        """Give these names to tensors, or to parts of them, which lose their own."""
        lost = {name for part in parts.values() for name in (part.stored, part.scales) if name}
        old = {name: self._parts[name].stored for name in lost} | {"": ""}
        kept = {name: part for name, part in self._parts.items() if name not in lost}
        self._parts = kept | {
            name: replace(part, stored=old[part.stored], scales=old[part.scales])
            for name, part in parts.items()
        }

    def names(self) -> set[str]:
        """Names of all tensors of the model."""
        return set(self._parts)

    def part(self, name: str) -> Part:
        """Where a tensor lies."""
        return self._parts[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, read from the header only; of codes, that of their numbers."""
        part = self._parts[name]
        shape = tuple(self._slice(part.stored).get_shape())
        if part.is_flat:
            return (math.prod(shape),)
        if part.index is None and (part.rows == ALL_ROWS or not shape):
            if not self.code_format(name) or len(shape) != 2:
                return shape
            weights, num_bytes = FORMATS[self.code_format(name)]
            num_blocks, rest = divmod(shape[1], num_bytes)
            return shape if rest else (shape[0], num_blocks * weights)
        entry = shape if part.index is None else shape[1:]
        rows, *columns = reversed(entry) if part.is_turned else entry
        if part.scales:
            columns = [columns[0] * GROUP]
        return len(range(rows)[slice(*part.rows)]), *columns

    def code_format(self, name: str) -> str:
        """A key of FORMATS; "" if the tensor is numbers."""
        return self._formats.get(self._parts[name].stored, "")

    def form(self, name: str) -> str:
        """How `weight` gives a tensor, as far as headers say: a key of FORMATS, or the dtype of its
        numbers by its name in a file.
        """
        part = self._parts[name]
        if part.scales:
            return "MXFP4"
        return self.code_format(name) or str(self._slice(part.stored).get_dtype())

    def dtype(self, name: str) -> torch.dtype:
        """One of `dtypes`; uint8 of codes. Raises UnsupportedModelError for other stored ones."""
        part = self._parts[name]
        dtypes = PACKED_DTYPES if part.scales else self.dtypes
        if self.code_format(name):
            dtypes = CODE_DTYPES
            if len(self._slice(part.stored).get_shape()) != 2:
                raise WeightMismatchError(
                    f"{self.folder}: tensor {name!r} is no matrix, and {CODES_KEY!r} of its file "
                    "says that it is codes"
                )
        for whole in filter(None, (part.stored, part.scales)):
            stored = str(self._slice(whole).get_dtype())
            if stored not in dtypes:
                raise UnsupportedModelError(
                    f"{self.folder / self._file_of[whole]}: tensor {name!r} is {stored}; "
                    f"supported: {', '.join(dtypes)}"
                )
        return dtypes[str(self._slice(part.stored).get_dtype())]

    def num_bytes(self) -> int:
        """Bytes of all tensors of the model as stored."""
        pairs = ((part.stored, part.scales) for part in self._parts.values())
        return sum(self._whole(name).nbytes for name in {*chain(*pairs)} - {""})

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor, on the CPU and in its stored dtype, mapped from the file. Raises
        CorruptModelError if that was changed since it was opened.
        """
        tensor, *scales = self._stored(name)
        return unpack_mxfp4(tensor, *scales) if scales else tensor

    def _stored(self, name: str) -> list[torch.Tensor]:
        """A tensor as it is in the file, and its scales in MXFP4."""
        self.dtype(name)
        part = self._parts[name]
        for file_name in {self._file_of[each] for each in (part.stored, part.scales) if each}:
            self._steady[file_name].check()
        self._remap()
        found = [self._read(part, stored) for stored in (part.stored, part.scales) if stored]
        self._num_read += sum(tensor.nbytes for tensor in found)
        return found

    def _remap(self) -> None:
        """Map the files anew if much was read."""
        if self._num_read > REMAP_BYTES:
            for file_name in self._files:
                self._map(file_name)
            self._num_read = 0

    def _whole(self, stored: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[self._file_of[stored]].get_tensor(stored)
        return tensor

    def _read(self, part: Part, stored: str) -> torch.Tensor:
        tensor = self._whole(stored)
        if part.is_flat:
            return tensor.flatten()
        if part.index is None:
            return tensor if part.rows == ALL_ROWS else tensor[slice(*part.rows)]
        entry, rows = tensor[part.index], slice(*part.rows)
        return entry.T[rows].contiguous() if part.is_turned else entry[rows]

    def weight(self, name: str, dtype: torch.dtype) -> Weight:
        """As `tensor`, but codes are a CodedWeight of this dtype."""
        if self._parts[name].scales:
            rows = mxfp4_rows(*self._stored(name))
            return CodedWeight((CodedRows("MXFP4", rows),), dtype)
        tensor = self.tensor(name)
        if not self.code_format(name):
            return tensor
        return CodedWeight((CodedRows(self.code_format(name), tensor),), dtype)

    def numbers(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """As `tensor`, and codes as the numbers that they stand for, in this dtype."""
        is_coded = bool(self.code_format(name))
        return numbers_of(self.weight(name, dtype)) if is_coded else self.tensor(name)

    def integers(self, name: str) -> torch.Tensor:
        """A tensor of integers, int64. Raises UnsupportedModelError for another one."""
        stored = self._parts[name].stored
        dtype = str(self._slice(stored).get_dtype())
        if dtype not in INTEGER_DTYPES:
            raise UnsupportedModelError(
                f"{self.folder / self._file_of[stored]}: tensor {name!r} is {dtype}; "
                f"supported: {', '.join(INTEGER_DTYPES)}"
            )
        self._steady[self._file_of[stored]].check()
        return self._whole(stored).to(torch.int64, copy=True)

    def growth(self, num_bytes: int) -> str:
        """For the plan, by how much weights grow as they are read; "" if they do not. num_bytes: of
        those in memory.
        """
        packing = "MXFP4" if any(part.scales for part in self._parts.values()) else self.packing
        grown = f"{in_gib(self.num_bytes())} stored are {in_gib(num_bytes)} in memory"
        if packing:
            hint = 'quantization="int8" halves those of 16 bits, and rounds'
            return f"{packing}, dequantised: {grown}; {hint}"
        return f"dequantised as they are loaded: {grown}" if self._formats else ""

    def _slice(self, stored: str) -> Any:
        return self._files[self._file_of[stored]].get_slice(stored)

    def close(self) -> None:
        """Close the files. Tensors already returned keep their mapping."""
        self._files.clear()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_formats(path: Path, text: str) -> dict[str, str]:
    """The formats of codes in a file's metadata. Raises CorruptModelError."""
    try:
        formats = json.loads(text)
    except (ValueError, RecursionError):
        formats = None
    if not isinstance(formats, dict) or not all(is_one_of(n, FORMATS) for n in formats.values()):
        raise CorruptModelError(f"{path}: {CODES_KEY!r} of its metadata names no known formats")
    return formats


def ignorable_tensors(config: ModelConfig, stored: Iterable[str] = ()) -> tuple[str, ...]:
    """Beginnings and ends of tensor names that no model needs but a checkpoint may hold; for
    `check_names`. stored: the names in the checkpoint, which may have several heads.
    """
    tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
    heads = {f"model.layers.{config.num_layers}."}
    heads |= {n.removesuffix(HEADS_PART) for n in stored if n.endswith(HEADS_PART)}
    has_one = bool(ARCHITECTURES[config.architecture].mtp)
    shared = (i for i, shape in enumerate(config.shapes) if shape.source != i)
    unread = (f"model.layers.{i}.self_attn.{part}" for i in shared for part in ("k_", "v_"))
    return (*COMPUTED_BUFFERS, *UNUSED, *tied, *(heads if has_one else ()), *unread)


def check_names(
    needed: Mapping[str, Sequence[int]],
    reader: CheckpointReader,
    ignorable: Iterable[str] = COMPUTED_BUFFERS,
) -> None:
    """Check that the checkpoint holds exactly the tensors `needed` (name to shape, before fusion).

    Unneeded tensors whose names begin or end with one of `ignorable` are allowed, and
    GUESSING_HEADS. Raises
    WeightMismatchError with the missing, unexpected and wrongly shaped tensors, and
    UnsupportedModelError for a needed tensor that is not float32, float16 or bfloat16.
    """
    present = reader.names()
    missing = sorted(needed.keys() - present)
    allowed = tuple(ignorable)
    unexpected = sorted(
        name
        for name in present - needed.keys()
        if not name.startswith((*allowed, *GUESSING_HEADS)) and not name.endswith(allowed)
    )
    wrong = [
        f"{name} is {list(reader.shape(name))}, not {list(shape)}"
        for name, shape in needed.items()
        if name in present and reader.shape(name) != tuple(shape)
    ]
    problems = [
        f"{len(items)} {what}: {'; '.join(item[:MAX_REASON] for item in items[:NUM_SHOWN])}"
        + ("; ..." if len(items) > NUM_SHOWN else "")
        for what, items in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("wrongly shaped", wrong),
        )
        if items
    ]
    if problems:
        raise WeightMismatchError(
            f"the tensors in {reader.folder} are not those that its config.json asks for. "
            + ". ".join(problems)
        )
    for name in needed:
        reader.dtype(name)


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name to file name from the index; empty without an index."""
    path = folder / "model.safetensors.index.json"
    if not has_file(path):
        return {}
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptModelError(f"{path} has no 'weight_map'")
    for name, file_name in weight_map.items():
        # Only plain file names: an index must not lead out of its folder.
        is_plain = isinstance(file_name, str) and Path(file_name).name == file_name
        is_safetensors = is_plain and file_name.endswith(".safetensors")
        if not is_safetensors or len(file_name) > MAX_FILE_NAME:
            raise CorruptModelError(
                f"{path}: {shown(file_name)} (of {shown(name)}) is not a file of this folder"
            )
    return weight_map


def _shard_names(folder: Path, weight_map: Mapping[str, str]) -> list[str]:
    if weight_map:
        return sorted(set(weight_map.values()))
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if found:
        return found
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise UnsupportedModelError(
            f"{folder} holds only pickled weights ({pickles[0]}), which are never opened; "
            "convert them to safetensors or find a safetensors copy"
        )
    raise ModelNotFoundError(f"{folder} holds no *.safetensors file{about_folder(folder)}")
