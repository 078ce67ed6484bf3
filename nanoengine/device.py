"""The one file that knows a platform: dtype, memory, threads, streams and events.

Everything else asks a Device and never looks at `torch.cuda` or the machine itself.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import queue
import random
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanoengine.errors import ConfigError

Convert = Callable[[Tensor, Tensor], None]
CYCLES_PER_S = 1_500_000_000  # of a GPU, about


class Event(Protocol):
    """A point in a stream's work."""

    def is_done(self) -> bool:
        """True once all work before the point has ended."""
        ...


class Stream(Protocol):
    """Work that runs in order; against other streams only events order it."""

    name: str

    def copy(
        self, dst: Tensor, src: Tensor, owner: object = None, convert: Convert | None = None
    ) -> None:
        """Copy contiguous `src` to contiguous `dst`, of the same bytes or, given a function that
        does convert(dst, src), as that makes them.

        A copy that fails stops nothing; `take_failed` tells its owner.
        """
        ...

    def fill(self, dst: Tensor, value: float) -> None:
        """Fill a contiguous tensor."""
        ...

    def record(self) -> Event:
        """An event that is done when all work queued so far is."""
        ...

    def wait(self, event: Event) -> None:
        """Let all later work of this stream begin after the event."""
        ...

    def take_failed(self) -> list[FailedCopy]:
        """The copies that failed since the last call. One that an event followed which is done is
        among them.
        """
        ...


@dataclass(frozen=True, slots=True)
class FailedCopy:
    """A copy that could not be made, by its owner, and why."""

    owner: object
    error: Exception


class Copies:
    """Makes copies and remembers those that failed."""

    def __init__(self) -> None:
        self._failed: deque[FailedCopy] = deque()

    def make(self, dst: Tensor, src: Tensor, owner: object, convert: Convert | None) -> None:
        """Copy `src` to `dst`, both contiguous in host memory: its bytes, or as `convert` does."""
        try:
            (convert or _copy_bytes)(dst, src)
        except Exception as error:  # told to whoever asks for the owner's copies
            self._failed.append(FailedCopy(owner, error))

    def take_failed(self) -> list[FailedCopy]:
        """See Stream."""
        return [self._failed.popleft() for _ in range(len(self._failed))]


class DoneEvent:
    """An event of work that ran inline."""

    def is_done(self) -> bool:
        """Always."""
        return True


class InlineStream:
    """Runs everything at once, in the calling thread: compute on a CPU, and copies where none
    overlap.

    Waiting for another stream's event blocks the caller.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._copies = Copies()
        self.take_failed = self._copies.take_failed

    def copy(
        self, dst: Tensor, src: Tensor, owner: object = None, convert: Convert | None = None
    ) -> None:
        """See Stream."""
        self._copies.make(dst, src, owner, convert)

    def fill(self, dst: Tensor, value: float) -> None:
        """See Stream."""
        dst.fill_(value)

    def record(self) -> Event:
        """See Stream."""
        return DoneEvent()

    def wait(self, event: Event) -> None:
        """See Stream."""
        if isinstance(event, WorkerEvent):
            event.block()


class WorkerEvent:
    """An event in the queue of a WorkerStream."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.is_done = self._done.is_set
        self.set = self._done.set  # called by the worker
        self.block = self._done.wait


class _Delays:
    """Random ones, the same for each stream of this name."""

    def __init__(self, name: str, longest_s: float) -> None:
        self._longest_s = longest_s
        self._random = random.Random(name)

    def next(self) -> float:
        """Seconds."""
        return self._random.uniform(0, self._longest_s) if self._longest_s else 0.0


