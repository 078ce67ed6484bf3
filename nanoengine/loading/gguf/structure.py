"""Does the structure of a GGUF file fit its size? Asked before anything believes the file.

Walks every length, count and offset, in hundredths of a second, and keeps nothing. The `gguf`
package believes them: a damaged array length would keep it busy for ever.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from nanoengine.errors import CorruptModelError, UnsupportedModelError, counted
from nanoengine.loading.refused import about_file

MAX_COUNT = 10_000_000  # tensors, metadata entries, tensor dimensions
# Array elements of the tokenizer's metadata together, and of all other metadata: `gguf` makes an
# object of each, of some hundred bytes.
MAX_OF_VOCABULARY, MAX_OF_OTHERS = 5_000_000, 100_000
MAX_DIMS = 4
MAX_SHOWN = 100  # bytes of a name in an error

_UINT32, _STRING, _ARRAY = 4, 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def check_structure(path: Path) -> dict[int, int]:
    """Check every length and offset of a GGUF against the file's size, and every name for another
    of its kind. Returns at which byte each value of the tokenizer begins, and at which it ends.

    Tensors must lie one after the other, as llama.cpp demands it: a wrong offset would be read as
    other weights. Raises CorruptModelError, or UnsupportedModelError for another version or byte
    order.
    """
    if path.stat().st_size < 24:
        raise CorruptModelError(
            f"{path} is no GGUF file: only {counted(path.stat().st_size, 'byte')}{about_file(path)}"
        )
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(path, data)
        num_tensors, num_fields = _read_head(cursor)
        alignment, vocabulary = _read_fields(cursor, num_fields)
        tensors = [_read_tensor_info(cursor) for _ in range(num_tensors)]
        _check_unique(path, "tensor", [tensor.name for tensor in tensors])
        _check_places(cursor, tensors, alignment)
    return vocabulary


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    """offset, size: bytes, the offset from the start of the data."""

    name: bytes
    offset: int
    size: int


def _read_fields(cursor: _Cursor, count: int) -> tuple[int, dict[int, int]]:
    """Step over the metadata; returns the alignment of the data, in bytes, and where the values of
    the tokenizer begin and end.
    """
    alignment: int | None = 32
    keys = []
    vocabulary = {}
    left = {True: MAX_OF_VOCABULARY, False: MAX_OF_OTHERS}
    for _ in range(count):
        keys.append(cursor.string())
        kind, start = cursor.uint32(), cursor.position
        is_of_vocabulary = keys[-1].startswith(b"tokenizer.")
        if kind == _ARRAY:
            left[is_of_vocabulary] -= _skip_array(cursor, left[is_of_vocabulary])
            value = None
        else:
            value = _skip_value(cursor, kind)
        if keys[-1] == b"general.alignment":
            alignment = value
        elif is_of_vocabulary:
            vocabulary[start] = cursor.position
    _check_unique(cursor.path, "metadata key", keys)
    if not alignment or alignment & (alignment - 1):
        raise CorruptModelError(
            f"{cursor.path} is damaged: its alignment is no power of two of type uint32"
        )
    return alignment, vocabulary


def _check_unique(path: Path, what: str, names: list[bytes]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise CorruptModelError(f"{path} is damaged: the {what} {_text(twice)!r} is there twice")


def _check_places(cursor: _Cursor, tensors: list[_TensorInfo], alignment: int) -> None:
    """cursor: behind the last tensor's description."""
    path, file_size = cursor.path, len(cursor.data)
    data_start = _aligned(cursor.position, alignment)
    expected = 0
    for tensor in tensors:
        if tensor.offset != expected:
            raise CorruptModelError(
                f"{path} is damaged: tensor {_text(tensor.name)!r} is at offset {tensor.offset}, "
                f"but those before it end at {expected}"
            )
        end = data_start + tensor.offset + tensor.size
        if end > file_size:
            raise CorruptModelError(
                f"{path} is truncated: tensor {_text(tensor.name)!r} ends at byte {end}, "
                f"the file has {file_size}{about_file(path)}"
            )
        expected = _aligned(tensor.offset + tensor.size, alignment)
    if file_size > data_start + expected:
        raise CorruptModelError(
            f"{path} is damaged: the last tensor ends at byte {data_start + expected}, the file "
            f"has {file_size}"
        )


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _text(name: bytes) -> str:
    return name[:MAX_SHOWN].decode("utf-8", errors="replace")


