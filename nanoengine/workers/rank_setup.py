"""How ranks find each other: what rank 0 tells each process, and the group that they join."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanoengine.config.engine import EngineConfig
from nanoengine.config.model import ModelConfig
from nanoengine.devices.cpu import default_threads
from nanoengine.kernels.c_build import KernelBuildError
from nanoengine.models.layer_ops import LayerOps
from nanoengine.models.shard import Shard
from nanoengine.startup.parts import ComputeParts
from nanoengine.workers.gloo_group import GlooGroup
from nanoengine.workers.group import Group
from nanoengine.workers.sharded_ops import ShardedOps
from nanoengine.workers.shared_memory_group import SharedMemoryGroup, make_region


@dataclass(frozen=True, slots=True)
class RankSetup:
    """settings: those of an EngineConfig. size: number of ranks. memory: descriptor of the memory
    that they share; -1: they meet in `folder` by gloo.
    """

    settings: dict[str, Any]
    size: int
    memory: int = -1
    folder: str = ""

    def join(self, rank: int) -> Group:
        """Join the group; returns once all ranks have."""
        if self.memory >= 0:
            return SharedMemoryGroup(self.memory, rank, self.size)
        return GlooGroup(Path(self.folder, "store"), rank, self.size)


class MeetingPlace:
    """Where ranks meet: memory that they share, or without a C compiler a folder of ours, for gloo.

    memory: its descriptor; -1: there is none. fds: descriptors that the processes must inherit.
    """

    def __init__(self, size: int) -> None:
        self.memory = -1
        self.folder = ""
        self._folder: TemporaryDirectory[str] | None = None
        try:
            self.memory = make_region(size)
        except KernelBuildError:
            self._folder = TemporaryDirectory(prefix="nanoengine-")
            self.folder = self._folder.name
        self.fds = [] if self.memory < 0 else [self.memory]

    def close(self) -> None:
        """Release it, once all ranks have joined; twice is fine."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []
        if self._folder is not None:
            self._folder.cleanup()


class RankSharding:
    """How a rank divides the model (models.shard.Sharding)."""

    def __init__(self, rank: int, group: Group) -> None:
        self.shard = Shard(rank, group.size)
        self._group = group
        self.tape = group.tape

    def sharded(self, ops: LayerOps, model: ModelConfig) -> LayerOps:
        return ShardedOps(ops, self.shard, self._group, model)


def settings_of_a_rank(config: EngineConfig) -> EngineConfig:
    """The settings of each rank: its part of the threads and of the memory."""
    size = config.tensor_parallel_size

    def part(gib: float | None) -> float | None:
        return None if gib is None else gib / size

    threads = config.num_threads or default_threads()
    return replace(
        config,
        num_threads=max(1, threads // size),
        kv_cache_gib=part(config.kv_cache_gib),
        kv_offload_gib=part(config.kv_offload_gib),
    )


def fingerprint(parts: ComputeParts) -> str:
    """What must be equal on all ranks: the model's shape and files, dtype and kernels."""
    files = sorted(
        (path.name, path.stat().st_size)
        for path in parts.folder.glob("*")
        if path.suffix in (".safetensors", ".json")
    )
    said = repr((parts.model.config, files, parts.facts.dtype, parts.facts.attention))
    return hashlib.sha256(said.encode()).hexdigest()
