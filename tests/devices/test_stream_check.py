"""Streams really overlap, and the checking device finds every access that no event orders."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from driver import host_gib
from stream_trace import TraceEntry, traced

from nanoengine import SamplingParams
from nanoengine.devices.copy_streams import Delays, DoneEvent, InlineStream, WorkerStream
from nanoengine.devices.cpu import CpuDevice
from nanoengine.devices.device import Device
from nanoengine.devices.stream_check import CheckedDevice, Key, RaceError
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.kv.kv_memory import KVMemory
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.kv.step_plan import StepTransfers, Store

SLOT = ("device", 0, 3)
OTHER = ("device", 1, 3)
HOST = ("host", 0, 7)


@pytest.fixture(params=["inline", "workers"])
def device(request: pytest.FixtureRequest) -> Iterator[CheckedDevice]:
    """Checked; all of it inline, where nothing can go wrong in time, or with copy workers."""
    checked = CheckedDevice(CpuDevice(2, copy_workers=request.param == "workers"))
    yield checked
    checked.close_streams()


# -- the checker, on programs of two or three accesses

Program = Callable[[CheckedDevice], None]


def _write_read(d: CheckedDevice) -> None:
    d.declare(d.h2d, writes=[SLOT])
    d.declare(d.compute, reads=[SLOT])


def _read_write(d: CheckedDevice) -> None:
    d.declare(d.compute, reads=[SLOT])
    d.declare(d.h2d, writes=[SLOT])


def _write_write(d: CheckedDevice) -> None:
    d.declare(d.d2h, writes=[SLOT])
    d.declare(d.h2d, writes=[SLOT])


def _event_before_the_write(d: CheckedDevice) -> None:
    event = d.h2d.record()
    d.declare(d.h2d, writes=[SLOT])
    d.compute.wait(event)
    d.declare(d.compute, reads=[SLOT])


def _event_that_nobody_waits_for(d: CheckedDevice) -> None:
    d.declare(d.h2d, writes=[SLOT])
    d.h2d.record()
    d.declare(d.compute, reads=[SLOT])


def _wait_by_the_wrong_stream(d: CheckedDevice) -> None:
    d.declare(d.h2d, writes=[SLOT])
    d.d2h.wait(d.h2d.record())
    d.declare(d.compute, reads=[SLOT])


def _wait_after_the_access(d: CheckedDevice) -> None:
    d.declare(d.h2d, writes=[SLOT])
    event = d.h2d.record()
    d.declare(d.compute, reads=[SLOT])
    d.compute.wait(event)


def _second_write_after_an_ordered_first(d: CheckedDevice) -> None:
    d.declare(d.h2d, writes=[SLOT])
    d.compute.wait(d.h2d.record())
    d.declare(d.h2d, writes=[SLOT])
    d.declare(d.compute, reads=[SLOT])


def _one_of_two_readers_is_not_waited_for(d: CheckedDevice) -> None:
    d.declare(d.compute, reads=[SLOT])
    d.declare(d.d2h, reads=[SLOT])
    d.h2d.wait(d.compute.record())
    d.declare(d.h2d, writes=[SLOT])


def _an_older_reader_under_a_newer_one(d: CheckedDevice) -> None:
    """The slot was read twice by a stream; only the first read is ordered before the write."""
    d.declare(d.compute, reads=[SLOT])
    event = d.compute.record()
    d.declare(d.compute, reads=[SLOT])
    d.h2d.wait(event)
    d.declare(d.h2d, writes=[SLOT])


RACES: dict[str, tuple[Program, str]] = {
    "read of an unfinished write": (_write_read, "compute reads device slot 3 .* h2d wrote"),
    "write under a reader": (_read_write, "h2d writes device slot 3 .* compute read"),
    "two writers": (_write_write, "h2d writes device slot 3 .* d2h wrote"),
    "event too early": (_event_before_the_write, "h2d wrote"),
    "event unused": (_event_that_nobody_waits_for, "h2d wrote"),
    "wrong stream waits": (_wait_by_the_wrong_stream, "h2d wrote"),
    "waits too late": (_wait_after_the_access, "h2d wrote"),
    "second write": (_second_write_after_an_ordered_first, "h2d wrote"),
    "one reader missed": (_one_of_two_readers_is_not_waited_for, "d2h read"),
    "newer read missed": (_an_older_reader_under_a_newer_one, "compute read"),
}


@pytest.mark.parametrize("name", RACES)
def test_a_missing_order_is_a_race(device: CheckedDevice, name: str) -> None:
    program, message = RACES[name]
    with pytest.raises(RaceError, match=message):
        program(device)


def _filled_and_drained(d: CheckedDevice) -> None:
    for _ in range(3):
        d.declare(d.h2d, writes=[SLOT])
        d.compute.wait(d.h2d.record())
        d.declare(d.compute, reads=[SLOT])
        d.h2d.wait(d.compute.record())


def _through_a_third_stream(d: CheckedDevice) -> None:
    d.declare(d.d2h, writes=[SLOT])
    d.h2d.wait(d.d2h.record())
    d.compute.wait(d.h2d.record())
    d.declare(d.compute, writes=[SLOT])


def _readers_need_no_order(d: CheckedDevice) -> None:
    d.declare(d.h2d, reads=[SLOT])
    d.declare(d.d2h, reads=[SLOT])
    d.declare(d.compute, reads=[SLOT])


def _other_slots_and_layers(d: CheckedDevice) -> None:
    d.declare(d.h2d, writes=[SLOT])
    d.declare(d.compute, reads=[OTHER, ("host", *SLOT[1:])])


def _one_stream_alone(d: CheckedDevice) -> None:
    d.declare(d.h2d, writes=[SLOT])
    d.declare(d.h2d, reads=[SLOT], writes=[SLOT])


def _an_event_waited_for_twice_and_late(d: CheckedDevice) -> None:
    d.declare(d.h2d, writes=[SLOT])
    event = d.h2d.record()
    d.declare(d.h2d, writes=[OTHER])  # not covered by the event, and not read
    d.d2h.wait(event)
    d.compute.wait(event)
    d.compute.wait(event)
    d.declare(d.compute, reads=[SLOT])
    d.declare(d.d2h, reads=[SLOT])


ORDERED: dict[str, Program] = {
    "ring": _filled_and_drained,
    "transitive": _through_a_third_stream,
    "readers": _readers_need_no_order,
    "other slots": _other_slots_and_layers,
    "one stream": _one_stream_alone,
    "event shared": _an_event_waited_for_twice_and_late,
}


@pytest.mark.parametrize("name", ORDERED)
def test_an_ordered_program_passes(device: CheckedDevice, name: str) -> None:
    ORDERED[name](device)
    assert device.num_checked >= 2


def test_a_wait_takes_what_the_event_saw_not_what_came_later(device: CheckedDevice) -> None:
    """The clock on an event is a copy."""
    event = device.h2d.record()
    device.declare(device.h2d, writes=[SLOT])
    device.h2d.record()
    device.compute.wait(event)
    with pytest.raises(RaceError):
        device.declare(device.compute, reads=[SLOT])


def test_the_checker_passes_work_through(device: CheckedDevice) -> None:
    source, target = torch.arange(6.0), torch.zeros(6)
    device.h2d.copy(target, source)
    device.compute.wait(device.h2d.record())
    assert torch.equal(source, target)
    device.d2h.fill(target, 7.0)
    device.synchronize()
    assert target.tolist() == [7.0] * 6
    assert device.empty_host((2, 3), torch.bfloat16).shape == (2, 3)
    assert device.memory()[0] > 0 and device.peak_memory_mib() > 0
    assert device.auto_dtype()[0] in (torch.float32, torch.bfloat16)


# -- the trace


def _some_work(d: CheckedDevice) -> None:
    d.declare(d.h2d, reads=[HOST], writes=[SLOT])
    d.h2d.copy(torch.zeros(1), torch.ones(1))
    event = d.h2d.record()
    d.d2h.record()
    d.compute.wait(event)
    d.declare(d.compute, reads=iter([SLOT, OTHER]))
    d.compute.fill(torch.zeros(1), 1.0)
    d.h2d.wait(d.compute.record())
    d.d2h.wait(d.d2h.record())


def test_the_trace_holds_what_was_queued_in_order(device: CheckedDevice) -> None:
    _some_work(device)  # events are counted from the beginning, traced or not
    with traced(device) as trace:
        _some_work(device)
    _some_work(device)
    assert trace.entries == [
        TraceEntry("h2d", "access", reads=(HOST,), writes=(SLOT,)),
        TraceEntry("h2d", "copy"),
        TraceEntry("h2d", "record", event=2),
        TraceEntry("d2h", "record", event=3),
        TraceEntry("compute", "wait", other="h2d", event=2),
        TraceEntry("compute", "access", reads=(SLOT, OTHER)),
        TraceEntry("compute", "fill"),
        TraceEntry("compute", "record", event=2),
        TraceEntry("h2d", "wait", other="compute", event=2),
        TraceEntry("d2h", "record", event=4),
        TraceEntry("d2h", "wait", other="d2h", event=4),
    ]
    assert device.h2d.counts == {"copies": 3, "events": 3, "waits": 3}


def test_a_trace_is_bounded_and_says_so(device: CheckedDevice) -> None:
    for room, left_out in ((4, 7), (11, 0)):
        with traced(device, room) as trace:
            _some_work(device)
        assert len(trace.entries) == room and trace.num_left_out == left_out


def unordered(trace: Sequence[TraceEntry]) -> set[tuple[Key, str, str]]:
    """Conflicting accesses of two streams without a path from the first to the second, by the graph
    of the trace: no clocks. (slot, first stream, second stream)
    """
    before: list[int] = []  # for each entry, the entries that are ordered before it, as bits
    last: dict[str, int] = {}
    recorded: dict[tuple[str, int], int] = {}
    for number, entry in enumerate(trace):
        parents = [last[entry.stream]] if entry.stream in last else []
        if entry.operation == "wait" and (entry.other, entry.event) in recorded:
            parents.append(recorded[entry.other, entry.event])
        before.append(0)
        for parent in parents:
            before[number] |= before[parent] | 1 << parent
        last[entry.stream] = number
        if entry.operation == "record":
            recorded[entry.stream, entry.event] = number
    found = set()
    for second, first in ((j, i) for j in range(len(trace)) for i in range(j)):
        a, b = trace[first], trace[second]
        shared = {*a.writes} & {*b.writes, *b.reads} | {*a.reads} & {*b.writes}
        if a.stream != b.stream and shared and not before[second] >> first & 1:
            found |= {(key, a.stream, b.stream) for key in shared}
    return found


def test_a_copy_on_the_device_waits_for_the_store_that_reads_its_target(
    device: CheckedDevice,
) -> None:
    """A step that fails gives slots back while its stores still read them."""
    memory = KVMemory(KVSpec(((1, 16),) * 2, 4, 8, torch.float32, 4, 2, 1), device)
    assert memory.offload is not None
    run = memory.start(StepTransfers(stores=(Store(0, 0, 0, 8),)))
    memory.copy_block(source=1, target=0, num_tokens=5)
    run.finish()
    memory.close()


def test_a_streamed_run_is_ordered_by_its_trace_alone(tiny: Callable[[str], Path]) -> None:
    """The trace says enough to find it ordered, and races once waits are struck from it."""
    path = tiny("llama")
    engine = LLMEngine(
        path,
        dtype="float32",
        device="cpu",
        kvcache_block_size=8,
        num_gpu_blocks=4,
        max_num_batched_tokens=24,
        max_num_seqs=4,
        enable_cpu_offload=True,
        offload_mode="stream",
        kv_offload_gib=host_gib(path, 40, 8),
        slot_tokens=8,
        ring_slots=2,
        debug_kv=True,
    )
    device = engine.device
    assert isinstance(device, CheckedDevice)
    with traced(device) as trace:
        engine.add_request(list(range(50)), SamplingParams(temperature=0, max_tokens=3))
        while engine.has_unfinished_requests:
            engine.step()
    engine.close()
    assert trace.num_left_out == 0 and len(trace.entries) > 200
    assert unordered(trace.entries) == set()
    for waiting, other in (("compute", "h2d"), ("h2d", "compute"), ("d2h", "compute")):
        struck = [
            e for e in trace.entries if (e.stream, e.operation, e.other) != (waiting, "wait", other)
        ]
        races = unordered(struck)
        assert any({waiting, other} == {a, b} for _, a, b in races), (waiting, other)


# -- streams


@pytest.fixture
def stream() -> Iterator[WorkerStream]:
    worker = WorkerStream("test")
    yield worker
    worker.close()


def test_a_copy_is_not_done_when_it_is_queued() -> None:
    """A gate holds the worker: the copy happens when it opens, not before and not by the caller."""
    gate, source = threading.Event(), torch.ones(4)
    first, second = WorkerStream("first"), WorkerStream("second")
    target = torch.zeros(4)
    held = _Gate(gate)
    first.wait(held.event)
    first.copy(target, source)
    event = first.record()
    second.fill(torch.zeros(2), 1.0)  # the other stream is not held up
    second.record().block()
    assert not event.is_done() and target.sum() == 0
    gate.set()
    event.block()
    assert event.is_done() and target.sum() == 4
    held.close()
    first.close()
    second.close()


class _Gate:
    """A stream stuck in a piece of work until `gate` is set; `event` comes after that work."""

    def __init__(self, gate: threading.Event) -> None:
        self._stream = WorkerStream("gate")
        self._stream._work.put(gate.wait)
        self.event = self._stream.record()

    def close(self) -> None:
        self._stream.close()


def test_a_delayed_copy_is_still_a_copy_in_order() -> None:
    delayed = WorkerStream("delayed", max_delay_s=0.02)
    target = torch.zeros(1)
    delays, started = Delays("delayed", 0.02), time.perf_counter()
    for value in range(8):
        delayed.copy(target, torch.tensor([float(value)]))
    delayed.record().block()
    took = time.perf_counter() - started
    assert target.item() == 7 and took > 0.9 * sum(delays.next() for _ in range(8)) > 0.01
    delayed.close()


def test_waits_order_two_workers(stream: WorkerStream) -> None:
    gate = threading.Event()
    held = _Gate(gate)
    middle, target = torch.zeros(3), torch.zeros(3)
    other = WorkerStream("other")
    stream.wait(held.event)
    stream.copy(middle, torch.ones(3))
    other.wait(stream.record())
    other.copy(target, middle)
    done = other.record()
    gate.set()
    done.block()
    assert target.sum() == 3
    other.close()
    held.close()


def test_an_inline_stream_blocks_the_caller(stream: WorkerStream) -> None:
    gate = threading.Event()
    held = _Gate(gate)
    stream.wait(held.event)
    event = stream.record()
    threading.Timer(0.05, gate.set).start()
    InlineStream("compute").wait(event)
    assert event.is_done() and gate.is_set()
    held.close()


def test_a_failed_copy_is_told_with_its_owner_and_the_stream_goes_on(stream: WorkerStream) -> None:
    target = torch.zeros(3)
    stream.copy(torch.zeros(3), torch.ones(4), "a")
    stream.copy(target, torch.ones(3), "b")
    after = stream.record()
    InlineStream("compute").wait(after)
    (failed,) = stream.take_failed()
    assert failed.owner == "a" and "broadcast" in str(failed.error)
    assert target.sum() == 3 and not stream.take_failed()


def test_an_inline_copy_that_fails_raises_nothing_either() -> None:
    inline = InlineStream("h2d")
    inline.copy(torch.zeros(3), torch.ones(4), "a")
    assert [failed.owner for failed in inline.take_failed()] == ["a"]


def test_closing_ends_the_threads_after_their_work() -> None:
    device: Device = CpuDevice(2, copy_workers=True, max_delay_s=0.005)
    named = [t for t in threading.enumerate() if t.name in ("nanoengine-h2d", "nanoengine-d2h")]
    target = torch.zeros(5)
    for value in range(5):
        device.h2d.copy(target[value : value + 1], torch.tensor([1.0]))
    device.close_streams()
    assert target.sum() == 5
    assert not any(thread.is_alive() for thread in named[-2:])
    device.close_streams()  # twice is fine


def test_synchronize_waits_for_both_workers() -> None:
    device = CpuDevice(2, copy_workers=True, max_delay_s=0.01)
    up, down = torch.zeros(1), torch.zeros(1)
    device.h2d.fill(up, 1.0)
    device.d2h.fill(down, 1.0)
    device.synchronize()
    assert up.item() == down.item() == 1
    device.close_streams()


def test_inline_work_is_done_at_once() -> None:
    inline, target = InlineStream("x"), torch.zeros(2, dtype=torch.bfloat16)
    inline.copy(target, torch.ones(2, dtype=torch.bfloat16))
    assert (
        target.sum() == 2 and isinstance(inline.record(), DoneEvent) and inline.record().is_done()
    )
    inline.fill(target, torch.nan)
    assert target.isnan().all()
