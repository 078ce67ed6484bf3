"""NVIDIA GPUs, and AMD's, which PyTorch gives the same names: torch.cuda."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from nanoengine.devices.gpu import GpuDevice, GpuStream
from nanoengine.errors import ConfigError

CYCLES_PER_S = 1_500_000_000  # a GPU's clock, about


class CudaStream(GpuStream):
    """A CUDA stream."""

    def _entered(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)


class CudaDevice(GpuDevice):
    """One NVIDIA GPU."""

    def __init__(self, name: str = "cuda", max_delay_s: float = 0.0) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device={name!r} was asked for, but this PyTorch sees no CUDA GPU; "
                'use device="cpu" or install a CUDA build of torch'
            )
        index, count = torch.device(name).index, torch.cuda.device_count()
        if index is not None and index >= max(1, count):
            raise ConfigError(
                f"device={name!r} was asked for, but the last of {count} is cuda:{count - 1}"
            )
        device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        torch.cuda.set_device(device)
        copying = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
        streams = (
            CudaStream("compute", torch.cuda.current_stream()),
            CudaStream("h2d", copying[0], max_delay_s, _sleep),
            CudaStream("d2h", copying[1], max_delay_s, _sleep),
        )
        super().__init__(name, device, torch.cuda, streams)

    def auto_dtype(self) -> tuple[torch.dtype, str]:
        """bfloat16 from compute capability 8.0 on, else float16."""
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "the GPU multiplies bfloat16 natively"
        return torch.float16, "the GPU has no native bfloat16 arithmetic"

    def memory(self) -> tuple[int, int]:
        self._runtime.empty_cache()  # what loading left is free, too
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return free, total

    def begin_step(self) -> None:
        """Triton launches on the current GPU, which another thread or engine may have changed."""
        torch.cuda.set_device(self.torch_device)


def _sleep(seconds: float) -> None:
    """Queue work that takes about so long on the current stream."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_S))  # type: ignore[no-untyped-call]
