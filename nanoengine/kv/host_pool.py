"""HostPool: the host blocks of all layers, in segments of memory that a thread allocates.

    segment     of each layer [blocks of the segment, parts, block_size, kv_heads, head_dim], in one
                piece of memory: consecutive blocks of one layer, K and V, are one copy; no copy
                spans two segments

Start-up waits for the first segment only (pinning takes about half a second a GiB); readers of a
block wait for its segment. A segment is a little smaller than a power of two of bytes, because
pinned memory is rounded up to one. Knows slots, no blocks and no sequences.
"""

from __future__ import annotations

import math
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from nanoengine.devices.device import Device
from nanoengine.devices.home_process import HomeProcess, join
from nanoengine.errors import OutOfMemoryError
from nanoengine.kv.step_plan import slot_runs

LARGEST_SEGMENT = 1 << 30
SMALLEST_SEGMENT = 1 << 26
Shape = Sequence[int]


class HostRun(NamedTuple):
    """Consecutive blocks in a segment of the host pool. at: where they are in a list of slots."""

    at: slice
    segment: int
    places: slice


def numbers_of_blocks(num_blocks: int, shapes: Sequence[Shape]) -> int:
    """Numbers in so many blocks of all layers. shapes: of a block of each layer."""
    return num_blocks * sum(map(math.prod, shapes))


def blocks_by_layer(whole: Tensor, num_blocks: int, shapes: Sequence[Shape]) -> list[Tensor]:
    """The parts of a tensor with the blocks of each layer, [num_blocks, *shape]."""
    parts = whole.split_with_sizes([num_blocks * math.prod(shape) for shape in shapes])
    return [part.view(num_blocks, *shape) for part, shape in zip(parts, shapes, strict=True)]


def segment_sizes(num_blocks: int, block_bytes: int) -> list[int]:
    """Blocks of each segment: segments of LARGEST_SEGMENT bytes, then halves of that for the rest.

    Only the last segment may be smaller than SMALLEST_SEGMENT bytes.
    """
    sizes: list[int] = []
    segment_bytes, left = LARGEST_SEGMENT, num_blocks
    while left:
        fits = segment_bytes // block_bytes
        if segment_bytes <= SMALLEST_SEGMENT or fits <= 1:
            fits = min(left, max(fits, 1))
        if fits <= left:
            sizes.append(fits)
            left -= fits
        else:
            segment_bytes //= 2
    return sizes


class _Segments:
    """Segments that a thread allocates in order. Does not keep the pool from being collected."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.wants_rest = threading.Event()  # set: allocate past the first segment
        self.allocated: list[Tensor] = []
        self._changed = threading.Condition()

    def allocate_all(
        self,
        empty_host: Callable[[tuple[int, ...], torch.dtype], Tensor],
        sizes: Iterable[int],
        dtype: torch.dtype,
    ) -> None:
        """Allocate all segments: the work of the thread. sizes: numbers in each."""
        for size in sizes:
            try:
                segment = empty_host((size,), dtype)
            except Exception as error:  # readers of a missing segment get it
                self.end(error)
                return
            with self._changed:
                if self.error is not None:
                    return
                self.allocated.append(segment)
                self._changed.notify_all()
            self.wants_rest.wait()

    def get(self, index: int) -> Tensor | None:
        """Wait for a segment; None if allocation ended before it, by `error`."""
        if index >= len(self.allocated):
            self.wants_rest.set()
            with self._changed:
                self._changed.wait_for(
                    lambda: index < len(self.allocated) or self.error is not None
                )
        return self.allocated[index] if index < len(self.allocated) else None

    def end(self, error: Exception) -> None:
        """End allocation; waiting readers get the error."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()
        self.wants_rest.set()


