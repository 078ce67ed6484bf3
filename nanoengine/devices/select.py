"""Makes the Device of a name."""

from __future__ import annotations

import re

import torch

from nanoengine.devices.accelerator import ACCELERATORS, AcceleratorDevice
from nanoengine.devices.cpu import CpuDevice
from nanoengine.devices.cuda import CudaDevice
from nanoengine.devices.device import Device
from nanoengine.errors import ConfigError


def resolved(name: str) -> str:
    """The name of a device, with "auto" as what this machine has."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def make_device(
    name: str, num_threads: int | None, copy_workers: bool = False, max_delay_s: float = 0.0
) -> Device:
    """The Device called "auto", "cpu", "cuda", "xpu" or "npu", or "cuda:N" and so on. "auto" is a
    CUDA GPU or the CPU: the others are new. Raises ConfigError for anything else.

    copy_workers: run a CPU's copies on threads. max_delay_s: longest random delay in seconds before
    a copy on a stream or thread.
    """
    name = resolved(name)
    if name == "cpu":
        return CpuDevice(num_threads, copy_workers, max_delay_s)
    kinds = "|".join(("cuda", *ACCELERATORS))
    if re.fullmatch(f"({kinds})(:(0|[1-9][0-9]{{0,8}}))?", name):
        kind = CudaDevice if name.startswith("cuda") else AcceleratorDevice
        return kind(name, max_delay_s)
    raise ConfigError(f'device must be "auto", "cpu", "cuda", "xpu" or "npu", got {name!r}')
