"""NVIDIA GPUs: streams, events and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from nanoengine.devices.copy_streams import (
    Convert,
    Delays,
    Event,
    FailedCopy,
    Stream,
)
from nanoengine.devices.cpu import available_memory
from nanoengine.devices.device import Readable, to_device
from nanoengine.errors import ConfigError

CYCLES_PER_S = 1_500_000_000  # a GPU's clock, about


class CudaStream:
    """A CUDA stream; a random delay before each copy reveals missing waits."""

    def __init__(self, name: str, stream: torch.cuda.Stream, max_delay_s: float = 0.0) -> None:
        self.name = name
        self._stream = stream
        self._delays = Delays(name, max_delay_s)
        self._failed: list[FailedCopy] = []

    def copy(
        self, dst: Tensor, src: Tensor, owner: object = None, convert: Convert | None = None
    ) -> None:
        """Only errors on the host fail a single copy: an error on the GPU makes it unusable.

        Memory that `convert` allocates and frees is reused on this stream only, so in order.
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
        failed, self._failed = self._failed, []
        return failed

    def fill(self, dst: Tensor, value: float) -> None:
        """Pinned memory is filled by a copy, so that the order of the stream holds."""
        with torch.cuda.stream(self._stream):
            if dst.is_cuda:
                dst.fill_(value)
            else:
                filled = torch.full(dst.shape, value, dtype=dst.dtype, device=self._stream.device)
                dst.copy_(filled, non_blocking=True)

    def record(self) -> Event:
        return CudaEvent(self._stream.record_event())

    def wait(self, event: Event) -> None:
        """The host does not wait."""
        if isinstance(event, CudaEvent):
            self._stream.wait_event(event.event)


class CudaEvent:
    """A CUDA event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaReadback:
    """A copy to pinned memory that does not wait for later work of the stream."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._done = torch.cuda.current_stream().record_event()

    def tolist(self) -> list[Any]:
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
        return available_memory()

    def peak_memory_mib(self) -> float:
        """Peak of torch's allocations on the GPU, MiB."""
        return torch.cuda.max_memory_allocated(self.torch_device) / (1 << 20)

    def peak_bytes_of(self, work: Callable[[], object]) -> int | None:
        """Also returns the memory that `work` held to the GPU."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
        work()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self.torch_device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        return peak - before

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def tensor(self, values: object, dtype: torch.dtype) -> Tensor:
        return to_device(values, dtype, self.torch_device)

    def read_back(self, tensor: Tensor) -> Readable:
        return CudaReadback(tensor)

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Pinned memory. torch rounds its size up to a power of two."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def declare(
        self,
        stream: Stream,
        reads: Iterable[tuple[str, int, int]] = (),
        writes: Iterable[tuple[str, int, int]] = (),
    ) -> None:
        """Ignored: only stream_check.py checks accesses."""

    def share_cores(self, with_copies: bool) -> None:
        """Nothing to do: a GPU's copies need no cores."""

    def close_streams(self) -> None:
        self.synchronize()
