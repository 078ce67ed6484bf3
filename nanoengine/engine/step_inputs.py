"""What one forward pass computes, as tensors: the rows of sequences laid end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoengine.context import AttentionBackend, ForwardContext, KVCache, packed
from nanoengine.devices.device import Device


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The rows of one sequence: its tokens from position `start` on, which see `num_keys` keys
    (the last one; each one before sees one fewer). The logits of the last `num_logits` are wanted.
    """

    token_ids: Sequence[int]
    start: int
    num_keys: int
    num_logits: int


def forward_context(
    rows: Sequence[SequenceRows],
    num_rows: int,
    kv: KVCache,
    attention: AttentionBackend,
    device: Device,
    block_mass: Tensor | None = None,
) -> ForwardContext:
    """The forward context of these sequences. Those past them, up to `num_rows`, have a token and
    no keys. block_mass: see ForwardContext.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    starts = [0]
    logit_rows: list[int] = []
    for each in rows:
        token_ids += each.token_ids
        positions += range(each.start, each.start + len(each.token_ids))
        starts.append(len(token_ids))
        logit_rows += range(len(token_ids) - each.num_logits, len(token_ids))
    lengths = [(len(each.token_ids), each.num_keys) for each in rows]
    for _ in range(len(rows), num_rows):
        lengths.append((1, 0))
        token_ids.append(0)
        positions.append(0)
        starts.append(len(token_ids))
    kv_lens = [num_keys for _, num_keys in lengths]
    tokens, at, wanted = packed(device.tensor, (token_ids, positions, logit_rows), torch.int64)
    query_start, lens = packed(device.tensor, (starts, kv_lens), torch.int32)
    return ForwardContext(
        token_ids=tokens,
        positions=at,
        query_start=query_start,
        kv_lens=lens,
        lengths=tuple(lengths),
        logit_rows=wanted,
        kv=kv,
        attention=attention,
        block_mass=block_mass,
    )
