"""How fast host cores attend over pinned KV, alone and while the link copies: a part of
gpu_check.py.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu.gpu_measure import Row, Scale
from nanoengine.context import KVChunk, SoftmaxState
from nanoengine.devices.device import Device
from nanoengine.devices.select import make_device
from nanoengine.kernels.cpu_kernels import CpuKernels

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 256
THREADS = (1, 2, 4, 8, 16)
PIECE = 64  # blocks of a copy
QUEUED = 4  # copies that are under way at once


def host_attention(scale: Scale) -> Iterator[Row]:
    """First the link's speed alone; then, for each number of threads, GB/s of the C kernel over
    pinned blocks, one query: alone, and beside the link with the link's own.
    """
    device = make_device(scale.device, None, copy_workers=True)
    num_blocks = PIECE if scale.is_rehearsal else 64 * PIECE
    host = device.empty_host((num_blocks, 2, BLOCK, KV_HEADS, HEAD_DIM), torch.bfloat16)
    host.copy_(torch.randn(host.shape[1:]))
    attend = one_query(CpuKernels.load(), host)
    num_threads, num_cores = torch.get_num_threads(), os.cpu_count() or 1
    try:
        with BusyLink(device, host) as link:
            time.sleep(0.05 if scale.is_rehearsal else 1)
        yield {"cores": num_cores, "link_gb_per_s": round(link.gb_per_s, 2)}
        for threads in (n for n in THREADS if n <= num_cores):
            torch.set_num_threads(threads)
            alone = best_gb_per_s(attend, host)
            with BusyLink(device, host) as link:
                beside = best_gb_per_s(attend, host)
            yield {
                "threads": threads,
                "alone_gb_per_s": round(alone, 2),
                "beside_link_gb_per_s": round(beside, 2),
                "link_gb_per_s": round(link.gb_per_s, 2),
            }
    finally:
        torch.set_num_threads(num_threads)
        device.close_streams()


def one_query(kernels: CpuKernels, host: Tensor) -> Callable[[], object]:
    """What attends over all blocks with one query."""
    num_blocks = len(host)
    q = torch.randn(1, HEADS, HEAD_DIM).to(torch.bfloat16)
    out = torch.empty_like(q)
    state = SoftmaxState(
        torch.empty(1, HEADS), torch.empty(1, HEADS), torch.empty(1, HEADS, HEAD_DIM)
    )
    zero, starts, num, length = (
        torch.tensor(values, dtype=torch.int32)
        for values in ([0], [0, 1], [num_blocks], [num_blocks * BLOCK])
    )
    table = torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0)
    chunk = KVChunk(host[:, 0], host[:, 1], zero, zero, num, table, is_last=True)
    return lambda: kernels.attend(q, chunk, starts, length, state, HEAD_DIM**-0.5, True, out)


def best_gb_per_s(attend: Callable[[], object], host: Tensor) -> float:
    """The fastest of some passes over the blocks."""
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        attend()
        best = min(best, time.perf_counter() - start)
    return host.nbytes / best / 1e9


class BusyLink:
    """Copies blocks to the device as long as it is entered; afterwards, gb_per_s says how fast."""

    def __init__(self, device: Device, host: Tensor) -> None:
        self._device, self._host = device, host
        self._there = torch.empty(host[:PIECE].shape, dtype=host.dtype, device=device.torch_device)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._copy)
        self.gb_per_s = 0.0

    def __enter__(self) -> BusyLink:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _copy(self) -> None:
        h2d, pieces = self._device.h2d, torch.split(self._host, PIECE)
        start, num_copies, under_way = time.perf_counter(), 0, []
        while not self._ends.is_set():
            h2d.copy(self._there, pieces[num_copies % len(pieces)])
            under_way.append(h2d.record())
            num_copies += 1
            while len(under_way) > QUEUED - 1:
                if under_way[0].is_done():
                    del under_way[0]
                else:
                    time.sleep(0.0001)
        while not all(event.is_done() for event in under_way):
            time.sleep(0.0001)
        num_bytes = num_copies * self._there.nbytes
        self.gb_per_s = num_bytes / (time.perf_counter() - start) / 1e9
