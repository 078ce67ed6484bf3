"""How ranks find each other: what rank 0 tells each process, and the group that they join."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from nanoengine.config.engine import EngineConfig
from nanoengine.config.model import ModelConfig, same_text
from nanoengine.devices.cpu import default_threads
from nanoengine.devices.device import Device
from nanoengine.devices.gpu import find_graphs
from nanoengine.devices.select import resolved
from nanoengine.errors import ConfigError
from nanoengine.kernels.c_build import KernelBuildError
from nanoengine.models.layer_ops import LayerOps
from nanoengine.models.shard import Shard
from nanoengine.startup.parts import ComputeParts
from nanoengine.startup.rank_share import memory_settings_of_a_rank
from nanoengine.workers.gloo_group import GlooGroup
from nanoengine.workers.group import Group
from nanoengine.workers.nccl_group import NcclGroup, check_nccl
from nanoengine.workers.sharded_ops import ShardedOps
from nanoengine.workers.shared_memory_group import SharedMemoryGroup, make_region


@dataclass(frozen=True, slots=True)
class RankSetup:
    """settings: those of an EngineConfig, but for the device. devices: of each rank. memory:
    descriptor of the memory that they share; -1: they meet in `folder`, by NCCL or gloo.
    """

    settings: dict[str, Any]
    devices: tuple[str, ...]
    memory: int = -1
    folder: str = ""

    def config(self, rank: int) -> EngineConfig:
        """The settings of one rank."""
        return EngineConfig(**{**self.settings, "device": self.devices[rank]})

    def join(self, rank: int, device: Device) -> Group:
        """Join the group; returns once all ranks have."""
        size, store = len(self.devices), Path(self.folder, "store")
        if self.memory >= 0:
            return SharedMemoryGroup(self.memory, rank, size)
        if device.name == "cpu":
            return GlooGroup(store, rank, size)
        graphs = None if self.settings["enforce_eager"] else find_graphs(device.torch_device)
        return NcclGroup(store, rank, size, device, graphs)


class MeetingPlace:
    """Where ranks meet: memory that they share, or on GPUs and without a C compiler a folder of
    ours, for NCCL or gloo.

    memory: its descriptor; -1: there is none. fds: descriptors that the processes must inherit.
    """

    def __init__(self, size: int, on_cpu: bool) -> None:
        self.memory = -1
        self.folder = ""
        self._folder: TemporaryDirectory[str] | None = None
        if on_cpu:
            with suppress(KernelBuildError):
                self.memory = make_region(size)
        if self.memory < 0:
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


def devices_of_ranks(name: str, size: int) -> tuple[str, ...]:
    """The device of each rank: the CPU for all, or a GPU for each, from the one called `name` on;
    "cuda" is the first. Raises ConfigError if there are too few.
    """
    kind, _, number = resolved(name).partition(":")
    if kind == "cpu":
        return (kind,) * size
    if kind != "cuda":
        raise ConfigError(
            f"tensor_parallel_size={size} is for CPUs and for CUDA GPUs, and the device is {kind}; "
            'set device="cpu", or leave it at 1'
        )
    first, there = int(number or 0), torch.cuda.device_count()
    if first + size > there:
        raise ConfigError(
            f"tensor_parallel_size={size} from cuda:{first} on needs {first + size} GPUs, one for "
            f"each rank, and this PyTorch sees {there}; lower it: KV that does not fit a GPU goes "
            "to RAM with enable_cpu_offload=True"
        )
    check_nccl()
    return tuple(f"cuda:{index}" for index in range(first, first + size))


def settings_of_a_rank(config: EngineConfig) -> EngineConfig:
    """The settings of each rank: its part of the threads and of the memory."""
    threads = config.num_threads or default_threads()
    num_threads = max(1, threads // config.tensor_parallel_size)
    return replace(memory_settings_of_a_rank(config), num_threads=num_threads)


def fingerprint(parts: ComputeParts) -> str:
    """What must be equal on all ranks: the model's shape and files, dtype and kernels."""
    files = sorted(
        (path.name, path.stat().st_size)
        for path in parts.folder.glob("*")
        if path.suffix in (".safetensors", ".json")
    )
    said = repr((same_text(parts.model.config), files, parts.facts.dtype, parts.facts.attention))
    return hashlib.sha256(said.encode()).hexdigest()
