"""The one file that knows a platform: dtype, memory, threads, and which streams it has.

Everything else asks a Device and never looks at `torch.cuda` or the machine itself.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import os
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nanoengine.config import MAX_THREADS
from nanoengine.devices.copy_streams import (
    Convert,
    Delays,
    Event,
    FailedCopy,
    InlineStream,
    Stream,
    WorkerStream,
)
from nanoengine.devices.home_process import HomeProcess
from nanoengine.errors import ConfigError

CYCLES_PER_S = 1_500_000_000  # of a GPU, about
# Of the two versions of control groups: where they are, a group's limit and use, and of the latter
# what the system takes back first.
GROUPS_V2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
GROUPS_V1 = (
    *("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    "total_inactive_file",
)


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
        if self.num_threads > 1:
            _home_of_threads().check("OpenMP (num_threads=1 does without)")
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
        return available_memory()

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
        self._delays = Delays(name, max_delay_s)
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
        return available_memory()

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
    if name == "cuda":
        return CudaDevice(name, max_delay_s)
    if re.fullmatch("cuda:(0|[1-9][0-9]{0,8})", name):
        num_gpus = torch.cuda.device_count()
        if torch.cuda.is_available() and int(name[5:]) >= max(1, num_gpus):
            raise ConfigError(
                f"device={name!r} was asked for, but the last of {num_gpus} is cuda:{num_gpus - 1}"
            )
        return CudaDevice(name, max_delay_s)
    raise ConfigError(f'device must be "auto", "cpu", "cuda" or "cuda:N", got {name!r}')


def _read_kib(path: Path, name: str) -> int:
    with open(path) as lines:
        info = dict(line.split(":", 1) for line in lines)
    return int(info[name].split()[0])


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that the process may still take: what the machine has, or what a control
    group (a container's limit) leaves, if that is less. root: where the machine's files are.
    """
    try:
        available = _read_kib(root / "proc/meminfo", "MemAvailable") << 10
    except (OSError, KeyError):
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([available, *_left_by_groups(root)])


def _left_by_groups(root: Path) -> Iterator[int]:
    """What each limit leaves: on the process's control group, and on those above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        top, *files = GROUPS_V1 if controllers else GROUPS_V2
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            left = _left_by_group((root / top).joinpath(*parts[:depth]), *files)
            if left is not None:
                yield left


def _left_by_group(folder: Path, limit: str, used: str, cache: str) -> int | None:
    """What a group may still take, which counts what it only caches; None without a limit."""
    try:
        most, current = (int((folder / name).read_text()) for name in (limit, used))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, most - current + int(stat[cache]))
    except (OSError, ValueError, KeyError):  # not here, or "max"
        return None


def _peak_resident_kib() -> float:
    """The system's own mark: getrusage's is carried over from the process that started this one."""
    try:
        return _read_kib(Path("/proc/self/status"), "VmHWM")
    except (OSError, KeyError):
        unit = 1024 if sys.platform == "darwin" else 1
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


@functools.cache
def _home_of_threads() -> HomeProcess:
    """The first process that computes with several threads; a fork of it inherits the answer."""
    return HomeProcess()


def _num_threads() -> int:
    """What OMP_NUM_THREADS says, as for every other OpenMP program; else all usable cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    digits = asked.lstrip("0")
    if digits.isdecimal():
        if len(digits) > 9 or int(digits) > MAX_THREADS:
            raise ConfigError(
                f"OMP_NUM_THREADS={asked[:20]} is above {MAX_THREADS} threads; lower it, or give "
                "num_threads"
            )
        return int(digits)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