class WorkerStream:
    """Copies on a thread of its own; a random delay before each shows missing waits."""

    def __init__(self, name: str, max_delay_s: float = 0.0) -> None:
        self.name = name
        self._delays = _Delays(name, max_delay_s)
        self._copies = Copies()
        self.take_failed = self._copies.take_failed
        self._work: queue.SimpleQueue[Callable[[], object] | WorkerEvent | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=f"nanoengine-{name}", daemon=True)
        self._thread.start()

    def copy(
        self, dst: Tensor, src: Tensor, owner: object = None, convert: Convert | None = None
    ) -> None:
        """See Stream."""
        self._work.put(lambda: self._copies.make(dst, src, owner, convert))

    def fill(self, dst: Tensor, value: float) -> None:
        """See Stream."""
        self._work.put(lambda: dst.fill_(value))

    def record(self) -> Event:
        """See Stream."""
        event = WorkerEvent()
        self._work.put(event)
        return event

    def wait(self, event: Event) -> None:
        """See Stream."""
        if isinstance(event, WorkerEvent) and not event.is_done():
            self._work.put(event.block)

    def close(self) -> None:
        """End the thread once its queue is empty."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if isinstance(work, WorkerEvent):
                work.set()
                continue
            if delay_s := self._delays.next():
                time.sleep(delay_s)
            work()


def _copy_bytes(dst: Tensor, src: Tensor) -> None:
    """numpy's copy is a plain memcpy: it releases the GIL and starts no team of threads."""
    np.copyto(_as_bytes(dst), _as_bytes(src))


def _as_bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    return tensor.view(torch.uint8).numpy()


