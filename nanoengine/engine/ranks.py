"""Ranks: the processes that compute one model together. This one is the first, and the only one
unless tensor_parallel_size asks for more.
"""

from __future__ import annotations

from typing import Protocol

from nanoengine.config.engine import EngineConfig
from nanoengine.devices.device import Device
from nanoengine.kv.kv_memory import KVMemory
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.startup.memory_plan import Memory
from nanoengine.startup.parts import Parts, load_parts, usable_settings
from nanoengine.startup.probe import measure_copy


class Ranks(Protocol):
    """The ranks as the engine sees them. config: of each rank; after load() it fits the model."""

    @property
    def config(self) -> EngineConfig: ...
    def load(self, device: Device) -> Parts:
        """Load the model, its part on each rank. Raises ConfigError, ModelLoadError."""
        ...

    def share_of(self, device: Device) -> Memory:
        """The memory of `device` that one rank may plan with."""
        ...

    def make_memory(self, spec: KVSpec, device: Device, debug: bool) -> KVMemory:
        """Make the KV memory of every rank; returns this one's."""
        ...

    def link_speeds(self, memory: KVMemory) -> list[float]:
        """GB/s from host memory to the ring of each rank, measured at once; memory: this one's."""
        ...

    def abort(self) -> None:
        """End a step that waits for another rank, and with it the group; from any thread."""
        ...

    def close(self) -> None:
        """End the other processes."""
        ...


class OneRank:
    """This process alone."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def load(self, device: Device) -> Parts:
        parts = load_parts(self.config, device)
        self.config = usable_settings(self.config, parts, device)
        if parts.facts.is_invariant:
            device.follow_free_cores()
        return parts

    def share_of(self, device: Device) -> Memory:
        return device

    def make_memory(self, spec: KVSpec, device: Device, debug: bool) -> KVMemory:
        return KVMemory(spec, device, debug)

    def link_speeds(self, memory: KVMemory) -> list[float]:
        return [measure_copy(memory)]

    def abort(self) -> None:
        """No step waits for another rank."""

    def close(self) -> None:
        """There is no other process."""


def start_ranks(config: EngineConfig) -> Ranks:
    """Start the processes that the settings ask for."""
    if config.tensor_parallel_size == 1:
        return OneRank(config)
    from nanoengine.workers.leading_rank import LeadingRank  # one process does without it

    return LeadingRank(config)
