"""Ring: the device buffers through which host blocks are read.

Knows slots and layers; OffloadEngine says what a slot holds and when.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Ring:
    """Owns the slots. Every layer's fills go round them, so each slot is as large as `slot_blocks`
    blocks of the largest layer.
    """

    def __init__(self, pools: Sequence[Tensor], num_slots: int, slot_blocks: int) -> None:
        """pools: of the device, by layer."""
        blocks = [pool.shape[1:] for pool in pools]
        sizes = [slot_blocks * math.prod(block) for block in blocks]
        self._slots = pools[0].new_empty((num_slots, max(sizes)))
        self._views = [
            self._slots[:, :size].view(num_slots, slot_blocks, *block).unbind()
            for size, block in zip(sizes, blocks, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._views[0]) if self._views else 0

    def of_layer(self, layer: int) -> tuple[Tensor, ...]:
        """The slots of a layer, each [slot_blocks, parts, block_size, kv_heads, head_dim]."""
        return self._views[layer]

    def whole(self, slot: int) -> Tensor:
        """All memory of a slot."""
        return self._slots[slot]

    def poison(self) -> None:
        """Fill all slots with NaN."""
        self._slots.fill_(torch.nan)

    def close(self) -> None:
        """Drop the memory."""
        self._slots, self._views = torch.empty(0), []
