"""Plans the calls of a flash kernel over a chunk of KV.

A kernel call is either non-causal or bottom-right causal, so the queries over a span of keys are
split in two: queries past the span see all of it, queries inside it see it up to themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from nanoengine.context import KVChunk, packed
from nanoengine.devices.device import to_device

Lengths = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One kernel call over a chunk, for n sequences; the same for every layer of a step.

    rows          the query tokens of the step: a slice, or int64 [queries] if not consecutive
    query_start   int32 [n + 1]: sequence i has queries [query_start[i], query_start[i + 1]) of the
                  call, at least one
    key_start     int32 [n + 1]: the running sum of num_keys
    num_keys      int32 [n]: keys of each sequence in the chunk, at least one
    block_table   int32 [n, blocks]: the blocks that hold them
    lengths       (queries, keys) of each sequence, for kernels driven from Python
    causal        the last query of a sequence sees all of these keys, the one before sees one fewer
    """

    rows: slice | Tensor
    query_start: Tensor
    key_start: Tensor
    num_keys: Tensor
    block_table: Tensor
    lengths: Lengths
    max_queries: int
    max_keys: int
    causal: bool


@dataclass(frozen=True, slots=True)
class _Ask:
    """Consecutive queries of one sequence and the span of keys they see in one call."""

    span: int  # which of the chunk's spans
    rows: range  # tokens of the step
    num_keys: int


def plan_calls(chunk: KVChunk, lengths: Lengths) -> tuple[KernelCall, ...]:
    """The calls, two at most, for the step's queries over the keys of a chunk.

    Queries before a span get no call with it; spans without keys get no call at all.
    """
    block_size = chunk.k.shape[1]
    stops = list(accumulate(num_queries for num_queries, _ in lengths))
    asks: dict[bool, list[_Ask]] = {False: [], True: []}
    for number, (index, first, blocks) in enumerate(chunk.spans):
        (num_queries, kv_len), stop = lengths[index], stops[index]
        begin, end = first * block_size, min((first + len(blocks)) * block_size, kv_len)
        if begin >= end:
            continue
        full, causal = seen_by(begin, end, num_queries, kv_len)
        for is_causal, positions in ((False, full), (True, causal)):
            if positions:
                row = stop - kv_len
                rows = range(row + positions.start, row + positions.stop)
                asks[is_causal].append(_Ask(number, rows, end - begin))
    return tuple(_call(chunk, found, is_causal) for is_causal, found in asks.items() if found)


def seen_by(begin: int, end: int, num_queries: int, kv_len: int) -> tuple[range, range]:
    """Positions of the queries that see all keys in [begin, end), and of those that see the keys up
    to their own position; the last of these sees all.

    The queries are the sequence's last `num_queries` positions before kv_len.
    """
    start = kv_len - num_queries
    if end <= start + 1:
        return range(start, kv_len), range(0)
    return range(end, kv_len), range(max(start, begin), end)


def _call(chunk: KVChunk, asks: Sequence[_Ask], causal: bool) -> KernelCall:
    device = chunk.k.device
    queries, keys = [len(ask.rows) for ask in asks], [ask.num_keys for ask in asks]
    query_start, key_start, num_keys = packed(
        partial(to_device, device=device),
        ([*accumulate(queries, initial=0)], [*accumulate(keys, initial=0)], keys),
        torch.int32,
    )
    table = chunk.block_table
    if len(asks) < len(chunk.spans):
        table = table[to_device([ask.span for ask in asks], torch.int64, device)]
    return KernelCall(
        rows=_rows(asks, device),
        query_start=query_start,
        key_start=key_start,
        num_keys=num_keys,
        block_table=table,
        lengths=tuple(zip(queries, keys, strict=True)),
        max_queries=max(queries),
        max_keys=max(keys),
        causal=causal,
    )


def _rows(asks: Sequence[_Ask], device: torch.device) -> slice | Tensor:
    if all(before.rows.stop == after.rows.start for before, after in pairwise(asks)):
        return slice(asks[0].rows.start, asks[-1].rows.stop)
    return to_device([row for ask in asks for row in ask.rows], torch.int64, device)
