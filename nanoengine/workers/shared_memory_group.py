"""SharedMemoryGroup: a group whose ranks are on one machine, over memory that they share.

The memory has no name and belongs to no folder: it is a file descriptor that worker processes
inherit. shared_gather.c has the layout, and who waits for whom.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from nanoengine.errors import EngineError
from nanoengine.kernels import c_build
from nanoengine.kernels.call_tape import CallTape
from nanoengine.workers.group import check_part, check_whole

SOURCE = Path(c_build.__file__).with_name("shared_gather.c")
# One field per member of call_t in shared_gather.c, in that order; then the widths.
_CALL = "=3Q4q{}q"
# How long a call waits in C, which hears no signal, before Python may look up.
PATIENCE_S = 0.1
_NOT_YET = 2
_ENDINGS = {
    1: "it was aborted, or another rank has failed",
    _NOT_YET: "rank {0} did not come within {1:g} s",
    3: "rank {0} gives rows of another shape than rank {2}",
}


def make_region(size: int, folder: Path | None = None) -> int:
    """A file descriptor of memory for one group of `size` ranks; the caller closes it.

    folder: as in c_build.load_library. Raises KernelBuildError.
    """
    num_bytes = _load(folder).region_bytes(size)
    fd = os.memfd_create("nanoengine-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


class SharedMemoryGroup:
    """A Group (see group.py). abort wakes the ranks of all processes."""

    def __init__(
        self,
        fd: int,
        rank: int,
        size: int,
        tape: CallTape | None = None,
        timeout_s: float = 300.0,
        folder: Path | None = None,
    ) -> None:
        """Maps the memory, without waiting for anyone. Raises EngineError.

        fd         of `make_region`, whose process may have passed it on; it can be closed after
        tape       records gathers with their tensors, so that a replay makes them again
        timeout_s  how long a call waits for another rank
        folder     as in c_build.load_library
        """
        self.rank, self.size, self.can_replay = rank, size, True
        self._timeout_s = timeout_s
        self._library = _load(folder)
        self.tape = tape or CallTape(self._library)
        self._calling, self._closing = threading.Lock(), threading.Lock()
        self._handle: int | None = self._library.open_group(fd, rank, size)
        if self._handle is None:
            raise EngineError(f"descriptor {fd} is no shared memory for a group of {size} ranks")

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        check_part(part, widths, self.rank, self.size)
        out = part.new_empty(part.shape[0], sum(widths))
        self._record(part, out, widths)
        return out

    def gather_to_first(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        check_part(part, widths, self.rank, self.size)
        out = None if self.rank else part.new_empty(part.shape[0], sum(widths))
        self._record(part, out, widths)
        return out

    def broadcast(self, tensor: Tensor) -> Tensor:
        check_whole(tensor, self.rank)
        tensor = tensor.contiguous()
        row = tensor.view(1, tensor.numel())
        widths = [tensor.numel(), *[0] * (self.size - 1)]
        self._record(row[:, : widths[self.rank]], row if self.rank else None, widths)
        return tensor

    def check(self, waited_s: float = 0.0) -> None:
        """Nothing is queued."""

    def abort(self) -> None:
        with self._closing:
            if self._handle is not None:
                self._library.abort_group(self._handle)

    def close(self) -> None:
        if self._calling.locked():
            self.abort()
        with self._calling, self._closing:
            if self._handle is not None:
                self._library.close_group(self._handle)
            self._handle = None

    def _record(self, part: Tensor, out: Tensor | None, widths: Sequence[int]) -> None:
        if part.stride(1) != 1:
            part = part.contiguous()
        item = part.itemsize
        call = struct.pack(
            _CALL.format(self.size),
            self._handle or 0,
            part.data_ptr(),
            0 if out is None else out.data_ptr(),
            part.stride(0) * item,
            0 if out is None else out.stride(0) * item,
            part.shape[0],
            int(PATIENCE_S * 1e9),
            *(width * item for width in widths),
        )
        self.tape.call(self._gather, (call,), part, out)

    def _gather(self, call: bytes) -> None:
        with self._calling:
            if self._handle is None:
                raise EngineError("the group of ranks was closed")
            try:
                status = self._library.gather(call)
                if status & 0xFF == _NOT_YET:
                    status = self._go_on(call, status)
            except BaseException:  # half of the call was made, and cannot be taken back
                self.abort()
                raise
        if status:
            self.abort()
            why = _ENDINGS[status & 0xFF].format(status >> 8, self._timeout_s, self.rank)
            raise EngineError(f"the group of ranks has ended: {why}")

    def _go_on(self, call: bytes, status: int) -> int:
        """Wait on. Waits are counted, since a clock goes on while this process is stopped."""
        for _ in range(math.ceil(self._timeout_s / PATIENCE_S) - 1):
            status = self._library.gather(call)
            if status & 0xFF != _NOT_YET:
                break
        return status


def _load(folder: Path | None) -> ctypes.CDLL:
    library = c_build.load_library(SOURCE, folder)
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.region_bytes.argtypes, library.region_bytes.restype = [integer], integer
    library.open_group.argtypes = [ctypes.c_int, integer, integer]
    library.open_group.restype = pointer
    library.gather.argtypes, library.gather.restype = [ctypes.c_char_p], integer
    library.abort_group.argtypes = library.close_group.argtypes = [pointer]
    library.abort_group.restype = library.close_group.restype = None
    return library
