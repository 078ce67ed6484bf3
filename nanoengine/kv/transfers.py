"""Records of copies between the tiers: fills, events, failures, bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nanoengine.devices.copy_streams import Event, Stream
from nanoengine.kv.host_pool import HostPool, HostRun


class Fill(NamedTuple):
    """What a ring slot takes, the same for all layers: host slots, as runs, and their block ids."""

    host_slots: tuple[int, ...]
    runs: tuple[HostRun, ...]
    block_ids: tuple[int | None, ...]

    @classmethod
    def of(cls, slots: tuple[int, ...], host: HostPool, block_ids: Mapping[int, int]) -> Fill:
        return cls(slots, tuple(host.runs(slots)), tuple(map(block_ids.get, slots)))


@dataclass(slots=True)
class TransferCounters:
    """Bytes that crossed the link, the bytes and copies of fills among them, and how often compute
    found its data ready (prefetch hits) or had to wait (stalls).
    """

    h2d_bytes: int = 0
    d2h_bytes: int = 0
    fill_bytes: int = 0
    num_fill_copies: int = 0
    num_stalls: int = 0
    num_prefetch_hits: int = 0


@dataclass(slots=True)
class StoreEvents:
    """For each device and host slot the events, one a layer, of the last store that touched it."""

    device: dict[int, list[Event]] = field(default_factory=dict)
    host: dict[int, list[Event]] = field(default_factory=dict)

    def wait(
        self,
        stream: Stream,
        layer: int,
        device_slots: Sequence[int] = (),
        host_slots: Sequence[int] = (),
    ) -> None:
        """Let `stream` wait for the last stores that used these device or host slots."""
        for events, slots in ((self.device, device_slots), (self.host, host_slots)):
            if events:
                found = {id(e[layer]): e[layer] for s in slots if (e := events.get(s))}
                for event in found.values():
                    stream.wait(event)

    def are_done(self, device_slots: Iterable[int], host_slots: Iterable[int]) -> bool:
        """Whether the last stores that read these device slots or wrote these host slots are done.

        Stores run in order, so the last layer's event stands for all layers.
        """
        device = (self.device.get(slot) for slot in device_slots)
        host = (self.host.get(slot) for slot in host_slots)
        return all(events[-1].is_done() for events in (*device, *host) if events)


@dataclass(frozen=True, slots=True)
class FailedTransfer:
    """A copy that failed, with the ids of its blocks. is_lost: a store failed, so the host copy is
    bad; else a load or fill failed, and the host copy is good.
    """

    block_ids: tuple[int | None, ...]
    is_lost: bool
    reason: str
