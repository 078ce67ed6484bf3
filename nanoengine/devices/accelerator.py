"""Accelerators of other vendors, by the names that PyTorch has for all: torch.accelerator,
torch.Stream, torch.Event. No such device has run this yet; tests run it on one made of the CPU.
"""

from __future__ import annotations

from importlib import import_module

import torch

from nanoengine.devices.gpu import GpuDevice, GpuStream
from nanoengine.errors import ConfigError

# Kind of device -> who makes it, and the package that brings it to PyTorch, if it needs one.
ACCELERATORS = {"xpu": ("Intel's GPUs", ""), "npu": ("Ascend", "torch_npu")}


class AcceleratorDevice(GpuDevice):
    """One accelerator of ACCELERATORS."""

    def __init__(self, name: str, max_delay_s: float = 0.0) -> None:
        """name: a kind of ACCELERATORS, or "xpu:N" for the N-th. Raises ConfigError."""
        kind, _, number = name.partition(":")
        _bring(name, kind)
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None or found.type != kind:
            seen = "no accelerator" if found is None else f"only {found.type!r}"
            raise ConfigError(
                f'device={name!r} was asked for, but this PyTorch sees {seen}; use device="cpu", '
                f"or install PyTorch for {ACCELERATORS[kind][0]} and its driver"
            )
        count = torch.accelerator.device_count()
        if number and int(number) >= count:
            raise ConfigError(
                f"device={name!r} was asked for, but the last of {count} is {kind}:{count - 1}"
            )
        if max_delay_s:
            raise ConfigError(
                f"debug_copy_delay_ms is not supported on {kind!r}: PyTorch has no work that takes "
                "a given time there; leave it out"
            )
        index = int(number) if number else torch.accelerator.current_device_index()
        device = torch.device(kind, index)
        torch.accelerator.set_device_index(device)
        streams = (
            GpuStream("compute", torch.accelerator.current_stream(device)),
            GpuStream("h2d", torch.Stream(device)),
            GpuStream("d2h", torch.Stream(device)),
        )
        super().__init__(name, device, torch.accelerator, streams)

    def auto_dtype(self) -> tuple[torch.dtype, str]:
        """bfloat16 where the device's tensors can have it, else float16."""
        known = torch.accelerator.get_device_capability(self.torch_device)["supported_dtypes"]
        if torch.bfloat16 in known:
            return torch.bfloat16, "the device has bfloat16"
        return torch.float16, "the device has no bfloat16"

    def memory(self) -> tuple[int, int]:
        self._runtime.empty_cache()  # what loading left is free, too
        free, total = torch.accelerator.get_memory_info(self.torch_device)
        return free, total

    def begin_step(self) -> None:
        torch.accelerator.set_device_index(self.torch_device)


def _bring(name: str, kind: str) -> None:
    """Import the package of this kind of device. Raises ConfigError with what is missing."""
    vendor, package = ACCELERATORS[kind]
    if not package:
        return
    try:
        import_module(package)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"device={name!r} needs the package {package}, which brings {vendor} to PyTorch, and "
            f"it cannot be imported ({error}); install the one for torch {torch.__version__}"
        ) from error
