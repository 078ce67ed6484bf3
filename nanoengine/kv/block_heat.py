"""BlockHeat: what share of its attention a streamed sequence gives to each of its blocks.

Drafts see only the blocks on the device, so those with the most attention should lie there. The
step that checks drafts attends to all blocks anyway and reports what each of them got.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nanoengine.devices.device import Device, Readable
from nanoengine.kv.block_manager import Block
from nanoengine.kv.block_table import BlockTable
from nanoengine.sequence import ScheduledBatch

WEIGHT = 0.5  # of the newest step in a block's heat


class BlockHeat:
    """Sets Block.heat from the steps of sequences that may draft, one step behind.

    mass: of the step under way, as in ForwardContext.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._blocks: list[list[Block]] = []
        self.mass: Tensor | None = None
        self._shares: Readable | None = None

    def begin(self, batch: ScheduledBatch, tables: Mapping[int, BlockTable]) -> None:
        """Let attention report its mass in this step, if sequences of it may draft."""
        if not (batch.is_decode and batch.may_draft):
            return
        self._blocks = [tables[item.seq.seq_id].blocks[:] for item in batch.items]
        most = max(map(len, self._blocks))
        self.mass = torch.zeros(
            len(self._blocks), most, dtype=torch.float32, device=self._device.torch_device
        )

    def end(self) -> None:
        """The step has computed its attention: begin to read the mass back."""
        if self.mass is not None:
            shares = self.mass / self.mass.sum(dim=1, keepdim=True).clamp(min=1e-30)
            # A NaN would stay in the heat of blocks that other sequences share.
            self._shares = self._device.read_back(shares.nan_to_num(0))
        self.mass = None

    def fold(self) -> None:
        """Add what the last step reported to the heat of its blocks."""
        if self._shares is not None:
            for blocks, shares in zip(self._blocks, self._shares.tolist(), strict=True):
                for block, share in zip(blocks, shares, strict=False):
                    block.heat += WEIGHT * (share - block.heat)
        self._blocks, self.mass, self._shares = [], None, None
