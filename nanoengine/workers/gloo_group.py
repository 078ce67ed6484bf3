"""GlooGroup: a group over PyTorch's gloo, on loopback, that leaves torch.distributed alone.

It needs no C compiler, and it is the slower one: see benchmarks/gathers.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo, Work

from nanoengine.errors import EngineError
from nanoengine.workers.group import check_part, check_whole

_CONNECT_S = 60.0


class GlooGroup:
    """A Group (see group.py). abort wakes this rank; peers notice when they next wait for it."""

    def __init__(self, store: Path, rank: int, size: int, timeout_s: float = 300.0) -> None:
        """Meets the other ranks, and returns when all are there. Raises EngineError.

        store      where to make a file: the same path for all ranks, in a folder that is ours
                   alone, and that can go once rank 0 has its group
        timeout_s  how long a call waits for other ranks
        """
        self.rank, self.size = rank, size
        self.tape, self.can_replay = None, False
        self._end = ""  # why the group has ended, if it has
        self._works: list[Work] = []
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=_CONNECT_S)
        try:
            options._devices = [ProcessGroupGloo.create_device(interface="lo")]
            gloo: Any = ProcessGroupGloo(FileStore(str(store), size), rank, size, options)
            gloo.barrier().wait()  # the file is read no more
        except RuntimeError as error:
            raise EngineError(f"rank {rank} of {size} did not meet the others: {error}") from error
        gloo.set_timeout(timedelta(seconds=timeout_s))
        self._gloo: Any = gloo  # its type hints lack half of it

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        check_part(part, widths, self.rank, self.size)
        parts = self._parts(part, widths)
        self._send(dict(enumerate(parts)))
        return torch.cat(parts, dim=1)

    def gather_to_first(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        check_part(part, widths, self.rank, self.size)
        parts = self._parts(part, widths)
        self._send({rank: each for rank, each in enumerate(parts) if rank})
        return None if self.rank else torch.cat(parts, dim=1)

    def broadcast(self, tensor: Tensor) -> Tensor:
        check_whole(tensor, self.rank)
        tensor = tensor.contiguous()
        self._send({0: tensor})
        return tensor

    def check(self, waited_s: float = 0.0) -> None:
        """Nothing is queued."""

    def abort(self) -> None:
        self._end = self._end or "it was aborted"
        if (gloo := self._gloo) is not None:  # another thread may close the group
            _close_connections(gloo, (self.rank + 1) % self.size)

    def close(self) -> None:
        if any(not work.is_completed() for work in self._works):
            self.abort()  # gloo's destructor would wait for the peers
        self._end = self._end or "it was closed"
        self._works, self._gloo = [], None

    def _parts(self, part: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """This rank's part and memory for those of the others, contiguous."""
        return [
            part.contiguous() if rank == self.rank else part.new_empty(len(part), width)
            for rank, width in enumerate(widths)
        ]

    def _send(self, tensors: dict[int, Tensor]) -> None:
        """Each tensor from the rank of its number to all, at once; they are contiguous."""
        gloo = self._gloo
        if gloo is None:
            raise EngineError(f"the group of ranks has ended: {self._end}")
        rows = {rank: _bytes(tensor) for rank, tensor in tensors.items() if tensor.numel()}
        try:
            self._works = [gloo.broadcast(row, rank) for rank, row in rows.items()]
            for work in self._works:
                work.wait()
        except RuntimeError as error:  # a peer has died or is late, or another thread aborts
            text = str(error).rpartition("] ")[2].partition(". ")[0]  # without gloo's own lines
            self._end = self._end or f"a rank has died, or did not come in time: {text}"
            self.abort()
            raise EngineError(f"the group of ranks has ended: {self._end}") from error


def _bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as a row of bytes; PyTorch's view refuses some that have one element."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _close_connections(gloo: Any, peer: int) -> None:
    """Ends what this rank waits for, at once. Gloo has no call for that; but when someone's
    patience with a message ends, it closes all connections: here with one that nobody sends.
    """
    with suppress(RuntimeError):
        gloo.recv([torch.empty(1)], peer, 1).wait(timedelta(milliseconds=1))
