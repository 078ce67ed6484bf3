"""What one forward pass computes, as tensors: the rows of sequences laid end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from nanoengine.context import AttentionBackend, ForwardContext, KVCache, StepRows
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
    logits_alone: bool = False,
) -> ForwardContext:
    """The forward context of these sequences. Those past them, up to `num_rows`, have a token and
    no keys. block_mass: see ForwardContext; logits_alone: see its lay_out.
    """
    rows = [*rows, *[SequenceRows([0], 0, 0, 0)] * (num_rows - len(rows))]
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    for each in rows:
        token_ids += each.token_ids
        positions += range(each.start, each.start + len(each.token_ids))
        logit_rows += range(len(token_ids) - each.num_logits, len(token_ids))
    lengths = [(len(each.token_ids), each.num_keys) for each in rows]
    step_rows = StepRows(token_ids, positions, lengths, logit_rows)
    return ForwardContext.lay_out(step_rows, kv, attention, device.tensor, block_mass, logits_alone)