class _Cursor:
    """Walks the bytes of a file; running past the end is an error that names the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def skip(self, num_bytes: int) -> int:
        """Returns the position before the skip."""
        start = self.position
        if num_bytes > len(self.data) - start:
            raise CorruptModelError(
                f"{self.path} is truncated or damaged: byte {start} asks for {num_bytes} more, "
                f"the file has {len(self.data)}{about_file(self.path)}"
            )
        self.position += num_bytes
        return start

    def uint32(self) -> int:
        return int(struct.unpack_from("<I", self.data, self.skip(4))[0])

    def uint64(self) -> int:
        return int(struct.unpack_from("<Q", self.data, self.skip(8))[0])

    def count(self, what: str, limit: int = MAX_COUNT) -> int:
        value = self.uint64()
        if value > limit:
            raise CorruptModelError(f"{self.path} is damaged: {value} {what}, more than {limit}")
        return value

    def string(self) -> bytes:
        size = self.uint64()
        start = self.skip(size)
        return self.data[start : start + size]


def _read_head(cursor: _Cursor) -> tuple[int, int]:
    magic = cursor.data[cursor.skip(4) : 4]
    if magic != b"GGUF":
        raise CorruptModelError(
            f"{cursor.path} is no GGUF file: it starts with {magic!r}{about_file(cursor.path)}"
        )
    version = cursor.uint32()
    if version not in (2, 3):
        raise UnsupportedModelError(
            f"{cursor.path} is GGUF version {version} (or big-endian); "
            "versions 2 and 3 are supported"
        )
    return cursor.count("tensors"), cursor.count("metadata entries")


def _skip_value(cursor: _Cursor, kind: int) -> int | None:
    """Step over one value; returns it if it is a uint32."""
    if kind == _STRING:
        cursor.string()
    elif kind in _SCALAR_BYTES:
        start = cursor.skip(_SCALAR_BYTES[kind])
        if kind == _UINT32:
            return int(struct.unpack_from("<I", cursor.data, start)[0])
    else:
        raise CorruptModelError(f"{cursor.path} is damaged: unknown value type {kind}")
    return None


def _skip_array(cursor: _Cursor, most: int) -> int:
    """Step over an array; returns its length, which must be at most `most`."""
    kind = cursor.uint32()
    length = cursor.count("array elements in the metadata", most)
    if kind == _STRING:
        for _ in range(length):
            cursor.skip(cursor.uint64())
    elif kind in _SCALAR_BYTES:
        cursor.skip(length * _SCALAR_BYTES[kind])
    else:
        raise CorruptModelError(f"{cursor.path} is damaged: an array of value type {kind}")
    return length


def _read_tensor_info(cursor: _Cursor) -> _TensorInfo:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # 0.3 s, seldom needed

    name = cursor.string()
    num_dims = cursor.uint32()
    if not 1 <= num_dims <= MAX_DIMS:
        raise CorruptModelError(
            f"{cursor.path} is damaged: tensor {_text(name)!r} has {num_dims} dimensions"
        )
    dims = [cursor.count("elements in one tensor dimension") for _ in range(num_dims)]
    kind, offset = cursor.uint32(), cursor.uint64()
    try:
        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(
            f"{cursor.path}: tensor {_text(name)!r} has the unknown type {kind}; "
            "a newer `gguf` package may know it"
        ) from error
    if 0 in dims or dims[0] % block_elements:
        raise CorruptModelError(
            f"{cursor.path} is damaged: tensor {_text(name)!r} has the shape {dims}"
        )
    return _TensorInfo(name, offset, math.prod(dims) // block_elements * block_bytes)
