"""The file that saved_prefixes.py reads and writes: its tensors, one after another, and what says
of which model and settings its KV is.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor

from nanoengine.config.engine import EngineConfig
from nanoengine.config.model import same_text
from nanoengine.devices.cache_folders import replacing
from nanoengine.errors import ConfigError
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.loading.checkpoint import header_bytes
from nanoengine.loading.lora import CONFIG, adapter_folder
from nanoengine.startup.parts import ComputeParts

FORMAT = 2  # of the file
ABOUT = "nanoengine_kv"  # the key of its metadata
SAMPLE = 1 << 12  # bytes at both ends and in the middle of a tensor, by which weights are known
SUM = 8  # bytes of a checksum
SIZES = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "U8": 1}  # bytes of a number
PART = ".part"  # the end of its name while it is written
OLD_S = 3600.0  # a part of a file that nobody has written to for so long was left by a killed run


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the file. parts: its bytes, in turn."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Iterable[Any]

    @property
    def num_bytes(self) -> int:
        """Of all parts."""
        return SIZES[self.dtype] * math.prod(self.shape)


def bytes_of(tensor: Tensor) -> Any:
    """Of a tensor on any device, in order."""
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def checksum(data: Any) -> bytes:
    """xxh3-64 of bytes."""
    return xxhash.xxh3_64_digest(data)


def file_path(given: str) -> Path:
    """The file that a setting names, a symbolic link followed. Raises ConfigError."""
    try:
        path = Path(given).expanduser().resolve()
        is_wrong = not path.parent.is_dir() or (path.exists() and not path.is_file())
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"prefix_cache_file {given} cannot be a path: {error}") from error
    if is_wrong:
        raise ConfigError(
            f"prefix_cache_file must name a file in a folder that is there, got {given}"
        )
    return path


def write_all(file: BinaryIO, identity: str, tensors: list[StoredTensor]) -> None:
    """The format of safetensors: the header, then the tensors end to end."""
    header: dict[str, Any] = {"__metadata__": {ABOUT: identity}}
    ends = [*accumulate((each.num_bytes for each in tensors), initial=0)]
    for each, *offsets in zip(tensors, ends, ends[1:], strict=False):
        header[each.name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": offsets}
    file.write(header_bytes(header))
    for part in chain.from_iterable(each.parts for each in tensors):
        file.write(part)


@contextmanager
def kept_file(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of another one when it is written whole, and its permissions; a
    new one is for this user alone, as KV tells what texts say.
    """
    _remove_old_parts(path)
    with replacing(path, PART) as file:
        yield file
        file.flush()
        if path.exists():
            os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
        os.fsync(file.fileno())


def _remove_old_parts(path: Path) -> None:
    for part in path.parent.iterdir():
        if part.name.startswith(f"{path.name}.") and part.suffix == PART:
            with suppress(OSError):
                if time.time() - part.stat().st_mtime > OLD_S:
                    part.unlink()


def identity_of(config: EngineConfig, parts: ComputeParts, spec: KVSpec) -> str:
    """What KV depends on: the model, its weights, and how its numbers are made."""
    facts = parts.facts
    said = [
        *(FORMAT, same_text(parts.model.config)),
        *(_weights(parts.folder), config.load_format == "dummy" and config.seed),
        *(str(facts.dtype), facts.attention, facts.quantization),
        *(spec.block_size, spec.layer_blocks, str(spec.dtype)),
    ]
    if config.lora is not None:
        folder = adapter_folder(config.lora)
        said += [_weights(folder), (folder / CONFIG).read_bytes()]
    return hashlib.sha256(repr(said).encode()).hexdigest()


def _weights(folder: Path) -> list[tuple[str, int, str]]:
    """Name, size and a digest of the header, and of a sample of each tensor, of each file."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = file.read(length)
            digest = hashlib.sha256(header)
            tensors = [each for name, each in json.loads(header).items() if name[:2] != "__"]
            for start, end in (each["data_offsets"] for each in tensors):
                for place in (start, (start + end) // 2, max(start, end - SAMPLE)):
                    file.seek(8 + length + place)
                    digest.update(file.read(min(SAMPLE, end - place)))
        found.append((path.name, path.stat().st_size, digest.hexdigest()))
    return found
