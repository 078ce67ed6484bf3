"""Keeps the prefix cache of an engine in a file, from one run to the next.

A safetensors file, whose metadata says which model and settings its KV is of. `tokens`, `salts` and
`parents` say of each block what it holds, the last used ones first and each behind its parent;
each layer with KV has a tensor of all blocks, as they lie in memory. `ends` says which blocks have
a snapshot of the recurrent states at their end, that used longest ago first; each of both parts of
a state has a tensor of all snapshots. `sums` are checksums: of each layer's blocks, and of each
part's snapshots.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanoengine.config.engine import EngineConfig, in_gib
from nanoengine.errors import ConfigError, shown
from nanoengine.kv.block_manager import Block, BlockKey, chain_digest
from nanoengine.kv.kv_cache import HybridKVCacheManager
from nanoengine.startup.parts import ComputeParts
from nanoengine.startup.prefix_file import (
    ABOUT,
    SUM,
    StoredTensor,
    bytes_of,
    checksum,
    file_path,
    identity_of,
    kept_file,
    write_all,
)

logger = logging.getLogger(__name__)
SALT = 32  # bytes of a block's salt, zeros without one
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
Known = frozenset[tuple[bytes, bool]]


class SavedPrefixes:
    """The file of an engine's settings; without one nothing is done."""

    def __init__(self, config: EngineConfig, parts: ComputeParts, kv: HybridKVCacheManager) -> None:
        """Reads the file, if it is there: after the speed was measured, which writes KV. Raises
        ConfigError for a model, or with settings, whose KV no file holds.
        """
        self._kv, self._known, self._path = kv, Known(), None
        if config.prefix_cache_file is None:
            return
        if kv.spec.host_codec is not None:
            raise ConfigError(
                "prefix_cache_file holds KV as the device has it, and kv_offload_dtype is "
                f"{shown(config.kv_offload_dtype)}; leave one of them out"
            )
        self._path = path = file_path(config.prefix_cache_file)
        self._identity = identity_of(config, parts, kv.spec)
        if path.exists():
            self._read(path)

    # -- reading -----------------------------------------------------------------------------------

    def _read(self, path: Path) -> None:
        """Publish as many blocks as there is room for. Raises ConfigError for a file of another
        model or other settings, or a damaged one.
        """
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                is_ours = (file.metadata() or {}).get(ABOUT) == self._identity
                blocks, count = self._taken(file) if is_ours else ([], 0)
        except OSError as error:
            raise ConfigError(f"prefix_cache_file {path} cannot be read: {error}") from error
        except (SafetensorError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(
                f"prefix_cache_file {path} is damaged ({str(error)[:200]}); remove it"
            ) from error
        if not is_ours:
            raise ConfigError(
                f"prefix_cache_file {path} holds KV of another model or of other settings; give "
                "another path, or remove it"
            )
        for block in reversed(blocks):  # the last used ones last
            self._kv.blocks.release(block)
        self._known = self._told(blocks)
        size = self._kv.spec.block_size
        logger.info("%s: KV of %d tokens", path, len(blocks) * size)
        if len(blocks) < count:
            logger.warning(
                "prefix_cache_file %s has KV of %d tokens, and there is room for %d: the rest is "
                "forgotten when the file is written; raise kv_cache_gib or kv_offload_gib",
                *(path, count * size, len(blocks) * size),
            )

    def _taken(self, file: Any) -> tuple[list[Block], int]:
        """Blocks with what the file has of them, to which this holds references; and how many the
        file has. Raises ValueError.
        """
        keys, places = self._keys(file)
        sums, memory, count = file.get_tensor("sums"), self._kv.memory, len(keys)
        ends = file.get_tensor("ends")
        num_sums = count * len(memory.pool) + len(ends) * len(memory.snapshots)
        if sums.dtype != torch.uint8 or tuple(sums.shape) != (num_sums, SUM):
            raise ValueError("its checksums have another shape")
        blocks = self._allocate(keys, places)
        for layer, pool in enumerate(memory.pool):
            stored = file.get_slice(f"layer.{layer}")
            self._fill(layer, pool, stored, blocks, sums[layer * count :])
        self._take_states(file, blocks, ends, sums[len(memory.pool) * count :])
        return blocks, count

    def _told(self, blocks: Iterable[Block]) -> Known:
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
        dtypes = tokens.dtype, salts.dtype, parents.dtype
        if shapes != wanted or dtypes != (torch.int32, torch.uint8, torch.int32):
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

    def _fill(
        self, layer: int, pool: Tensor, stored: Any, blocks: list[Block], sums: Tensor
    ) -> None:
        slots = [block.device_slot for block in blocks if block.device_slot is not None]
        self._kv.memory.before_write(layer, slots)
        for index, block in enumerate(blocks):
            self._place(layer, pool, block).copy_(_checked(stored[index], sums[index]))

    def _take_states(self, file: Any, blocks: list[Block], ends: Tensor, sums: Tensor) -> None:
        """The snapshots of states at the ends of these blocks. Raises ValueError."""
        memory, snapshots = self._kv.memory, self._kv.states.snapshots
        stored = [file.get_slice(f"state.{part}") for part in range(len(memory.snapshots))]
        shapes = [(len(ends), *snapshot.shape[1:]) for snapshot in memory.snapshots]
        if ends.dtype != torch.int32 or [tuple(each.get_shape()) for each in stored] != shapes:
            raise ValueError("its states have other shapes")
        for number, index in enumerate(ends.tolist() if self._kv.spec.num_snapshots else ()):
            if index < 0:
                raise ValueError("a state is of no block")
            if index < len(blocks):  # others found no room
                place = snapshots.add(blocks[index])
                for part, (snapshot, state) in enumerate(
                    zip(memory.snapshots, stored, strict=True)
                ):
                    whole = sums[part * len(ends) + number]
                    snapshot[place].copy_(_checked(state[number], whole))

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
        if self._known == told:
            return
        try:
            self._kv.memory.device.synchronize()
            with kept_file(self._path) as file:
                write_all(file, self._identity, list(self._tensors(blocks)))
            size = in_gib(self._path.stat().st_size)
        except (OSError, RuntimeError) as error:
            logger.warning("prefix_cache_file %s was not written: %s", self._path, error)
            return
        self._known = told
        num_tokens = len(blocks) * self._kv.spec.block_size
        logger.info("%s: KV of %d tokens, %s", self._path, num_tokens, size)

    def _tensors(self, blocks: list[Block]) -> Iterator[StoredTensor]:
        spec, count, memory = self._kv.spec, len(blocks), self._kv.memory
        end, index = 4 * spec.block_size, {block: number for number, block in enumerate(blocks)}
        tokens = [block.key.tokens for block in blocks if block.key]
        parents = [-1 if block.parent is None else index[block.parent] for block in blocks]
        yield StoredTensor("tokens", "I32", (count, spec.block_size), [t[:end] for t in tokens])
        salts = [each[end:].ljust(SALT, b"\0") for each in tokens]
        yield StoredTensor("salts", "U8", (count, SALT), salts)
        yield StoredTensor("parents", "I32", (count,), [struct.pack(f"<{count}i", *parents)])
        found = self._kv.states.snapshots.places
        ends = [(index[block], place) for block, place in found.items() if block in index]
        numbers = struct.pack(f"<{len(ends)}i", *(number for number, _ in ends))
        yield StoredTensor("ends", "I32", (len(ends),), [numbers])
        sums: list[bytes] = []  # of what was written before
        for layer, (shape, pool) in enumerate(zip(spec.layer_blocks, memory.pool, strict=True)):
            held = map(partial(self._place, layer, pool), blocks)
            name, dtype = f"layer.{layer}", DTYPES[spec.dtype]
            yield StoredTensor(name, dtype, (count, *shape), _summed(held, sums))
        for part, snapshot in enumerate(memory.snapshots):
            shape_of_all = (len(ends), *snapshot.shape[1:])
            states = [snapshot[place] for _, place in ends]
            name, dtype = f"state.{part}", DTYPES[snapshot.dtype]
            yield StoredTensor(name, dtype, shape_of_all, _summed(states, sums))
        num_sums = count * len(memory.pool) + len(ends) * len(memory.snapshots)
        yield StoredTensor("sums", "U8", (num_sums, SUM), sums)


def _summed(tensors: Iterable[Tensor], sums: list[bytes]) -> Iterator[Any]:
    """The bytes of each; its checksum goes to `sums`."""
    for tensor in tensors:
        data = bytes_of(tensor)
        sums.append(checksum(data))
        yield data


def _checked(tensor: Tensor, wanted: Tensor) -> Tensor:
    """The tensor, which has this checksum. Raises ValueError."""
    if checksum(bytes_of(tensor)) != wanted.numpy().tobytes():
        raise ValueError("a checksum is wrong")
    return tensor


def _parents_first(cached: Any) -> Iterator[Block]:
    """Published blocks that a lookup reaches, the last used first, but each behind its parent."""
    reached: dict[Block, bool] = {}
    for block in reversed(cached):
        chain, above = list[Block](), block
        while above is not None and above not in reached:
            chain.append(above)
            above = above.parent
        is_reached = above is None or reached[above]
        for each in reversed(chain):
            is_reached = reached[each] = is_reached and each.key is not None
            if is_reached:
                yield each
