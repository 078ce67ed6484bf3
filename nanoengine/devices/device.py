"""The Device protocol, and tensors on a device.

Other code asks a Device and never reads `torch.cuda` or the machine itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from nanoengine.devices.copy_streams import Stream


def to_device(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a tensor. They reach a GPU through pinned memory, so the host does not wait."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type != "cpu":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


class Readable(Protocol):
    """Numbers that are being copied to the host."""

    def tolist(self) -> list[Any]:
        """Wait for the numbers and return them."""
        ...


class Device(Protocol):
    """A compute device, its memory and its streams. What only some of them do does nothing here."""

    name: str
    is_checked: bool  # whether `declare` has an effect
    computes_later: bool  # whether work goes on while the host prepares more
    torch_device: torch.device
    compute: Stream
    h2d: Stream
    d2h: Stream

    def auto_dtype(self) -> tuple[torch.dtype, str]:
        """The dtype of the setting "auto", and the reason for it."""
        ...

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        ...

    def host_memory(self) -> int:
        """Available bytes of host memory."""
        ...

    def peak_memory_mib(self) -> float:
        """Peak memory of this process so far, MiB."""
        ...

    def peak_bytes_of(self, work: Callable[[], object]) -> int | None:
        """Peak device memory that `work` added, in bytes; None if the device does not count it."""
        return None

    def synchronize(self) -> None:
        """Wait for all queued work."""
        ...

    def watch(self, look: Callable[[float], None]) -> None:
        """From now on call `look` with the seconds so far while the host waits for queued work. It
        raises EngineError where that will never end, as another rank has.
        """
        return

    def tensor(self, values: object, dtype: torch.dtype) -> Tensor:
        """Numbers or nested lists of them as a tensor on the device; the host does not wait."""
        ...

    def read_back(self, tensor: Tensor) -> Readable:
        """Start copying a tensor to the host, after the compute work queued so far."""
        ...

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory, of the kind that copies fastest to and from the device."""
        ...

    def declare(
        self,
        stream: Stream,
        reads: Iterable[tuple[str, int, int]] = (),
        writes: Iterable[tuple[str, int, int]] = (),
    ) -> None:
        """Tell stream_check.py that `stream` will access these slots, each (pool, layer, slot)."""
        return

    def share_cores(self, with_copies: bool) -> None:
        """Set whether compute leaves a core to copies, if both run on the same cores."""
        return

    def follow_free_cores(self) -> None:
        """From now on steps take fewer threads while other programs use the cores, unless their
        number was set. For models whose bits do not depend on it.
        """
        return

    def begin_step(self) -> None:
        """A step begins: choose its number of threads; on a GPU it becomes the current one."""
        ...

    def close_streams(self) -> None:
        """Finish queued copies; no more may follow."""
        ...
