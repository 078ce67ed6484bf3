"""The one file that knows a platform: which dtype, how much memory, how many threads.

Everything else asks a Device and never looks at `torch.cuda` or the machine itself.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Protocol

import torch

from nanoengine.errors import ConfigError


class Device(Protocol):
    """One compute device and its memory."""

    name: str
    torch_device: torch.device

    def auto_dtype(self) -> tuple[torch.dtype, str]:
        """The dtype that "auto" means here, and why."""
        ...

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        ...

    def peak_memory_mib(self) -> float:
        """Most memory that this process has held so far, MiB."""
        ...

    def synchronize(self) -> None:
        """Wait for all queued work."""
        ...


class CpuDevice:
    """The host itself."""

    name = "cpu"
    torch_device = torch.device("cpu")

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = num_threads or _usable_cores()
        torch.set_num_threads(self.num_threads)

    def auto_dtype(self) -> tuple[torch.dtype, str]:
        """bfloat16 where the CPU multiplies it natively, else float32."""
        if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
            return torch.bfloat16, "the CPU multiplies bfloat16 natively"
        return torch.float32, "the CPU has no native bfloat16 arithmetic"

    def memory(self) -> tuple[int, int]:
        """MemAvailable and MemTotal of the machine."""
        page = os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * page
        try:
            with open("/proc/meminfo") as lines:
                info = dict(line.split(":", 1) for line in lines)
            return int(info["MemAvailable"].split()[0]) << 10, total
        except (OSError, KeyError):
            return os.sysconf("SC_AVPHYS_PAGES") * page, total

    def peak_memory_mib(self) -> float:
        """Peak resident set of the process."""
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / (1 << 20)

    def synchronize(self) -> None:
        """Nothing is queued on a CPU."""


class CudaDevice:
    """One NVIDIA GPU."""

    def __init__(self, name: str = "cuda") -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device={name!r} was asked for, but this PyTorch sees no CUDA GPU; "
                'use device="cpu" or install a CUDA build of torch'
            )
        self.name = name
        self.torch_device = torch.device(name)
        torch.cuda.set_device(self.torch_device)

    def auto_dtype(self) -> tuple[torch.dtype, str]:
        """bfloat16 from compute capability 8.0 on, else float16."""
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "the GPU multiplies bfloat16 natively"
        return torch.float16, "the GPU has no native bfloat16 arithmetic"

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the GPU."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return free, total

    def peak_memory_mib(self) -> float:
        """Peak allocated by torch on the GPU."""
        return torch.cuda.max_memory_allocated(self.torch_device) / (1 << 20)

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self.torch_device)


def make_device(name: str, num_threads: int | None) -> Device:
    """The Device called "auto", "cpu", "cuda" or "cuda:N". Raises ConfigError for anything else."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return CpuDevice(num_threads)
    if name == "cuda" or (name.startswith("cuda:") and name[5:].isdigit()):
        return CudaDevice(name)
    raise ConfigError(f'device must be "auto", "cpu", "cuda" or "cuda:N", got {name!r}')


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
