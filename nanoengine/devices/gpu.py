"""What the GPUs of all vendors have in common: streams, events, memory and graphs.

torch.cuda and torch.accelerator call most of it alike; cuda.py and accelerator.py have the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanoengine.devices.copy_streams import Convert, Delays, Event, FailedCopy, Stream
from nanoengine.devices.cpu import available_memory
from nanoengine.devices.device import Device, Readable, to_device
from nanoengine.errors import EngineError

POLL_S = 50e-6  # between looks at an event, where another rank may die meanwhile

# Vendor's class of graphs -> how to capture one while another thread may be taking host memory.
GRAPHS: dict[str, dict[str, Any]] = {
    "CUDAGraph": {"capture_error_mode": "thread_local"},
    "NPUGraph": {"capture_error_mode": "thread_local"},
    "XPUGraph": {},
}


class GpuStream:
    """A stream of torch; a random delay before each copy reveals missing waits."""

    def __init__(
        self,
        name: str,
        stream: Any,
        max_delay_s: float = 0.0,
        sleep: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        """sleep: queues work that takes so many seconds on the stream that is entered."""
        self.name = name
        self._stream = stream
        self._delays = Delays(name, max_delay_s)
        self._sleep = sleep
        self._failed: list[FailedCopy] = []

    def copy(
        self, dst: Tensor, src: Tensor, owner: object = None, convert: Convert | None = None
    ) -> None:
        """Only errors on the host fail a single copy: an error on the GPU makes it unusable.

        Memory that `convert` allocates and frees is reused on this stream only, so in order.
        """
        try:
            with self._entered():
                if delay_s := self._delays.next():
                    self._sleep(delay_s)
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
        with self._entered():
            if dst.device.type != "cpu":
                dst.fill_(value)
            else:
                filled = torch.full(dst.shape, value, dtype=dst.dtype, device=self._stream.device)
                dst.copy_(filled, non_blocking=True)

    def record(self) -> Event:
        return GpuEvent(self._stream.record_event())

    def wait(self, event: Event) -> None:
        """The host does not wait."""
        if isinstance(event, GpuEvent):
            self._stream.wait_event(event.event)

    def _entered(self) -> AbstractContextManager[Any]:
        """Work of the block is queued here."""
        entered: AbstractContextManager[Any] = self._stream
        return entered


class GpuEvent:
    """An event of torch."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def is_done(self) -> bool:
        return bool(self.event.query())


class GpuReadback:
    """A copy to pinned memory that does not wait for later work of the stream it is queued on."""

    def __init__(self, tensor: Tensor, stream: Any, await_event: Callable[[Any], None]) -> None:
        """stream: the current one. await_event: lets the host wait for an event of torch."""
        self._await_event = await_event
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._done = stream.record_event()

    def tolist(self) -> list[Any]:
        self._await_event(self._done)
        numbers: list[Any] = self._host.tolist()
        return numbers


class GpuDevice(Device):
    """One GPU: compute on the current stream, one copy stream each way."""

    is_checked = False
    computes_later = True

    def __init__(
        self, name: str, torch_device: torch.device, runtime: Any, streams: tuple[GpuStream, ...]
    ) -> None:
        """runtime: torch.cuda or torch.accelerator. streams: for compute, to the GPU, from it."""
        self.name = name
        self.torch_device = torch_device
        self._runtime = runtime
        self._look: Callable[[float], None] | None = None
        self.compute: Stream
        self.h2d: Stream
        self.d2h: Stream
        self.compute, self.h2d, self.d2h = streams

    def host_memory(self) -> int:
        return available_memory()

    def peak_memory_mib(self) -> float:
        """Peak of torch's allocations on the GPU, MiB."""
        return int(self._runtime.max_memory_allocated(self.torch_device)) / (1 << 20)

    def peak_bytes_of(self, work: Callable[[], object]) -> int | None:
        """Also returns the memory that `work` held to the GPU."""
        self._runtime.reset_peak_memory_stats(self.torch_device)
        before: int = self._runtime.memory_allocated(self.torch_device)
        work()
        self.synchronize()
        peak: int = self._runtime.max_memory_allocated(self.torch_device)
        self._runtime.empty_cache()
        self._runtime.reset_peak_memory_stats(self.torch_device)
        return peak - before

    def synchronize(self) -> None:
        if self._look is None:
            self._runtime.synchronize(self.torch_device)
            return
        for stream in (self.compute, self.h2d, self.d2h):
            event = stream.record()
            assert isinstance(event, GpuEvent)
            self._await_event(event.event)

    def watch(self, look: Callable[[float], None]) -> None:
        self._look = look

    def _await_event(self, event: Any) -> None:
        """Let the host wait for an event of torch."""
        if self._look is None:
            event.synchronize()
            return
        begin = time.monotonic()
        while not event.query():
            self._look(time.monotonic() - begin)
            time.sleep(POLL_S)

    def tensor(self, values: object, dtype: torch.dtype) -> Tensor:
        return to_device(values, dtype, self.torch_device)

    def read_back(self, tensor: Tensor) -> Readable:
        return GpuReadback(tensor, self._runtime.current_stream(), self._await_event)

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Pinned memory. torch rounds its size up to a power of two."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def close_streams(self) -> None:
        with suppress(EngineError):  # of ranks that have ended: what waits for them never ends
            self.synchronize()


@dataclass(frozen=True, slots=True)
class VendorGraphs:
    """How a vendor's graphs are made: CUDA's names are all vendors' names.

    new_pool: memory that graphs share; new: an empty graph; capture(graph, pool): a block whose
    work it holds.
    """

    new_pool: Callable[[], Any]
    new: Callable[[], Any]
    capture: Callable[[Any, Any], AbstractContextManager[Any]]


def find_graphs(device: torch.device) -> VendorGraphs | None:
    """The graphs of the device's module of torch; None if the vendor has none."""
    module = torch.get_device_module(device)
    for name, options in GRAPHS.items():
        if hasattr(module, name):
            # torch's own is on the GPU that was the current one at the first capture of all.
            own = {"stream": module.Stream(device)}

            def capture(
                graph: Any, pool: Any, options: dict[str, Any] = own | options
            ) -> AbstractContextManager[Any]:
                block: AbstractContextManager[Any] = module.graph(graph, pool=pool, **options)
                return block

            return VendorGraphs(module.graph_pool_handle, getattr(module, name), capture)
    return None
