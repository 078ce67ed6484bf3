"""Keeps the prefix cache of an engine in a file, from one run to the next.

A safetensors file, whose metadata says which model and settings its KV is of. `tokens`, `salts` and
`parents` say of each block what it holds, the last used ones first and each behind its parent;
each layer with KV has a tensor of all blocks, as they lie in memory. `ends` says which blocks have
a snapshot of the recurrent states at their end, that used longest ago first; each of both parts of
a state has a tensor of all snapshots.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanoengine.config.engine import EngineConfig, in_gib
from nanoengine.errors import ConfigError, shown
from nanoengine.kv.block_manager import Block, BlockKey, chain_digest
from nanoengine.kv.kv_cache import HybridKVCacheManager
from nanoengine.loading.find_model import given_path
from nanoengine.startup.parts import ComputeParts

logger = logging.getLogger(__name__)
FORMAT = 1  # of the file
ABOUT = "nanoengine_kv"  # the key of its metadata
SAMPLE = 1 << 20  # bytes at both ends of a file of weights, by which it is known
SALT = 32  # bytes of a block's salt, zeros without one
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
SIZES = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "U8": 1}  # bytes of a number


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of the file. parts: its bytes, in turn."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Iterable[Any]

    @property
    def num_bytes(self) -> int:
        return SIZES[self.dtype] * math.prod(self.shape)


class SavedPrefixes:
    """The file of an engine's settings; without one nothing is done."""

    def __init__(self, config: EngineConfig, parts: ComputeParts, kv: HybridKVCacheManager) -> None:
        """Reads the file, if it is there: after the speed was measured, which writes KV. Raises
        ConfigError for a model, or with settings, whose KV no file holds.
        """
        self._path = config.prefix_cache_file and Path(config.prefix_cache_file).expanduser()
        self._kv, self._known = kv, frozenset[tuple[bytes, bool]]()
        if not self._path:
            return
        if kv.spec.host_codec is not None:
            raise ConfigError(
                "prefix_cache_file holds KV as the device has it, and kv_offload_dtype is "
                f"{shown(config.kv_offload_dtype)}; leave one of them out"
            )
        if not self._path.absolute().parent.is_dir() or self._path.is_dir():
            raise ConfigError(
                f"prefix_cache_file must name a file in a folder that is there, got {self._path}"
            )
        self._identity = _identity(config, parts, kv)
        if self._path.exists():
            self._read(self._path)

    # -- reading -----------------------------------------------------------------------------------

    def _read(self, path: Path) -> None:
        """Publish as many blocks as there is room for. Raises ConfigError for a file of another
        model or other settings, or a damaged one.
        """
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                about = file.metadata() or {}
                if about.get(ABOUT) != self._identity:
                    raise ConfigError(
                        f"prefix_cache_file {path} holds KV of another model or of other settings; "
                        "give another path, or remove it"
                    )
                blocks = self._allocate(*self._keys(file))
                for layer, pool in enumerate(self._kv.memory.pool):
                    self._fill(layer, pool, file.get_slice(f"layer.{layer}"), blocks)
                self._take_states(file, blocks)
        except (SafetensorError, OSError, KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"prefix_cache_file {path} is damaged ({str(error)[:200]}); remove it"
            ) from error
        size, manager = self._kv.spec.block_size, self._kv.blocks
        for block in reversed(blocks):  # the last used ones last
            manager.release(block)
        self._known = self._told(blocks)
        logger.info("%s: KV of %d tokens", path, len(blocks) * size)

    def _told(self, blocks: Iterable[Block]) -> frozenset[tuple[bytes, bool]]:
        """Which blocks these are, and whether they have a snapshot."""
        places = self._kv.states.snapshots.places
        return frozenset((each.key.digest, each in places) for each in blocks if each.key)

    def _keys(self, file: Any) -> tuple[list[BlockKey], list[int]]:
        """What each block holds, and the places of their parents; -1: it begins a text. Raises
        ValueError.
        """
        tokens, salts, parents = (file.get_tensor(n) for n in ("tokens", "salts", "parents"))
        spec, count = self._kv.spec, len(parents)
        shapes = [tuple(each.shape) for each in (tokens, salts, parents)]
        shapes += [tuple(file.get_slice(f"layer.{i}").get_shape()) for i in range(spec.num_layers)]
        wanted = [(count, spec.block_size), (count, SALT), (count,)]
        wanted += [(count, *block) for block in spec.layer_blocks]
        if shapes != wanted or (tokens.dtype, parents.dtype) != (torch.int32, torch.int32):
            raise ValueError("its tensors have other shapes")
        keys: list[BlockKey] = []
        places: list[int] = parents.tolist()
        for index, (row, salt, place) in enumerate(zip(tokens, salts, places, strict=True)):
            if not -1 <= place < index:
                raise ValueError("a block comes before its parent")
            held = row.numpy().tobytes() + (salt.numpy().tobytes() if salt.any() else b"")
            keys.append(
                BlockKey(chain_digest(keys[place].digest if place >= 0 else b"", held), held)
            )
        return keys, places

    def _allocate(self, keys: list[BlockKey], places: list[int]) -> list[Block]:
        """Published blocks with slots, which this holds references to: the first ones that fit."""
        manager, size, blocks = self._kv.blocks, self._kv.spec.block_size, list[Block]()
        num_host = max(0, manager.host.num_free - self._kv.spec.spare_blocks)
        room = min(manager.device.num_free + num_host, manager.num_available)
        for key, place in zip(keys[:room], places, strict=False):
            block = manager.allocate()
            blocks.append(block)
            block.device_slot, block.num_tokens = manager.device.allocate(), size
            if block.device_slot is None:
                block.host_slot, block.host_len = manager.host.allocate(), size
            manager.publish(block, blocks[place] if place >= 0 else None, key)
        return blocks

    def _fill(self, layer: int, pool: Tensor, stored: Any, blocks: list[Block]) -> None:
        slots = [block.device_slot for block in blocks if block.device_slot is not None]
        self._kv.memory.before_write(layer, slots)
        for index, block in enumerate(blocks):
            self._place(layer, pool, block).copy_(stored[index])

    def _take_states(self, file: Any, blocks: list[Block]) -> None:
        """The snapshots of states at the ends of these blocks. Raises ValueError."""
        memory, snapshots = self._kv.memory, self._kv.states.snapshots
        ends = file.get_tensor("ends")
        stored = [file.get_slice(f"state.{part}") for part in range(len(memory.snapshots))]
        shapes = [(len(ends), *snapshot.shape[1:]) for snapshot in memory.snapshots]
        if ends.dtype != torch.int32 or [tuple(each.get_shape()) for each in stored] != shapes:
            raise ValueError("its states have other shapes")
        for number, index in enumerate(ends.tolist() if self._kv.spec.num_snapshots else ()):
            if index < 0:
                raise ValueError("a state is of no block")
            if index < len(blocks):  # others found no room
                place = snapshots.add(blocks[index])
                for snapshot, state in zip(memory.snapshots, stored, strict=True):
                    snapshot[place].copy_(state[number])

    def _place(self, layer: int, pool: Tensor, block: Block) -> Tensor:
        """One layer of a block, on the device if it is there."""
        if block.device_slot is not None:
            return pool[block.device_slot]
        assert block.host_slot is not None and self._kv.memory.offload is not None
        return self._kv.memory.offload.host.block(layer, block.host_slot)

    # -- writing -----------------------------------------------------------------------------------

    def write(self) -> None:
        """Write what is cached, if that is not in the file already; no request may be running. A
        warning says what failed.
        """
        if not self._path or not self._kv.blocks.is_whole:
            return
        blocks = list(_parents_first(self._kv.blocks.cached))
        told = self._told(blocks)
        if self._known >= told:
            return
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        try:
            self._kv.memory.device.synchronize()
            with part.open("wb") as file:
                _write_all(file, self._identity, list(self._tensors(blocks)))
            os.replace(part, self._path)
        except (OSError, RuntimeError) as error:
            logger.warning("prefix_cache_file %s was not written: %s", self._path, error)
            return
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)
        self._known = told
        size = in_gib(self._path.stat().st_size)
        logger.info(
            "%s: KV of %d tokens, %s", self._path, len(blocks) * self._kv.spec.block_size, size
        )

    def _tensors(self, blocks: list[Block]) -> Iterator[_Stored]:
        spec, count, memory = self._kv.spec, len(blocks), self._kv.memory
        end, index = 4 * spec.block_size, {block: number for number, block in enumerate(blocks)}
        tokens = [block.key.tokens for block in blocks if block.key]
        parents = [-1 if block.parent is None else index[block.parent] for block in blocks]
        yield _Stored("tokens", "I32", (count, spec.block_size), [each[:end] for each in tokens])
        salts = [each[end:].ljust(SALT, b"\0") for each in tokens]
        yield _Stored("salts", "U8", (count, SALT), salts)
        yield _Stored("parents", "I32", (count,), [struct.pack(f"<{count}i", *parents)])
        for layer, (shape, pool) in enumerate(zip(spec.layer_blocks, memory.pool, strict=True)):
            held = map(partial(self._place, layer, pool), blocks)
            dtype = DTYPES[spec.dtype]
            yield _Stored(f"layer.{layer}", dtype, (count, *shape), map(_bytes, held))
        found = self._kv.states.snapshots.places
        ends = [(index[block], place) for block, place in found.items() if block in index]
        numbers = struct.pack(f"<{len(ends)}i", *(number for number, _ in ends))
        yield _Stored("ends", "I32", (len(ends),), [numbers])
        for part, snapshot in enumerate(memory.snapshots):
            shape = (len(ends), *snapshot.shape[1:])
            states = [snapshot[place] for _, place in ends]
            yield _Stored(f"state.{part}", DTYPES[snapshot.dtype], shape, map(_bytes, states))


