"""Ranks on GPUs made of the CPU (virtual_gpu.py): threads, each with a GPU of its own, and what
stands for NCCL between them.

A call is work on the current stream, as NCCL's is: a graph that is captured meanwhile holds it, and
does it again when replayed. The threads exchange their tensors, and go on when both have come; on
the streams' clocks a call ends on both GPUs at once. A stream never ends what it began with a rank
that is gone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import RankThreads
from torch import Tensor
from virtual_gpu import VirtualGpu, VirtualStream

from nanoengine.errors import EngineError
from nanoengine.workers import leading_rank, nccl_group, rank_setup
from nanoengine.workers.channel import Channel

NEVER = float("inf")
PATIENCE_S = 60.0  # with a rank that makes no call: a test that hangs says so
Given = tuple[str, Tensor, float]  # what is called, this rank's tensor, the time of its stream
Calls = list[tuple[int, str, VirtualStream]]  # rank, what is called, and on which stream


class Wires:
    """Between the ranks of an engine: what each has given to the calls so far."""

    def __init__(self, size: int, calls: Calls) -> None:
        self.size, self.calls = size, calls
        self._news = threading.Condition()
        self._given: list[list[Given]] = [[] for _ in range(size)]
        self._gone: set[int] = set()

    def exchange(self, rank: int, given: Given) -> list[Given] | None:
        """What all ranks give to this rank's next call; None: one is gone."""
        with self._news:
            mine = self._given[rank]
            mine.append(given)
            self._news.notify_all()
            number = len(mine)
            assert self._news.wait_for(
                lambda: self._gone or all(len(each) >= number for each in self._given), PATIENCE_S
            ), f"rank {rank} calls {given[0]}, and another rank calls nothing"
            if any(len(each) < number for each in self._given):
                return None
            found = [each[number - 1] for each in self._given]
        shapes = {(what, tensor.shape, tensor.dtype) for what, tensor, _ in found}
        assert len(shapes) == 1, f"ranks call different things: {shapes}"
        return found

    def leave(self, rank: int) -> None:
        """The rank makes no more calls."""
        with self._news:
            self._gone.add(rank)
            self._news.notify_all()


class VirtualNccl:
    """ProcessGroupNCCL of one rank."""

    def __init__(self, wires: Wires, rank: int, gpu: VirtualGpu) -> None:
        self._wires, self._rank, self._gpu = wires, rank, gpu
        self._own = VirtualStream(gpu)

    def _allgather_base(self, out: Tensor, part: Tensor, options: Any) -> Any:
        assert out.numel() == part.numel() * self._wires.size and part.is_contiguous()

        def write(parts: list[Tensor]) -> None:
            out.view(len(parts), *part.shape).copy_(torch.stack(parts))

        return self._call("gather", part, write, options)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        [tensor] = tensors
        return self._call("broadcast", tensor, lambda parts: tensor.copy_(parts[0]), options)

    def abort(self) -> None:
        self._wires.leave(self._rank)

    def _call(
        self, what: str, given: Tensor, write: Callable[[list[Tensor]], object], options: Any
    ) -> Any:
        assert given.device == self._gpu.device and self._gpu._here() is self._gpu
        self._wires.calls.append((self._rank, what, self._gpu.current))

        def run() -> None:
            stream = self._gpu.current
            with torch._C.DisableTorchFunction():
                found = self._wires.exchange(self._rank, (what, given.clone(), stream.time))
                if found is None:
                    stream.time = NEVER
                    return
                write([tensor for _, tensor, _ in found])
            stream.time = max(stream.time, self._gpu.host_time, *(time for *_, time in found))

        if options.asyncOp:  # on a stream of its own, which the current one must wait for
            return _Handle(run, self._gpu)
        self._gpu._queue(run)
        return None


class _Handle:
    """Of a call that the current stream has not waited for: its result is not there."""

    def __init__(self, run: Callable[[], None], gpu: VirtualGpu) -> None:
        self._run, self._gpu = run, gpu

    def wait(self) -> None:
        self._gpu._queue(self._run)


class GpuRankThreads(RankThreads):
    """Each rank above 0 enters its GPU."""

    def __init__(
        self,
        gpus: list[VirtualGpu],
        wires: dict[str, Wires],
        entry: str,
        count: int,
        hello: Mapping[str, Any],
        *args: Any,
        **settings: Any,
    ) -> None:
        self._gpus, self._wires = gpus, wires[hello["setup"]["folder"]]
        super().__init__(entry, count, hello, *args, **settings)

    def _work(self, channel: Channel, hello: Mapping[str, object], on_death: object) -> None:
        rank = int(str(hello["rank"]))
        with self._gpus[rank]:
            super()._work(channel, hello, on_death)

    def _main(self, channel: Channel, hello: Mapping[str, object]) -> None:
        """A rank that crashes is gone a while before anybody is told."""
        try:
            super()._main(channel, hello)
        except BaseException as error:
            self._wires.leave(int(str(hello["rank"])))
            if not isinstance(error, EngineError):
                self._gpus[0].is_stuck.wait(PATIENCE_S)
            raise


class _WiresOfEngines(dict[str, Wires]):
    """By the folder where its ranks meet."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.calls = size, Calls()

    def __missing__(self, folder: str) -> Wires:
        self[folder] = Wires(self.size, self.calls)
        return self[folder]


def use_virtual_nccl(patch: pytest.MonkeyPatch, gpus: list[VirtualGpu]) -> Calls:
    """Ranks are threads with these GPUs, from here on. Returns the calls that they are to make."""
    wires = _WiresOfEngines(len(gpus))

    def make(store: Path, rank: int, size: int) -> VirtualNccl:
        assert size == len(gpus) and store.parent.is_dir()
        return VirtualNccl(wires[str(store.parent)], rank, gpus[rank])

    patch.setattr(nccl_group, "make_collectives", make)
    patch.setattr(rank_setup, "check_nccl", lambda: None)
    threads = functools.partial(GpuRankThreads, gpus, wires)
    patch.setattr(leading_rank, "WorkerProcesses", threads)
    return wires.calls
