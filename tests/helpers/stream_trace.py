"""What a checked device is asked to queue, stream by stream, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from nanoengine.devices.copy_streams import Stream
from nanoengine.devices.stream_check import CheckedDevice, Key


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One operation that was queued on a stream.

    operation      copy, fill, record, wait or access
    reads, writes  access: the slots that the next operation on this stream accesses
    other          wait: the stream that recorded the event
    event          record and wait: number of the event on the recording stream, from 1
    """

    stream: str
    operation: str
    reads: tuple[Key, ...] = ()
    writes: tuple[Key, ...] = ()
    other: str = ""
    event: int = 0


@dataclass(slots=True)
class Trace:
    """The first `room` operations on all streams; num_left_out: how many came after them."""

    room: int
    entries: list[TraceEntry] = field(default_factory=list)
    num_left_out: int = 0

    def add(self, entry: TraceEntry) -> None:
        """Keep an entry, or count it."""
        if len(self.entries) < self.room:
            self.entries.append(entry)
        else:
            self.num_left_out += 1


@contextmanager
def traced(device: CheckedDevice, room: int = 10_000) -> Iterator[Trace]:
    """The trace of what the block queues."""
    trace, declare = Trace(room), device.declare

    def declared(stream: Stream, reads: Iterable[Key] = (), writes: Iterable[Key] = ()) -> None:
        reads, writes = tuple(reads), tuple(writes)
        trace.add(TraceEntry(stream.name, "access", reads, writes))
        declare(stream, reads, writes)

    with ExitStack() as patches:
        patches.enter_context(patch.object(device, "declare", declared))
        for stream in (device.compute, device.h2d, device.d2h):
            for name in ("copy", "fill", "record", "wait"):
                heard = _heard(trace, stream, name)
                patches.enter_context(patch.object(stream, name, heard))
        yield trace


def _heard(trace: Trace, stream: Stream, name: str) -> Callable[..., Any]:
    """A method of a stream, which adds its calls to the trace."""
    call = getattr(stream, name)

    def heard(*args: Any, **named: Any) -> Any:
        made = call(*args, **named)
        if name == "wait":
            entry = TraceEntry(stream.name, name, other=args[0].stream, event=args[0].number)
        else:
            entry = TraceEntry(stream.name, name, event=made.number if name == "record" else 0)
        trace.add(entry)
        return made

    return heard