class HostPool:
    """Owns the host tier's memory. Its thread ends after the last segment, with `close`, when the
    pool is collected, or when Python exits.
    """

    def __init__(
        self, device: Device, num_blocks: int, shapes: Sequence[Shape], dtype: torch.dtype
    ) -> None:
        """shapes: of a block of each layer."""
        self.num_layers, self.num_blocks = len(shapes), num_blocks
        sizes = segment_sizes(num_blocks, numbers_of_blocks(1, shapes) * dtype.itemsize)
        self._starts = list(accumulate(sizes, initial=0))
        self._sizes, self._shapes = sizes, shapes
        self._segments = _Segments()
        self._layers: dict[int, list[Tensor]] = {}  # of segments that somebody has asked for
        self._thread = threading.Thread(
            target=self._segments.allocate_all,
            args=(device.empty_host, [numbers_of_blocks(n, shapes) for n in sizes], dtype),
            name="nanoengine-host",
            daemon=True,
        )
        self._end = weakref.finalize(self, _end_thread, HomeProcess(), self._segments, self._thread)
        if sizes:
            self._thread.start()

    @property
    def segments(self) -> Sequence[Tensor]:
        """Those that are allocated; none after `close`."""
        return self._segments.allocated

    @property
    def num_segments(self) -> int:
        """Number of segments, allocated or not."""
        return len(self._starts) - 1

    def locate(self, slot: int) -> tuple[int, int]:
        """The segment that a slot lies in, and its index there."""
        segment = bisect_right(self._starts, slot) - 1
        return segment, slot - self._starts[segment]

    def slots(self, segment: int, places: Iterable[int]) -> Iterator[int]:
        """The slots at these indices of a segment."""
        return (self._starts[segment] + place for place in places)

    def segment(self, segment: int, layer: int) -> Tensor:
        """One layer of a segment, [blocks, parts, block_size, kv_heads, head_dim]; waits for its
        allocation. Raises OutOfMemoryError if that failed.
        """
        if segment in self._layers:
            return self._layers[segment][layer]
        whole = self._segments.get(segment)
        if whole is None:
            error = self._segments.error
            first, last = self._starts[segment], self._starts[segment + 1] - 1
            raise OutOfMemoryError(
                f"host memory for KV blocks {first} to {last} of {self.num_blocks} could not be "
                f"allocated ({error}); lower kv_offload_gib"
            ) from error
        self._layers[segment] = blocks_by_layer(whole, self._sizes[segment], self._shapes)
        return self._layers[segment][layer]

    def allocate_rest(self) -> None:
        """Allocate all segments after the first: not while steps are timed, as it slows a GPU."""
        self._segments.wants_rest.set()

    def block(self, layer: int, slot: int) -> Tensor:
        """One layer of a block, [parts, block_size, kv_heads, head_dim]."""
        segment, place = self.locate(slot)
        return self.segment(segment, layer)[place]

    def runs(self, slots: Sequence[int]) -> Iterator[HostRun]:
        """Group the blocks at `slots` into copies, the same for all layers."""
        apart = [slot + self.locate(slot)[0] for slot in slots]  # no run is in two segments
        for at, _, count in slot_runs(apart):
            segment, place = self.locate(slots[at])
            yield HostRun(slice(at, at + count), segment, slice(place, place + count))

    def blocks(self, layer: int, run: HostRun) -> Tensor:
        """One layer of the blocks of a run, [blocks, parts, block_size, kv_heads, head_dim]."""
        return self.segment(run.segment, layer)[run.places]

    def fill(self, value: float) -> None:
        """Fill all segments; waits for their allocation."""
        for segment in range(self.num_segments):
            for layer in range(self.num_layers):
                self.segment(segment, layer).fill_(value)

    def close(self) -> None:
        """End allocation and free the memory."""
        self._end()
        self._segments.allocated = []
        self._layers.clear()


def _end_thread(home: HomeProcess, segments: _Segments, thread: threading.Thread) -> None:
    """Let the thread end and wait for it; a forked process has no such thread."""
    if not home.is_here:
        return
    segments.end(RuntimeError("the engine was closed"))
    join(thread)
