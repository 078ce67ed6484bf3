"""A device that checks the order of its streams: it raises if no event orders two accesses.

Every stream carries a vector clock; `record` stamps it on the event and `wait` merges it (Mattern
1989). An access is ordered after another if the other's time on its own stream is in the accessing
stream's clock. The check reads what was queued, not when it ran, so it finds a missing wait in
every run, even if inline compute hides it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanoengine.devices.copy_streams import Convert, Event, FailedCopy, Stream
from nanoengine.devices.device import Device
from nanoengine.errors import EngineError

Key = tuple[str, int, int]
Clock = dict[str, int]


class RaceError(EngineError):
    """Two streams access the same slot, at least one writes, and no event orders them."""


@dataclass(frozen=True, slots=True)
class CheckedEvent:
    """An event, the clock of the stream that recorded it, and its number on that stream."""

    inner: Event
    clock: Clock
    stream: str
    number: int

    def is_done(self) -> bool:
        return self.inner.is_done()


class CheckedStream:
    """A stream with a vector clock; `counts` counts its queued operations by kind."""

    def __init__(self, inner: Stream) -> None:
        self.name = inner.name
        self.inner = inner
        self.clock: Clock = {inner.name: 0}
        self.counts: Counter[str] = Counter()

    def copy(
        self, dst: Tensor, src: Tensor, owner: object = None, convert: Convert | None = None
    ) -> None:
        self.counts["copies"] += 1
        self.inner.copy(dst, src, owner, convert)

    def take_failed(self) -> list[FailedCopy]:
        return self.inner.take_failed()

    def fill(self, dst: Tensor, value: float) -> None:
        self.inner.fill(dst, value)

    def record(self) -> Event:
        self.counts["events"] += 1
        return CheckedEvent(self.inner.record(), dict(self.clock), self.name, self.counts["events"])

    def wait(self, event: Event) -> None:
        assert isinstance(event, CheckedEvent)
        self.counts["waits"] += 1
        for name, time in event.clock.items():
            self.clock[name] = max(self.clock.get(name, 0), time)
        self.inner.wait(event.inner)


@dataclass(slots=True)
class _Accesses:
    """The last write of a slot and the reads since then: stream name -> time on that stream."""

    write: Clock = field(default_factory=dict)
    reads: Clock = field(default_factory=dict)


class CheckedDevice:
    """Wraps a device; `declare` reports what a stream accesses, which num_checked counts."""

    is_checked = True

    def __init__(self, inner: Device) -> None:
        self.name = inner.name
        self.computes_later = inner.computes_later
        self.torch_device: torch.device = inner.torch_device
        self.compute: Stream = CheckedStream(inner.compute)
        self.h2d: Stream = CheckedStream(inner.h2d)
        self.d2h: Stream = CheckedStream(inner.d2h)
        self.num_checked = 0
        self._slots: dict[Key, _Accesses] = {}
        # What needs no check is the device's own.
        self.auto_dtype, self.tensor = inner.auto_dtype, inner.tensor
        self.memory, self.host_memory = inner.memory, inner.host_memory
        self.peak_memory_mib, self.peak_bytes_of = inner.peak_memory_mib, inner.peak_bytes_of
        self.empty_host, self.synchronize = inner.empty_host, inner.synchronize
        self.read_back, self.watch = inner.read_back, inner.watch
        self.share_cores, self.follow_free_cores = inner.share_cores, inner.follow_free_cores
        self.begin_step, self.close_streams = inner.begin_step, inner.close_streams

    def declare(
        self, stream: Stream, reads: Iterable[Key] = (), writes: Iterable[Key] = ()
    ) -> None:
        """`stream` will read and write these slots. Raises RaceError."""
        assert isinstance(stream, CheckedStream)
        stream.clock[stream.name] += 1
        now = stream.clock[stream.name]
        for key in reads:
            accesses = self._slots.setdefault(key, _Accesses())
            self._demand_order(stream, key, accesses.write, "reads", "wrote")
            accesses.reads[stream.name] = now
            self.num_checked += 1
        for key in writes:
            accesses = self._slots.setdefault(key, _Accesses())
            self._demand_order(stream, key, accesses.write, "writes", "wrote")
            self._demand_order(stream, key, accesses.reads, "writes", "read")
            accesses.write, accesses.reads = {stream.name: now}, {}
            self.num_checked += 1

    def _demand_order(
        self, stream: CheckedStream, key: Key, before: Clock, verb: str, past: str
    ) -> None:
        for name, time in before.items():
            if name != stream.name and stream.clock.get(name, 0) < time:
                pool, layer, slot = key
                raise RaceError(
                    f"{stream.name} {verb} {pool} slot {slot} of layer {layer}, which {name} "
                    f"{past} with no event in between"
                )
