"""OffloadEngine: moves KV between the device pool, the host pool and the ring. Knows slots, no
sequences.

A step's transfers are known before it starts. Stores (device to host) run on one stream; loads and
fills (host to device) on another, in the order in which compute needs them, `ring_slots` fills
ahead and across layers. Nobody waits for anything but events:

    a store waits for the compute that wrote the block, and a new writer of the slot for the store;
    a load or fill waits for the store that wrote its host slot;
    compute waits for a fill before it reads it ("filled"), the next fill for that read ("drained").

With a codec host blocks are as it encodes them: each store encodes, each load and fill decodes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from nanoengine.devices.copy_streams import Convert, Event
from nanoengine.devices.device import Device
from nanoengine.kv.host_pool import HostPool
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.kv.ring import Ring
from nanoengine.kv.step_plan import StepTransfers, Store, store_runs
from nanoengine.kv.transfers import FailedTransfer, Fill, StoreEvents, TransferCounters


class OffloadEngine:
    """Owns the host pool, the ring and the copy streams. loaded_bytes: for each layer, the bytes
    that a load of one token copies over the link.
    """

    def __init__(
        self, device: Device, device_pool: Sequence[Tensor], spec: KVSpec, debug: bool = False
    ) -> None:
        """device_pool: for each layer, [device_blocks, parts, block_size, kv_heads, head_dim].

        debug: memory that holds no KV is filled with NaN.
        """
        blocks, codec = spec.layer_blocks, spec.host_codec
        self.device = device
        self.sources = spec.layer_sources
        self._pool = device_pool
        self._block_size = spec.block_size
        self.codec = codec
        self._encode: Convert | None = codec.encode if codec else None
        self._decode: Convert | None = codec.decode if codec else None
        host_blocks = [codec.host_block(b) if codec else b for b in blocks]
        host_dtype = codec.dtype if codec else spec.dtype
        # Bytes of a token in each layer: those that a store writes, those that a load reads.
        stored = [math.prod((b[0], *b[2:])) * host_dtype.itemsize for b in host_blocks]
        self.loaded_bytes = [b[0] * codec.read_bytes(*b[2:]) for b in blocks] if codec else stored
        self._stored_bytes = sum(stored)
        self._host_poison = codec.poison if codec else torch.nan
        self.host = HostPool(device, spec.num_host_blocks, host_blocks, host_dtype)
        self.ring = Ring(device_pool, spec.ring_slots, spec.slot_blocks)
        self.slot_blocks = spec.slot_blocks
        self.counters = TransferCounters()
        self.stored = StoreEvents()
        self._drained: list[Event | None] = [None] * spec.ring_slots
        self._debug = debug
        self.poison_all()

    def poison_all(self) -> None:
        """Fill the ring and the host pool with NaN (debug only); nothing may be under way."""
        if self._debug:
            self.ring.poison()
            self.host.fill(self._host_poison)

    def poison(self, host_slot: int) -> None:
        """Fill a freed host slot with NaN, behind what compute has been given so far."""
        d2h = self.device.d2h
        d2h.wait(self.device.compute.record())
        for layer in range(self.host.num_layers):
            self.device.declare(d2h, writes=slot_keys("host", layer, (host_slot,)))
            d2h.fill(self.host.block(layer, host_slot), self._host_poison)
        self.stored.host[host_slot] = [d2h.record()] * self.host.num_layers

    def take_failures(self) -> list[FailedTransfer]:
        """Transfers that failed since the last call, among them all that compute has waited for."""
        failures = []
        for stream, lost in ((self.device.d2h, True), (self.device.h2d, False)):
            for failed in stream.take_failed():
                assert isinstance(failed.owner, tuple)
                failures.append(FailedTransfer(failed.owner, lost, str(failed.error)))
        return failures

    def close(self) -> None:
        """Drop the pools; the device's streams must be closed."""
        self.host.close()
        self.ring.close()
        self._pool = ()

    def are_stored(
        self, device_slots: Iterable[int], on_host: Iterable[tuple[int, Sequence[int]]]
    ) -> bool:
        """Whether no store is under way that reads these device slots, or that writes these
        (segment, places) of the host pool.
        """
        slots = (slot for segment, places in on_host for slot in self.host.slots(segment, places))
        return self.stored.are_done(device_slots, slots)

    def fetch(self, dst: Tensor, src: Tensor, owner: object = None) -> None:
        """Queue a copy of host blocks of a layer to device memory."""
        self.device.h2d.copy(dst, src, owner, self._decode)

    # -- used by TransferRun ---------------------------------------------------------------------

    def queue_stores(self, transfers: StepTransfers) -> None:
        """Queue all stores of a step, layer by layer, behind the work that compute has so far."""
        stores = transfers.stores
        if not stores:
            return
        d2h = self.device.d2h
        d2h.wait(self.device.compute.record())
        events: list[Event] = []
        runs = store_runs(stores, self._block_size)
        for layer in range(len(self._pool)):
            for run in runs:
                self._queue_run(layer, run, transfers)
            events.append(d2h.record())
        for s in stores:
            self.stored.device[s.device_slot] = events
            self.stored.host[s.host_slot] = events
            self.counters.d2h_bytes += self._stored_bytes * (s.stop - s.start)

    def _queue_run(self, layer: int, run: Sequence[Store], transfers: StepTransfers) -> None:
        """Queue the stores of a run in one layer: whole blocks as one copy in each segment."""
        d2h, first = self.device.d2h, run[0]
        device_slots, host_slots = [s.device_slot for s in run], [s.host_slot for s in run]
        self.device.declare(
            d2h,
            reads=slot_keys("device", layer, device_slots),
            writes=slot_keys("host", layer, host_slots),
        )
        ids = tuple(transfers.block_ids.get(slot) for slot in host_slots)
        if len(run) == 1:
            host = self.host.block(layer, first.host_slot)
            block = self._pool[layer][first.device_slot]
            for dst, src in _parts(host, block, first.start, first.stop):
                d2h.copy(dst, src, ids, self._encode)
            return
        blocks = self._pool[layer][device_slots[0] : device_slots[-1] + 1]
        for each in self.host.runs(host_slots):
            d2h.copy(self.host.blocks(layer, each), blocks[each.at], ids[each.at], self._encode)

    def queue_loads(self, layer: int, transfers: StepTransfers) -> Event:
        """Queue the loads of one layer: host blocks go back into device slots."""
        h2d, declare = self.device.h2d, self.device.declare
        for load in transfers.loads:
            self.stored.wait(h2d, layer, (load.device_slot,), (load.host_slot,))
            declare(
                h2d,
                reads=slot_keys("host", layer, (load.host_slot,)),
                writes=slot_keys("device", layer, (load.device_slot,)),
            )
            source = self.host.block(layer, load.host_slot)
            ids = (transfers.block_ids.get(load.host_slot),)
            target = self._pool[layer][load.device_slot]
            for dst, src in _parts(target, source, 0, load.num_tokens):
                self.fetch(dst, src, ids)
            self.counters.h2d_bytes += self.loaded_bytes[layer] * load.num_tokens
        return h2d.record()

    def queue_fill(self, layer: int, fill: Fill, ring_slot: int) -> Event:
        """Queue a fill of one layer into a ring slot, once its last reader has drained it."""
        host_slots = fill.host_slots
        h2d, declare = self.device.h2d, self.device.declare
        drained = self._drained[ring_slot]
        if drained is not None:
            h2d.wait(drained)
        self.stored.wait(h2d, layer, host_slots=host_slots)
        declare(
            h2d,
            reads=slot_keys("host", layer, host_slots),
            writes=slot_keys("ring", 0, (ring_slot,)),
        )
        target = self.ring.of_layer(layer)[ring_slot]
        if self._debug:
            h2d.fill(self.ring.whole(ring_slot), torch.nan)
        for run in fill.runs:
            self.fetch(target[run.at], self.host.blocks(layer, run), fill.block_ids[run.at])
        self.counters.num_fill_copies += len(fill.runs)
        num_bytes = len(host_slots) * self._block_size * self.loaded_bytes[layer]
        self.counters.fill_bytes += num_bytes
        self.counters.h2d_bytes += num_bytes
        return h2d.record()

    def await_event(self, event: Event) -> None:
        """Let compute wait for a copy, and count whether it had to."""
        if event.is_done():
            self.counters.num_prefetch_hits += 1
        else:
            self.counters.num_stalls += 1
        self.device.compute.wait(event)

    def drain(self, ring_slot: int) -> None:
        """Compute has been given all its reads of this ring slot."""
        compute = self.device.compute
        if self._debug:
            self.device.declare(compute, writes=slot_keys("ring", 0, (ring_slot,)))
            compute.fill(self.ring.whole(ring_slot), torch.nan)
        self._drained[ring_slot] = compute.record()


