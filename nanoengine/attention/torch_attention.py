"""Attention in plain PyTorch: the reference, and the fallback for any device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, count

import torch
from torch import Tensor

from nanoengine.config.attention import AttentionConfig
from nanoengine.context import ForwardContext, KVChunk, SoftmaxState


@dataclass(frozen=True, slots=True)
class _Share:
    """What some rows gave to a block, as softmax states [rows, heads]."""

    sequence: int
    block: int
    rows: slice
    row_max: Tensor
    row_sum: Tensor


class TorchAttention:
    """Plain PyTorch, one block of one sequence at a time: the reference for other backends."""

    can_replay = False
    is_batch_invariant = False

    def __init__(self, config: AttentionConfig) -> None:
        self.name = "torch"
        self._config = config
        self._scale, self._softcap = config.score_scale, config.softcap
        self._state: SoftmaxState | None = None

    def reserve(self, lengths: tuple[tuple[int, int], ...]) -> bool:
        """False: it needs none."""
        return False

    def run(
        self, layer: int, q: Tensor, ctx: ForwardContext, sinks: Tensor | None = None
    ) -> Tensor:
        if self._state is None:
            self._state = SoftmaxState.on(q.device)
        state = self._state
        state.start(q, sinks)
        window = self._config.window(layer)
        mass = ctx.block_mass if window is None else None
        shares: list[_Share] | None = None if mass is None else []
        for chunk in ctx.kv.read(layer):
            self._attend(q, chunk, ctx.lengths, state, window, shares)
        if mass is not None and shares:
            _add_mass(mass, shares, state)
        return (state.acc / state.row_sum.unsqueeze(-1)).to(q.dtype)

    def _attend(
        self,
        q: Tensor,
        chunk: KVChunk,
        lengths: tuple[tuple[int, int], ...],
        state: SoftmaxState,
        window: int | None,
        shares: list[_Share] | None,
    ) -> None:
        block_size = chunk.k.shape[1]
        stops = list(accumulate(num_queries for num_queries, _ in lengths))
        for index, first, blocks in chunk.spans:
            (num_queries, kv_len), stop = lengths[index], stops[index]
            for position, block in zip(count(first * block_size, block_size), blocks, strict=False):
                num_keys = min(block_size, kv_len - position)
                # Skip rows before this block's first key and rows whose window begins behind it.
                first = max(position, kv_len - num_queries)
                last = kv_len
                if window is not None:
                    last = min(last, position + num_keys - 1 + window)
                if num_keys > 0 and first < last:
                    rows = slice(stop - kv_len + first, stop - kv_len + last)
                    k, v = chunk.k[block, :num_keys], chunk.v[block, :num_keys]
                    row_sum = self._fold(q[rows], k, v, last - position, rows, state, window)
                    if shares is not None:
                        row_max = state.row_max[rows].clone()
                        share = _Share(index, position // block_size, rows, row_max, row_sum)
                        shares.append(share)

    def _fold(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: int,
        rows: slice,
        state: SoftmaxState,
        window: int | None,
    ) -> Tensor:
        """Fold one block into `rows`. The last row is `visible` - 1 keys after the block's first
        key; each row sees the last `window` keys up to itself. Returns the sum of the block alone.
        """
        num_rows, heads, head_dim = q.shape
        num_keys, kv_heads = k.shape[:2]
        grouped = q.float().view(num_rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        scores = (grouped * self._scale) @ k.float().permute(1, 2, 0).unsqueeze(1)
        if self._softcap is not None:
            scores = scores.div_(self._softcap).tanh_().mul_(self._softcap)
        hides = window is not None and visible > window
        if visible - num_rows + 1 < num_keys or hides:
            limit = torch.arange(visible - num_rows, visible, device=q.device).unsqueeze(1)
            keys = torch.arange(num_keys, device=q.device)
            unseen = keys > limit
            if window is not None:
                unseen |= keys <= limit - window
            scores = scores.masked_fill(unseen, -torch.inf)
        scores = scores.reshape(heads, num_rows, num_keys)
        old_max = state.row_max[rows]
        new_max = torch.maximum(old_max, scores.amax(-1).T)
        weights = (scores - new_max.T.unsqueeze(-1)).exp_()
        decay = (old_max - new_max).exp_()
        values = v.float().permute(1, 0, 2).unsqueeze(1)
        out = weights.view(kv_heads, -1, num_rows, num_keys) @ values
        state.row_max[rows] = new_max
        row_sum = weights.sum(-1).T
        state.row_sum[rows] = state.row_sum[rows] * decay + row_sum
        out = out.reshape(heads, num_rows, head_dim).transpose(0, 1)
        state.acc[rows] = state.acc[rows] * decay.unsqueeze(-1) + out
        return row_sum


def _add_mass(mass: Tensor, shares: Iterable[_Share], state: SoftmaxState) -> None:
    """Add them to the mass [sequences, blocks], now that the rows' states are whole."""
    for share in shares:
        weight = (share.row_max - state.row_max[share.rows]).exp_() / state.row_sum[share.rows]
        mass[share.sequence, share.block] += (share.row_sum * weight).sum()