def to_device(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers, nested lists of them, as a tensor. To a GPU they go through pinned memory: the host
    does not wait for what it has queued.
    """
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


class Readable(Protocol):
    """Numbers on their way to the host."""

    def tolist(self) -> list[Any]:
        """Wait for them."""
        ...


class Device(Protocol):
    """One compute device, its memory and its three streams."""

    name: str
    is_checked: bool  # whether somebody listens to `declare`
    computes_later: bool  # whether work goes on while the host prepares more
    torch_device: torch.device
    compute: Stream
    h2d: Stream
    d2h: Stream

    def auto_dtype(self) -> tuple[torch.dtype, str]:
        """The dtype that "auto" means here, and why."""
        ...

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        ...

    def host_memory(self) -> int:
        """Bytes of host memory that are available."""
        ...

    def peak_memory_mib(self) -> float:
        """Most memory that this process has held so far, MiB."""
        ...

    def peak_bytes_of(self, work: Callable[[], object]) -> int | None:
        """Most device memory that `work` held beside what there was; None where nobody counts."""
        ...

    def synchronize(self) -> None:
        """Wait for all queued work."""
        ...

    def tensor(self, values: object, dtype: torch.dtype) -> Tensor:
        """Numbers, nested lists of them, as a tensor on the device; the host does not wait."""
        ...

    def read_back(self, tensor: Tensor) -> Readable:
        """Begin to copy a tensor to the host, behind what compute has been given so far."""
        ...

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory that copies to and from the device run fastest with."""
        ...

    def declare(
        self,
        stream: Stream,
        reads: Iterable[tuple[str, int, int]] = (),
        writes: Iterable[tuple[str, int, int]] = (),
    ) -> None:
        """`stream` is about to touch these slots, each (pool, layer, slot): for stream_check.py."""
        ...

    def share_cores(self, with_copies: bool) -> None:
        """Whether compute leaves a core to copies from now on, where both run on the same ones."""
        ...

    def close_streams(self) -> None:
        """Let queued copies end; no more may follow."""
        ...


class CpuDevice:
    """The host itself. Compute runs inline; copies too, or on a worker thread each."""

    name = "cpu"
    is_checked = False
    computes_later = False
    torch_device = torch.device("cpu")

    def __init__(
        self, num_threads: int | None = None, copy_workers: bool = False, max_delay_s: float = 0.0
    ) -> None:
        self.num_threads = num_threads or _num_threads()
        torch.set_num_threads(self.num_threads)
        self._workers = (
            [WorkerStream(name, max_delay_s) for name in ("h2d", "d2h")] if copy_workers else []
        )
        self.compute: Stream = InlineStream("compute")
        self.h2d: Stream = self._workers[0] if copy_workers else InlineStream("h2d")
        self.d2h: Stream = self._workers[1] if copy_workers else InlineStream("d2h")

    def auto_dtype(self) -> tuple[torch.dtype, str]:
        """bfloat16 where the CPU multiplies it natively, else float32."""
        if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
            return torch.bfloat16, "the CPU multiplies bfloat16 natively"
        return torch.float32, "the CPU has no native bfloat16 arithmetic"

    def memory(self) -> tuple[int, int]:
        """Available and all memory of the machine."""
        return self.host_memory(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def host_memory(self) -> int:
        """See Device."""
        return _available_memory()

    def peak_memory_mib(self) -> float:
        """Peak resident set of the process."""
        return _peak_resident_kib() / 1024

    def peak_bytes_of(self, work: Callable[[], object]) -> int | None:
        """See Device. Not done: memory of the host is not counted."""
        return None

    def synchronize(self) -> None:
        """Wait for the copy workers."""
        for worker in self._workers:
            self.compute.wait(worker.record())

    def tensor(self, values: object, dtype: torch.dtype) -> Tensor:
        """See Device."""
        return torch.tensor(values, dtype=dtype)

    def read_back(self, tensor: Tensor) -> Readable:
        """See Device. They are here."""
        return tensor

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Pages taken from the system as they are first written; big ones where it has them.

        With pages of 4 KiB copies ran at half the speed in some processes and not in others.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(shape, dtype=dtype)
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=dtype).view(shape)

    def declare(
        self,
        stream: Stream,
        reads: Iterable[tuple[str, int, int]] = (),
        writes: Iterable[tuple[str, int, int]] = (),
    ) -> None:
        """Nobody checks."""

    def share_cores(self, with_copies: bool) -> None:
        """See Device. Sharing all of two, a streamed step takes up to 1.6 times as long."""
        if self._workers and self.num_threads > 1:
            torch.set_num_threads(self.num_threads - with_copies)

    def close_streams(self) -> None:
        """See Device."""
        for worker in self._workers:
            worker.close()
        self._workers = []


class CudaStream:
    """A CUDA stream; a random delay before each copy shows missing waits."""

    def __init__(self, name: str, stream: torch.cuda.Stream, max_delay_s: float = 0.0) -> None:
        self.name = name
        self._stream = stream
        self._delays = _Delays(name, max_delay_s)
        self._failed: list[FailedCopy] = []

    def copy(
        self, dst: Tensor, src: Tensor, owner: object = None, convert: Convert | None = None
    ) -> None:
        """See Stream. What fails on the GPU itself ends the process's use of it, not one copy.

        Memory that `convert` takes and gives back is used again on this stream only: in order.
        """
        try:
            with torch.cuda.stream(self._stream):
                if delay_s := self._delays.next():
                    torch.cuda._sleep(int(delay_s * CYCLES_PER_S))  # type: ignore[no-untyped-call]
                if convert is None:
                    dst.copy_(src, non_blocking=True)
                else:
                    convert(dst, src)
        except RuntimeError as error:
            self._failed.append(FailedCopy(owner, error))

    def take_failed(self) -> list[FailedCopy]:
        """See Stream."""
        failed, self._failed = self._failed, []
        return failed

    def fill(self, dst: Tensor, value: float) -> None:
        """See Stream. Pinned memory is filled by a copy, so that it stays in order."""
        with torch.cuda.stream(self._stream):
            if dst.is_cuda:
                dst.fill_(value)
            else:
                filled = torch.full(dst.shape, value, dtype=dst.dtype, device=self._stream.device)
                dst.copy_(filled, non_blocking=True)

    def record(self) -> Event:
        """See Stream."""
        return CudaEvent(self._stream.record_event())

    def wait(self, event: Event) -> None:
        """See Stream; the host does not wait."""
        if isinstance(event, CudaEvent):
            self._stream.wait_event(event.event)


class CudaEvent:
    """A CUDA event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_done(self) -> bool:
        """See Event."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaReadback:
    """A copy to pinned memory that later work of the stream does not hold up."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._done = torch.cuda.current_stream().record_event()

    def tolist(self) -> list[Any]:
        """See Readable."""
        self._done.synchronize()
        numbers: list[Any] = self._host.tolist()
        return numbers


class CudaDevice:
    """One NVIDIA GPU: compute on the current stream, one copy stream each way."""

    is_checked = False
    computes_later = True

    def __init__(self, name: str = "cuda", max_delay_s: float = 0.0) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device={name!r} was asked for, but this PyTorch sees no CUDA GPU; "
                'use device="cpu" or install a CUDA build of torch'
            )
        self.name = name
        index = torch.device(name).index
        self.torch_device = torch.device(
            "cuda", torch.cuda.current_device() if index is None else index
        )
        torch.cuda.set_device(self.torch_device)
        self.compute: Stream = CudaStream("compute", torch.cuda.current_stream())
        copying = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
        self.h2d: Stream = CudaStream("h2d", copying[0], max_delay_s)
        self.d2h: Stream = CudaStream("d2h", copying[1], max_delay_s)

    def auto_dtype(self) -> tuple[torch.dtype, str]:
        """bfloat16 from compute capability 8.0 on, else float16."""
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "the GPU multiplies bfloat16 natively"
        return torch.float16, "the GPU has no native bfloat16 arithmetic"

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the GPU."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return free, total

    def host_memory(self) -> int:
        """See Device."""
        return _available_memory()

    def peak_memory_mib(self) -> float:
        """Peak allocated by torch on the GPU."""
        return torch.cuda.max_memory_allocated(self.torch_device) / (1 << 20)

    def peak_bytes_of(self, work: Callable[[], object]) -> int | None:
        """See Device. What it held is given back to the GPU."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
        work()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self.torch_device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        return peak - before

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self.torch_device)

    def tensor(self, values: object, dtype: torch.dtype) -> Tensor:
        """See Device."""
        return to_device(values, dtype, self.torch_device)

    def read_back(self, tensor: Tensor) -> Readable:
        """See Device."""
        return CudaReadback(tensor)

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Pinned memory. torch takes the next power of two of bytes for it."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def declare(
        self,
        stream: Stream,
        reads: Iterable[tuple[str, int, int]] = (),
        writes: Iterable[tuple[str, int, int]] = (),
    ) -> None:
        """Nobody checks."""

    def share_cores(self, with_copies: bool) -> None:
        """Copies have engines of their own."""

    def close_streams(self) -> None:
        """See Device."""
        self.synchronize()


