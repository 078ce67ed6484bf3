"""The CPU as a device: its memory, its threads, and streams that run inline or on threads."""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import os
import platform
import resource
import sys
from pathlib import Path

import torch
from torch import Tensor

from nanoengine.config.engine import MAX_THREADS
from nanoengine.devices.control_groups import memory_left, processors
from nanoengine.devices.copy_streams import InlineStream, Stream, WorkerStream
from nanoengine.devices.device import Device, Readable
from nanoengine.devices.free_cores import FreeCores, usable_cores
from nanoengine.devices.home_process import HomeProcess
from nanoengine.errors import ConfigError


class CpuDevice(Device):
    """The CPU. Compute runs inline; copies run inline or on a worker thread for each direction."""

    name = "cpu"
    is_checked = False
    computes_later = False
    torch_device = torch.device("cpu")

    def __init__(
        self, num_threads: int | None = None, copy_workers: bool = False, max_delay_s: float = 0.0
    ) -> None:
        self.num_threads = num_threads or default_threads()
        self._is_asked = num_threads is not None or bool(os.environ.get("OMP_NUM_THREADS"))
        self._free_cores: FreeCores | None = None
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
        return native_dtype()

    def memory(self) -> tuple[int, int]:
        """Available and total bytes of the machine's memory."""
        return self.host_memory(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def host_memory(self) -> int:
        return available_memory()

    def peak_memory_mib(self) -> float:
        """Peak resident set of the process."""
        return _peak_resident_kib() / 1024

    def synchronize(self) -> None:
        for worker in self._workers:
            self.compute.wait(worker.record())

    def tensor(self, values: object, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    def read_back(self, tensor: Tensor) -> Readable:
        """The tensor itself, which is in host memory."""
        return tensor

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory whose pages the system gives on the first write; large pages if it has them.

        With 4 KiB pages, copies ran at half the speed in some processes.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(shape, dtype=dtype)
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=dtype).view(shape)

    def share_cores(self, with_copies: bool) -> None:
        """With 2 cores, copies and compute on both make a streamed step up to 1.6 times slower."""
        if self._workers and self.num_threads > 1:
            torch.set_num_threads(self.num_threads - with_copies)

    def follow_free_cores(self) -> None:
        """Copy workers share the cores in their own way, see share_cores."""
        if self.num_threads > 1 and not self._is_asked and not self._workers:
            self._free_cores = FreeCores(self.num_threads)

    def begin_step(self) -> None:
        if self._free_cores is not None and self._free_cores.look() != torch.get_num_threads():
            torch.set_num_threads(self._free_cores.num_threads)

    def close_streams(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = []


def _read_kib(path: Path, name: str) -> int:
    with open(path) as lines:
        info = dict(line.split(":", 1) for line in lines)
    return int(info[name].split()[0])


def processor_name() -> str:
    """The processor's own name, or what Python knows of it."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def native_dtype() -> tuple[torch.dtype, str]:
    """bfloat16 where the CPU multiplies it natively, else float32; and the reason."""
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return torch.bfloat16, "the CPU multiplies bfloat16 natively"
    return torch.float32, "the CPU has no native bfloat16 arithmetic"


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that the process may still take: the machine's available memory, or what a
    control group (a container's limit) leaves if that is less. root: folder of the system's files.
    """
    try:
        available = _read_kib(root / "proc/meminfo", "MemAvailable") << 10
    except (OSError, KeyError):
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([available, *memory_left(root)])


def _peak_resident_kib() -> float:
    """Peak from /proc: getrusage's figure includes the process that started this one."""
    try:
        return _read_kib(Path("/proc/self/status"), "VmHWM")
    except (OSError, KeyError):
        unit = 1024 if sys.platform == "darwin" else 1
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


@functools.cache
def _home_of_threads() -> HomeProcess:
    """The first process that computes with several threads; cached, so a fork inherits it."""
    return HomeProcess()


def default_threads(root: Path = Path("/")) -> int:
    """OMP_NUM_THREADS if it is set, as in every OpenMP program: the first of a list, which is of
    nested regions; else all cores that the process may use, in whole ones of what its container's
    limit allows. root: folder of the system's files.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    digits = asked.lstrip("0")
    if digits.isdecimal():
        if len(digits) > 9 or int(digits) > MAX_THREADS:
            raise ConfigError(
                f"OMP_NUM_THREADS={asked[:20]} is above {MAX_THREADS} threads; lower it, or give "
                "num_threads"
            )
        return int(digits)
    return max(1, int(min([len(usable_cores()), *processors(root)])))
