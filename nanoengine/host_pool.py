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
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from nanoengine.device import Device
from nanoengine.errors import OutOfMemoryError
from nanoengine.step_plan import slot_runs

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


class HostPool:
    """Owns the host tier's memory."""

    def __init__(
        self, device: Device, layer_blocks: tuple[int, int, Sequence[int]], dtype: torch.dtype
    ) -> None:
        """layer_blocks: number of layers, number of blocks, shape of a block of one layer."""
        self.num_layers, self.num_blocks, block = layer_blocks
        block_bytes = torch.Size(block).numel() * dtype.itemsize * self.num_layers
        sizes = piece_sizes(self.num_blocks, block_bytes)
        self._starts = list(accumulate(sizes, initial=0))
        self._pieces: list[Tensor] = []
        self._error: Exception | None = None
        self._closing = False
        self._may_go_on = threading.Event()
        self._changed = threading.Condition()
        shapes = [(self.num_layers, size, *block) for size in sizes]
        take = (device.empty_host, shapes, dtype)
        self._thread = threading.Thread(target=self._take_all, args=take, daemon=True)
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
        if piece >= len(self._pieces):
            self.take_rest()
            with self._changed:
                self._changed.wait_for(lambda: piece < len(self._pieces) or self._error is not None)
        if piece >= len(self._pieces):
            raise OutOfMemoryError(
                f"host memory for KV blocks {self._starts[piece]} to {self._starts[piece + 1] - 1} "
                f"of {self.num_blocks} could not be had ({self._error}); lower kv_offload_gib"
            ) from self._error
        return self._pieces[piece][layer]

    def take_rest(self) -> None:
        """Take all pieces after the first: not while something is timed, as it holds up a GPU."""
        self._may_go_on.set()

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
        self._closing = True
        self._may_go_on.set()
        self._thread.join()
        self._pieces = []
        self._error = self._error or RuntimeError("the engine was closed")

    def _take_all(
        self,
        empty_host: Callable[[tuple[int, ...], torch.dtype], Tensor],
        shapes: list[tuple[int, ...]],
        dtype: torch.dtype,
    ) -> None:
        for shape in shapes:
            if self._closing:
                return
            try:
                piece = empty_host(shape, dtype)
            except Exception as error:  # told to whoever needs the piece
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._pieces.append(piece)
                self._changed.notify_all()
            self._may_go_on.wait()
