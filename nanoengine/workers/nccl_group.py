"""NcclGroup: a group of GPUs, over PyTorch's NCCL, that leaves torch.distributed alone.

Its calls queue work and return. Where the host then waits, it looks whether the group has ended
(Device.watch): what a GPU computes with a rank that has died never ends.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from nanoengine.devices.device import Device
from nanoengine.devices.gpu import VendorGraphs
from nanoengine.errors import ConfigError, EngineError
from nanoengine.workers.group import check_part, check_whole

CONNECT_S = 60.0
ABORT_S = 10.0  # NCCL's own end may hang; then it is left behind
# Read when a group is made. No thread of it ends the process: rank 0 is in the user's.
QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # graphs need it so, too
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}


class Collectives(Protocol):
    """What is used of ProcessGroupNCCL. Without asyncOp, work goes to the current stream."""

    def _allgather_base(self, out: Tensor, part: Tensor, options: Any) -> Any:
        """[n] of each rank -> [size * n] on every rank, in order of rank."""
        ...

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        """Rank 0's values on every rank, in place."""
        ...

    def abort(self) -> None:
        """Ends what is under way on this rank; may hang."""
        ...


def make_collectives(store: Path, rank: int, size: int) -> Collectives:
    """Over a file of ours. Raises ConfigError where this PyTorch has no NCCL."""
    check_nccl()
    nccl: Any = c10d.ProcessGroupNCCL
    meeting = c10d.FileStore(str(store), size)
    meeting.set_timeout(timedelta(seconds=CONNECT_S))
    with _environment(QUIET):
        made: Collectives = nccl(meeting, rank, size, nccl.Options())
    return made


def check_nccl() -> None:
    """Raises ConfigError where this PyTorch has no NCCL."""
    if not hasattr(c10d, "ProcessGroupNCCL"):
        raise ConfigError(
            "tensor_parallel_size above 1 on GPUs needs PyTorch with NCCL, and torch "
            f"{torch.__version__} has none; install a build for Linux and CUDA"
        )


class NcclGroup:
    """A Group (see group.py)."""

    tape = None

    def __init__(
        self,
        store: Path,
        rank: int,
        size: int,
        device: Device,
        graphs: VendorGraphs | None,
        timeout_s: float = 300.0,
    ) -> None:
        """Meets the other ranks, and returns when all are there. Raises EngineError.

        store: as of GlooGroup. graphs: what gathers are recorded in; None: nothing is recorded.
        timeout_s: how long the host waits for what is queued.
        """
        self.rank, self.size, self.can_replay = rank, size, graphs is not None
        self._device, self._place = device, device.torch_device.type
        self._end = ""  # why the group has ended, if it has
        self._timeout_s = CONNECT_S
        # The defaults for calls that return a handle would queue on a stream of NCCL's own.
        self._gathering, self._telling = c10d.AllgatherOptions(), c10d.BroadcastOptions()
        self._gathering.asyncOp = self._telling.asyncOp = False
        self._nccl: Collectives | None = make_collectives(store, rank, size)
        device.watch(self.check)
        self.broadcast(torch.zeros(1, device=device.torch_device))  # connects, before any capture
        device.synchronize()
        if graphs is not None:
            self._check_graphs(graphs)
        self._timeout_s = timeout_s

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """Parts travel as wide as the widest."""
        check_part(part, widths, self.rank, self.size, self._place)
        widest = max(widths)
        if part.shape[1] < widest:
            padded = part.new_zeros(len(part), widest)
            padded[:, : part.shape[1]] = part
            part = padded
        parts = part.new_empty(self.size, len(part), widest)
        if parts.numel():
            part = part.contiguous()
            self._queue(lambda nccl: nccl._allgather_base(parts, part, self._gathering))
        each = [rows[:, :width] for rows, width in zip(parts, widths, strict=True)]
        return torch.cat(each, dim=1)

    def gather_to_first(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        whole = self.gather(part, widths)
        return None if self.rank else whole

    def broadcast(self, tensor: Tensor) -> Tensor:
        check_whole(tensor, self.rank, self._place)
        tensor = tensor.contiguous()
        if tensor.numel():
            self._queue(lambda nccl: nccl.broadcast([tensor], self._telling))
        return tensor

    def check(self, waited_s: float = 0.0) -> None:
        """Raises EngineError if the group has ended, or the host has waited too long for it."""
        if waited_s > self._timeout_s and not self._end:
            self._end = f"a rank did not come within {self._timeout_s:g} s"
            self.abort()
        if self._end:
            raise EngineError(f"the group of ranks has ended: {self._end}")

    def _check_graphs(self, graphs: VendorGraphs) -> None:
        """Record a gather and a broadcast, and replay them with other values. Raises EngineError if
        that fails, or gives other bits than the two themselves.
        """
        rows = torch.arange(6.0, device=self._device.torch_device).view(3, 2)
        widths = [2] * self.size
        part = rows.clone()

        def exchange() -> Tensor:
            return self.broadcast(self.gather(part, widths) + self.rank)

        exchange()  # connects for gathers, too
        self._device.synchronize()
        try:
            graph = graphs.new()
            with graphs.capture(graph, graphs.new_pool()):
                replayed = exchange()
            for factor in (1, 3):
                part.copy_(rows * (factor + self.rank))
                graph.replay()
                differ = (replayed != exchange()).sum().view(1, 1)
                most = self.gather(differ, [1] * self.size).max()  # so that all ranks know
                found = self._device.read_back(most).tolist()
                if found:
                    raise EngineError(f"{found} of {replayed.numel()} values differ")
        except (EngineError, RuntimeError) as error:
            raise EngineError(
                f"a gather and a broadcast of {self.size} GPUs, recorded in a graph and replayed, "
                f"failed: {error}; set enforce_eager=True, which records none"
            ) from error

    def abort(self) -> None:
        """Ends this rank's part at once; what is under way on its GPU a moment later, if at all."""
        self._end = self._end or "it was aborted"
        self._leave()

    def close(self) -> None:
        self._end = self._end or "it was closed"
        if (thread := self._leave()) is not None:
            thread.join(ABORT_S)

    def _queue(self, call: Callable[[Collectives], Any]) -> None:
        nccl = self._nccl
        if nccl is None:
            self.check()
        assert nccl is not None
        try:
            handle = call(nccl)
            if handle is not None:  # of a PyTorch that queues on another stream all the same
                handle.wait()  # the current stream does, not the host
        except RuntimeError as error:
            self._end = self._end or f"NCCL failed: {error}"
            self.check()

    def _leave(self) -> threading.Thread | None:
        """Drop the communicator on a thread of its own; None if that was done."""
        nccl, self._nccl = self._nccl, None
        if nccl is None:
            return None
        thread = threading.Thread(target=nccl.abort, name="nanoengine-nccl-end", daemon=True)
        del nccl
        thread.start()
        return thread


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Variables of this process, for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
