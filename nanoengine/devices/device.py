"""What a platform is: a Device, and tensors on it.

Everything else asks a Device and never looks at `torch.cuda` or the machine itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from nanoengine.devices.copy_streams import (
    Stream,
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