def _bytes(tensor: Tensor) -> Any:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _write_all(file: BinaryIO, identity: str, tensors: list[_Stored]) -> None:
    """The format of safetensors: uint64 header length, JSON header, then the tensors end to end."""
    header: dict[str, Any] = {"__metadata__": {ABOUT: identity}}
    ends = [*accumulate((each.num_bytes for each in tensors), initial=0)]
    for each, *offsets in zip(tensors, ends, ends[1:], strict=False):
        header[each.name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": offsets}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(struct.pack("<Q", len(encoded)) + encoded)
    for part in chain.from_iterable(each.parts for each in tensors):
        file.write(part)


def _parents_first(cached: Any) -> Iterator[Block]:
    """Published blocks that a lookup reaches, the last used first, but each behind its parent."""
    seen = set[Block]()
    for block in reversed(cached):
        chain = list[Block]()
        above: Block | None = block
        while above is not None and above not in seen:
            chain.append(above)
            above = above.parent
        if all(each.key is not None for each in chain):
            seen.update(chain)
            yield from reversed(chain)


def _identity(config: EngineConfig, parts: ComputeParts, kv: HybridKVCacheManager) -> str:
    """What KV depends on: the model, its weights, and how its numbers are made."""
    spec, facts = kv.spec, parts.facts
    folders = [parts.folder, *([given_path(config.lora)] if config.lora else [])]
    said = [
        *(FORMAT, json.dumps(asdict(parts.model.config), default=_in_order)),
        *(_weights(folder) for folder in folders),
        *(str(facts.dtype), facts.attention, facts.quantization, facts.source),
        *(spec.block_size, spec.layer_blocks, str(spec.dtype), config.load_format, config.seed),
    ]
    return hashlib.sha256(repr(said).encode()).hexdigest()


def _in_order(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset) else repr(value)


def _weights(folder: Path) -> list[tuple[str, int, str]]:
    """Name, size and a digest of both ends of each file of weights."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            ends = file.read(SAMPLE)
            file.seek(max(0, size - SAMPLE))
            ends += file.read(SAMPLE)
        found.append((path.name, size, hashlib.sha256(ends).hexdigest()))
    return found
