"""HostPool: the host blocks of all layers, taken from the system in pieces on a thread of its own.

    piece       [layers, blocks of the piece, 2, block_size, kv_heads, head_dim]: consecutive blocks
                of one layer, K and V, are one copy; no copy spans two pieces

Start-up does not wait for memory (pinning takes about half a second a GiB): it goes on with the
first piece, and whoever needs a block waits for its piece. A piece is a little less than a power of
two of bytes, because pinned memory is rounded up to one. Knows slots, nothing of blocks and
sequences.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from nanoengine.devices.device import Device
from nanoengine.devices.home_process import HomeProcess, join
from nanoengine.errors import OutOfMemoryError
from nanoengine.kv.step_plan import slot_runs

LARGEST_PIECE = 1 << 30
SMALLEST_PIECE = 1 << 26


def piece_sizes(num_blocks: int, block_bytes: int, smallest: int = SMALLEST_PIECE) -> list[int]:
    """Blocks of each piece: pieces of LARGEST_PIECE bytes, then halves of it for what is left.

    At most one is below `smallest` bytes, the last one.
    """
    sizes: list[int] = []
    piece_bytes, left = LARGEST_PIECE, num_blocks
    while left:
        fits = piece_bytes // block_bytes
        if piece_bytes <= smallest or fits <= 1:
            fits = min(left, max(fits, 1))
        if fits <= left:
            sizes.append(fits)
            left -= fits
        else:
            piece_bytes //= 2
    return sizes


class _Pieces:
    """What a thread takes from the system, in order, and readers wait for. Knows no pool, so that
    one can be dropped while the thread works.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.may_go_on = threading.Event()  # past the first
        self._taken: list[Tensor] = []
        self._changed = threading.Condition()

    def take_all(
        self,
        empty_host: Callable[[tuple[int, ...], torch.dtype], Tensor],
        shapes: Iterable[tuple[int, ...]],
        dtype: torch.dtype,
    ) -> None:
        """The thread's work."""
        for shape in shapes:
            try:
                piece = empty_host(shape, dtype)
            except Exception as error:  # told to whoever needs the piece
                self.end(error)
                return
            with self._changed:
                if self.error is not None:
                    return
                self._taken.append(piece)
                self._changed.notify_all()
            self.may_go_on.wait()

    def get(self, index: int) -> Tensor | None:
        """A piece, once it is there; None where `error` says why it never will be."""
        if index >= len(self._taken):
            self.may_go_on.set()
            with self._changed:
                self._changed.wait_for(lambda: index < len(self._taken) or self.error is not None)
        return self._taken[index] if index < len(self._taken) else None

    def end(self, error: Exception) -> None:
        """Take no more; whoever waits is told why."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()
        self.may_go_on.set()

    def drop(self) -> None:
        """Give what was taken back."""
        self._taken = []


class HostPool:
    """Owns the host tier's memory. Its thread ends with the last piece, with `close`, when the pool
    is dropped, or when Python ends.
    """

    def __init__(
        self, device: Device, layer_blocks: tuple[int, int, Sequence[int]], dtype: torch.dtype
    ) -> None:
        """layer_blocks: number of layers, number of blocks, shape of a block of one layer."""
        self.num_layers, self.num_blocks, block = layer_blocks
        block_bytes = torch.Size(block).numel() * dtype.itemsize * self.num_layers
        sizes = piece_sizes(self.num_blocks, block_bytes)
        self._starts = list(accumulate(sizes, initial=0))
        self._pieces = _Pieces()
        take = (device.empty_host, [(self.num_layers, size, *block) for size in sizes], dtype)
        self._thread = threading.Thread(
            target=self._pieces.take_all, args=take, name="nanoengine-host", daemon=True
        )
        self._end = weakref.finalize(self, _end_thread, HomeProcess(), self._pieces, self._thread)
        if sizes:
            self._thread.start()

    @property
    def num_pieces(self) -> int:
        """Pieces, taken or still to be taken."""
        return len(self._starts) - 1

    def locate(self, slot: int) -> tuple[int, int]:
        """The piece that a slot lies in, and its place there."""
        piece = bisect_right(self._starts, slot) - 1
        return piece, slot - self._starts[piece]

    def slots(self, piece: int, places: Iterable[int]) -> Iterator[int]:
        """The slots at these places of a piece."""
        return (self._starts[piece] + place for place in places)

    def piece(self, piece: int, layer: int) -> Tensor:
        """One layer of a piece, [blocks, 2, block_size, kv_heads, head_dim]; waits until it is
        there. Raises OutOfMemoryError if it could not be had.
        """
        taken = self._pieces.get(piece)
        if taken is None:
            error = self._pieces.error
            raise OutOfMemoryError(
                f"host memory for KV blocks {self._starts[piece]} to {self._starts[piece + 1] - 1} "
                f"of {self.num_blocks} could not be had ({error}); lower kv_offload_gib"
            ) from error
        return taken[layer]

    def take_rest(self) -> None:
        """Take all pieces after the first: not while something is timed, as it holds up a GPU."""
        self._pieces.may_go_on.set()

    def block(self, layer: int, slot: int) -> Tensor:
        """One layer of a block, [2, block_size, kv_heads, head_dim]."""
        piece, place = self.locate(slot)
        return self.piece(piece, layer)[place]

    def runs(self, layer: int, slots: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """The blocks at `slots` as (position in `slots`, consecutive blocks): each is one copy."""
        for at, first, count in slot_runs(slots):
            stop = first + count
            while first < stop:
                piece, place = self.locate(first)
                part = min(stop, self._starts[piece + 1]) - first
                yield at, self.piece(piece, layer)[place : place + part]
                at, first = at + part, first + part

    def fill(self, value: float) -> None:
        """Fill all of it, once it is there."""
        for piece in range(self.num_pieces):
            for layer in range(self.num_layers):
                self.piece(piece, layer).fill_(value)

    def close(self) -> None:
        """Give the memory back; what is still to be taken is not."""
        self._end()
        self._pieces.drop()


def _end_thread(home: HomeProcess, pieces: _Pieces, thread: threading.Thread) -> None:
    """Let the thread end. In a fork of the process there is none."""
    if not home.is_here:
        return
    pieces.end(RuntimeError("the engine was closed"))
    join(thread)
