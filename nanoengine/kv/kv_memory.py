"""KVMemory: the tensors of the KV cache. The device pool and, with a host tier, an OffloadEngine.

Knows slots; which sequence holds which slot is the KV manager's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoengine.devices.device import Device
from nanoengine.errors import OutOfMemoryError
from nanoengine.kv.host_pool import blocks_by_layer, numbers_of_blocks
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.kv.offload import OffloadEngine, TransferRun, slot_keys
from nanoengine.kv.step_plan import StepTransfers
from nanoengine.kv.transfers import FailedTransfer, TransferCounters


@dataclass(frozen=True, slots=True)
class LayerPool:
    """The device pool of one layer in its two shapes, made once: a view costs more than a small
    kernel.

    blocks: its parts, each [device_blocks, block_size, kv_heads, head_dim]; rows: all, flattened to
    [device_blocks x parts x block_size, kv_heads, head_dim].
    """

    blocks: tuple[Tensor, ...]
    rows: Tensor

    @classmethod
    def of(cls, blocks: Tensor) -> LayerPool:
        """blocks: [device_blocks, parts, block_size, kv_heads, head_dim]."""
        return cls(blocks.unbind(1), blocks.flatten(0, 2))


class KVMemory:
    """Owns the device pool: of each layer [device_blocks, parts, block_size, kv_heads, head_dim],
    all in one piece of memory.

    parts, sources: as in KVSpec. offload: None without a host tier. states: of each recurrent
    layer, as in RecurrentState. snapshots: of both its parts, [places, layers, *shape].
    """

    def __init__(self, spec: KVSpec, device: Device, debug: bool = False) -> None:
        """debug: memory that holds no KV is filled with NaN. Raises OutOfMemoryError."""
        self.device = device
        self.block_size, self.parts = spec.block_size, spec.parts
        self.sources = spec.layer_sources
        self.is_debugged = debug
        shapes = spec.layer_blocks
        try:
            count = numbers_of_blocks(spec.num_blocks, shapes)
            whole = torch.empty(count, dtype=spec.dtype, device=device.torch_device)
            if debug:
                whole.fill_(torch.nan)
            self.pool = blocks_by_layer(whole, spec.num_blocks, shapes)
            self.states = self._make_states(spec)
            self.offload: OffloadEngine | None = None
            if spec.num_host_blocks:
                self.offload = OffloadEngine(device, self.pool, spec, debug)
        except (RuntimeError, MemoryError, OSError) as error:  # OSError: of mmap
            snapshots = spec.num_snapshots * spec.bytes_of_a_state
            on_device = spec.block_bytes * spec.num_blocks + spec.state_bytes
            on_host = spec.host_block_bytes * spec.num_host_blocks + snapshots
            what = " and snapshots of recurrent states" if snapshots else ""
            less = ", or set enable_prefix_caching=False" if snapshots else ""
            raise OutOfMemoryError(
                f"{spec.num_blocks} device and {spec.num_host_blocks} host KV blocks{what} need "
                f"{(on_device + on_host) / (1 << 30):.2f} GiB, which could not be allocated; lower "
                f"kv_cache_gib, num_gpu_blocks or kv_offload_gib{less}"
            ) from error
        self.layers = [LayerPool.of(blocks) for blocks in self.pool]
        self._no_transfers = TransferCounters()

    def _make_states(self, spec: KVSpec) -> list[tuple[Tensor, Tensor]]:
        """What a slot holds is read after its first write alone; padding rows read the last one."""
        recurrent, num_slots = spec.recurrent, spec.num_state_slots + 1
        self.snapshots: list[Tensor] = []
        if recurrent is None:
            return []
        inputs, memory = recurrent.state_shapes
        kinds = ((inputs, spec.dtype), (memory, torch.float32))
        num = len(recurrent.layers)
        self.snapshots = [
            self.device.empty_host((spec.num_snapshots, num, *shape), dtype)
            for shape, dtype in kinds
        ]
        self._states = [
            torch.empty((num, num_slots, *shape), dtype=dtype, device=self.device.torch_device)
            for shape, dtype in kinds
        ]
        for state in self._states:
            if self.is_debugged:
                state.fill_(torch.nan)
            state[:, -1] = 0
        return list(zip(*self._states, strict=True))

    def save_state(self, slot: int, place: int) -> None:
        """Copy the recurrent state in a slot to a snapshot, behind what compute has been given."""
        for state, snapshot in zip(self._states, self.snapshots, strict=True):
            snapshot[place].copy_(state[:, slot], non_blocking=True)

    def load_state(self, place: int, slot: int) -> None:
        """Copy a snapshot to a slot, behind what compute has been given."""
        for state, snapshot in zip(self._states, self.snapshots, strict=True):
            state[:, slot].copy_(snapshot[place], non_blocking=True)

    def copy_state(self, source: int, target: int) -> None:
        """Copy the recurrent state in a slot to another one, behind what compute has been given."""
        for state in self._states:
            state[:, target].copy_(state[:, source])

    @property
    def counters(self) -> TransferCounters:
        """Bytes moved between the tiers so far."""
        return self.offload.counters if self.offload else self._no_transfers

    def allocate_rest(self) -> None:
        """Let the host pool's memory be allocated, all of it."""
        if self.offload:
            self.offload.host.allocate_rest()

    def reset_counters(self) -> None:
        """Forget what was counted so far."""
        if self.offload:
            self.offload.counters = TransferCounters()

    def start(self, transfers: StepTransfers) -> TransferRun | None:
        """Queue a step's copies between the tiers; None without a host tier."""
        return TransferRun(self.offload, transfers) if self.offload else None

    def before_write(self, layer: int, slots: Sequence[int]) -> None:
        """Compute is about to write these device slots of a layer."""
        compute = self.device.compute
        if self.offload:
            self.offload.stored.wait(compute, layer, device_slots=slots)
        self.device.declare(compute, writes=slot_keys("device", layer, slots))

    def before_read(self, layer: int, slots: Sequence[int]) -> None:
        """Compute is about to read these device slots of a layer."""
        self.device.declare(self.device.compute, reads=slot_keys("device", layer, slots))

    def copy_block(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens of a device slot to another one, all layers, behind
        what compute has been given so far.
        """
        for layer, pool in enumerate(self.pool):
            self.before_read(layer, (source,))
            self.before_write(layer, (target,))
            pool[target, :, :num_tokens] = pool[source, :, :num_tokens]

    def poison(self, device_slot: int | None, host_slot: int | None) -> None:
        """Fill freed slots with NaN (debug only), once nothing reads them any more."""
        if not self.is_debugged:
            return
        if device_slot is not None:
            for layer, pool in enumerate(self.pool):
                self.before_write(layer, (device_slot,))
                self.device.compute.fill(pool[device_slot], torch.nan)
        if host_slot is not None and self.offload:
            self.offload.poison(host_slot)

    def poison_all(self) -> None:
        """Fill everything with NaN (debug only); nothing may be in use or under way."""
        if self.is_debugged:
            for pool in self.pool:
                pool.fill_(torch.nan)
            if self.offload:
                self.offload.poison_all()

    def take_failures(self) -> list[FailedTransfer]:
        """The transfers that failed since the last call."""
        return self.offload.take_failures() if self.offload else []

    def close(self) -> None:
        """Let queued copies end, then drop the pools."""
        self.device.close_streams()
        if self.offload:
            self.offload.close()
        self.layers.clear()
        self.pool = []