class TransferRun:
    """The transfers of one step. It queues the stores, loads and first fills at once; compute then
    calls it layer by layer.

    A load is for a layer that has KV. A fill is for a layer that reads KV: two layers that read the
    same KV have a fill each.
    """

    def __init__(self, engine: OffloadEngine, transfers: StepTransfers) -> None:
        self._engine = engine
        self._transfers = transfers
        self._sources = engine.sources
        self._fills = [
            Fill.of(slots, engine.host, transfers.block_ids) for slots in transfers.fills
        ]
        all_fills = [range(len(transfers.fills))] * len(self._sources)
        self._fills_of: Sequence[Sequence[int]] = transfers.fills_of or all_fills
        # Fills are numbered through all layers: these of layer i begin with _begins[i].
        self._begins = [*accumulate(map(len, self._fills_of), initial=0)]
        self._loaded: list[Event] = []
        self._filled: dict[int, Event] = {}  # number of the fill -> event, until it is consumed
        self._next_fill = 0
        self.share_cores(True)
        engine.queue_stores(transfers)
        if transfers.loads:
            # A slot to load into may have been read by the step before.
            engine.device.h2d.wait(engine.device.compute.record())
        self._issue()

    def share_cores(self, with_copies: bool) -> None:
        """Let compute leave a core to the copies, or take it back. Only a decode step that streams
        copies all the time; other steps keep their cores.
        """
        streams = self._transfers.is_decode and bool(self._transfers.fills)
        self._engine.device.share_cores(with_copies and streams)

    def await_loads(self, layer: int) -> None:
        """Let compute wait for the loads of this layer."""
        if self._transfers.loads:
            self._engine.await_event(self._loaded[layer])

    def read_host(self, layer: int, segment: int, places: Sequence[int]) -> Tensor:
        """One layer of a segment, whose blocks at these places compute reads next, in place."""
        device, slots = self._engine.device, list(self._engine.host.slots(segment, places))
        layer = self._sources[layer]
        self._engine.stored.wait(device.compute, layer, host_slots=slots)
        device.declare(device.compute, reads=slot_keys("host", layer, slots))
        return self._engine.host.segment(segment, layer)

    def fill(self, layer: int, index: int) -> Tensor:
        """The ring slot with fill `index` of a layer, [slot_blocks, parts, block_size, kv_heads,
        head_dim].

        Valid until `drained` is called for it.
        """
        number = self._number(layer, index)
        self._engine.await_event(self._filled[number])
        ring_slot = number % len(self._engine.ring)
        device = self._engine.device
        device.declare(device.compute, reads=slot_keys("ring", 0, (ring_slot,)))
        return self._engine.ring.of_layer(self._sources[layer])[ring_slot]

    def drained(self, layer: int, index: int) -> None:
        """Compute has read the fill; its ring slot takes the next one."""
        number = self._number(layer, index)
        del self._filled[number]
        self._engine.drain(number % len(self._engine.ring))
        self._issue()

    def finish(self) -> bool:
        """Let compute wait for all copies under way; False if the step did not come to its end."""
        compute = self._engine.device.compute
        self.share_cores(False)
        complete = self._next_fill == self._begins[-1] and not self._filled
        for event in [*self._filled.values(), *self._loaded]:
            compute.wait(event)
        for number in self._filled:
            self._engine.drain(number % len(self._engine.ring))
        self._filled.clear()
        return complete

    def _number(self, layer: int, index: int) -> int:
        return self._begins[layer] + bisect_left(self._fills_of[layer], index)

    def _issue(self) -> None:
        """Queue loads and fills in the order of their use, as far as the ring has room."""
        loads, num_layers = self._transfers.loads, len(self._fills_of)
        num_loaded = self._engine.host.num_layers
        while True:
            layer = bisect_right(self._begins, self._next_fill) - 1  # num_layers: no fill is left
            while loads and len(self._loaded) < min(layer + 1, num_loaded):
                event = self._engine.queue_loads(len(self._loaded), self._transfers)
                self._loaded.append(event)
            if layer == num_layers or len(self._filled) == len(self._engine.ring):
                return
            ring_slot = self._next_fill % len(self._engine.ring)
            index = self._fills_of[layer][self._next_fill - self._begins[layer]]
            source = self._sources[layer]
            event = self._engine.queue_fill(source, self._fills[index], ring_slot)
            self._filled[self._next_fill] = event
            self._next_fill += 1


def _parts(dst: Tensor, src: Tensor, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What to copy for some tokens of a block: a whole block at once, else part by part."""
    if stop - start == dst.shape[1]:
        yield dst, src
    else:
        yield from zip(dst[:, start:stop], src[:, start:stop], strict=True)


def slot_keys(pool: str, layer: int, slots: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    """Names of slots, for the checking device only."""
    return ((pool, layer, slot) for slot in slots)
