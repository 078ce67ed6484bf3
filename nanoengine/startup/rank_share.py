"""What one rank of several may take of the memory that settings and the machine have for all."""

from __future__ import annotations

from dataclasses import replace

from nanoengine.config.engine import EngineConfig
from nanoengine.startup.memory_plan import Memory


class MemoryShare:
    """The memory that one of `size` ranks may plan with: its part of the machine's.

    of_gpus: free and total bytes of any rank's GPU; None: ranks share the CPU's memory.
    """

    def __init__(self, device: Memory, size: int, of_gpus: tuple[int, int] | None = None) -> None:
        self._device = device
        self._size = size
        self._of_gpus = of_gpus
        self.name = device.name
        self.computes_later = device.computes_later

    def memory(self) -> tuple[int, int]:
        if self._of_gpus is not None:
            return self._of_gpus
        free, total = self._device.memory()
        return free // self._size, total // self._size

    def host_memory(self) -> int:
        return self._device.host_memory() // self._size


def memory_settings_of_a_rank(config: EngineConfig) -> EngineConfig:
    """The settings of each rank: its part of the memory."""

    def part(gib: float | None) -> float | None:
        return None if gib is None else gib / config.tensor_parallel_size

    return replace(
        config,
        kv_cache_gib=part(config.kv_cache_gib),
        kv_offload_gib=part(config.kv_offload_gib),
    )
