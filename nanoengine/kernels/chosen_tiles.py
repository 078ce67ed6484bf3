"""Which rows go to which experts on a GPU, in tiles of one expert each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.nn import functional

from nanoengine.kernels.triton_code_kernels import choose
from nanoengine.kernels.triton_launch import FUSED, power_of_two

LEAST_ROWS, MOST_ROWS = 8, 128  # of a tile
MOST_COMPARED = 2048  # choices up to which each is compared with each, in one kernel
_STEP = 32


@dataclass(frozen=True, slots=True)
class ChosenTiles:
    """Which rows go to which experts, in tiles of `rows` rows of one expert each.

    experts: of each tile, -1 where there is none; starts, ends: its first of places, and the end of
    its expert's; places: choices by expert, int64. All on the GPU, and as long for any choice.
    """

    rows: int
    experts: Tensor
    starts: Tensor
    ends: Tensor
    places: Tensor

    @classmethod
    def of(cls, ids: Tensor, count: int) -> ChosenTiles:
        """ids: int64 [tokens, top_k], of `count` experts. A tile has room for twice the mean of an
        expert's rows, so few experts take two.
        """
        choices = ids.numel()
        mean = triton.cdiv(choices, count)
        rows = min(MOST_ROWS, max(LEAST_ROWS, power_of_two(2 * mean)))
        num_tiles = min(count, choices) + choices // rows
        if choices > MOST_COMPARED:
            return _sorted(ids, count, rows, num_tiles)
        experts, starts, ends = ids.new_empty(3, num_tiles).unbind()
        places = ids.new_empty(choices)
        choose[(triton.cdiv(max(choices, num_tiles), _STEP),)](
            ids.contiguous(), experts, starts, ends, places, choices, num_tiles,
            rows, power_of_two(count), _STEP, **FUSED,
        )  # fmt: skip
        return cls(rows, experts, starts, ends, places)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """As the kernel takes them."""
        return self.experts, self.starts, self.ends, self.places


def _sorted(ids: Tensor, count: int, rows: int, num_tiles: int) -> ChosenTiles:
    """The tiles of many choices."""
    chosen, places = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(count, device=ids.device), right=True)
    starts = functional.pad(ends[:-1], (1, 0))
    each = (ends - starts + rows - 1) // rows
    tile_ends = each.cumsum(0)
    tiles = torch.arange(num_tiles, device=ids.device)
    experts = torch.searchsorted(tile_ends, tiles, right=True)
    is_there = experts < count
    found = experts.clamp(max=count - 1)
    first = starts[found] + (tiles - (tile_ends - each)[found]) * rows
    return ChosenTiles(
        *(rows, torch.where(is_there, found, -1), torch.where(is_there, first, 0)),
        *(torch.where(is_there, ends[found], 0), places),
    )