def make_device(
    name: str, num_threads: int | None, copy_workers: bool = False, max_delay_s: float = 0.0
) -> Device:
    """The Device called "auto", "cpu", "cuda" or "cuda:N". Raises ConfigError for anything else.

    copy_workers: copies on a CPU run on threads. max_delay_s: copies on streams or threads are held
    up by random delays of up to so many seconds.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return CpuDevice(num_threads, copy_workers, max_delay_s)
    if name == "cuda" or (name.startswith("cuda:") and name[5:].isdigit()):
        return CudaDevice(name, max_delay_s)
    raise ConfigError(f'device must be "auto", "cpu", "cuda" or "cuda:N", got {name!r}')


def _read_kib(path: str, name: str) -> int:
    with open(path) as lines:
        info = dict(line.split(":", 1) for line in lines)
    return int(info[name].split()[0])


def _available_memory() -> int:
    try:
        return _read_kib("/proc/meminfo", "MemAvailable") << 10
    except (OSError, KeyError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _peak_resident_kib() -> float:
    """The system's own mark: getrusage's is carried over from the process that started this one."""
    try:
        return _read_kib("/proc/self/status", "VmHWM")
    except (OSError, KeyError):
        unit = 1024 if sys.platform == "darwin" else 1
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _num_threads() -> int:
    """What OMP_NUM_THREADS says, as for every other OpenMP program; else all usable cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked):
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
