"""Batches of queries over paged KV, and causal attention in float64 over the same numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanoengine.context import AttentionBackend, ForwardContext, KVChunk


def int32(values) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


@dataclass(frozen=True)
class Batch:
    """Sequences laid end to end, and their KV in one pool whose unwritten slots hold NaN."""

    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    q_lens: list[int]
    kv_lens: list[int]
    block_size: int
    k_pool: Tensor
    v_pool: Tensor
    tables: list[list[int]]

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def query_start(self) -> Tensor:
        return int32([0, *torch.tensor(self.q_lens).cumsum(0).tolist()])

    def reference(
        self,
        window: int | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Causal attention in float64 over the same inputs."""
        each = zip(self.weights(window, sinks, softcap), self.values, strict=True)
        return torch.cat([torch.einsum("hqk,khd->qhd", p, self._of_heads(v)) for p, v in each])

    def mass(self, sinks: Tensor | None = None, softcap: float | None = None) -> Tensor:
        """The weights that each block gets, float64 [sequences, most blocks]."""
        total = torch.zeros(len(self.tables), max(map(len, self.tables)), dtype=torch.float64)
        for row, weights in zip(total, self.weights(None, sinks, softcap), strict=True):
            for block, part in zip(row, weights.split(self.block_size, -1), strict=False):
                block += part.sum()
        return total

    def _of_heads(self, x: Tensor) -> Tensor:
        return x.double().repeat_interleave(self.q.shape[1] // x.shape[1], 1)

    def weights(
        self,
        window: int | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Iterator[Tensor]:
        """Of each sequence, what each query gives to each key: float64 [heads, queries, keys]."""
        sink = torch.full((self.q.shape[1],), -torch.inf) if sinks is None else sinks
        for q, keys in zip(self.q.split(self.q_lens), self.keys, strict=True):
            k = self._of_heads(keys)
            scores = torch.einsum("qhd,khd->hqk", q.double(), k) * self.scale
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            limit = torch.arange(len(k) - len(q), len(k))[:, None]
            scores.masked_fill_(torch.arange(len(k)) > limit, -torch.inf)
            if window is not None:
                scores.masked_fill_(torch.arange(len(k)) <= limit - window, -torch.inf)
            last = sink.double()[:, None, None].expand(-1, len(q), 1)
            yield torch.cat((scores, last), -1).softmax(-1)[..., :-1]


def make_batch(
    q_lens, kv_lens, *, dtype, kv_heads=2, group=3, head_dim=64, block_size=16, seed=0
) -> Batch:
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen).to(dtype)

    heads = kv_heads * group
    # As in the model: q is a view of a fused qkv row, so its token stride is larger than itself.
    fused = normal(sum(q_lens), heads + 2 * kv_heads, head_dim)
    keys = [normal(n, kv_heads, head_dim) for n in kv_lens]
    values = [normal(n, kv_heads, head_dim) for n in kv_lens]
    counts = [-(-n // block_size) for n in kv_lens]
    ids = torch.randperm(sum(counts) + 3, generator=gen).tolist()
    pools = [
        torch.full((len(ids), block_size, kv_heads, head_dim), torch.nan, dtype=dtype)
        for _ in range(2)
    ]
    tables = []
    for k, v, count in zip(keys, values, counts, strict=True):
        tables.append([ids.pop() for _ in range(count)])
        for pool, rows in zip(pools, (k, v), strict=True):
            for block, part in zip(tables[-1], rows.split(block_size), strict=False):
                pool[block, : len(part)] = part
    q = fused[:, :heads]
    return Batch(q, keys, values, list(q_lens), list(kv_lens), block_size, *pools, tables)


def chunk_of(batch: Batch, spans: dict[int, tuple[int, int]], scatter: bool = False) -> KVChunk:
    """Blocks [first, last) of each sequence in `spans`; `scatter` copies them elsewhere."""
    rows = [batch.tables[s][first:last] for s, (first, last) in spans.items()]
    k, v = batch.k_pool, batch.v_pool
    if scatter:
        flat = [block for row in rows for block in row]
        k, v, ids = k[flat].clone(), v[flat].clone(), iter(range(len(flat)))
        rows = [[next(ids) for _ in row] for row in rows]
    table = torch.zeros(len(rows), max((len(row) for row in rows), default=1), dtype=torch.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = int32(row)
    firsts, counts = int32(f for f, _ in spans.values()), int32(len(row) for row in rows)
    each = zip(spans.items(), rows, strict=True)
    seen = tuple((s, first, tuple(row)) for (s, (first, _)), row in each)
    return KVChunk(k, v, int32(spans), firsts, counts, table, seen)


class Cache:
    """The chunks of every layer."""

    def __init__(self, chunks: list[KVChunk]) -> None:
        self._chunks = [*chunks[:-1], replace(chunks[-1], is_last=True)]

    def read(self, layer: int) -> Iterator[KVChunk]:
        yield from self._chunks


def whole(batch: Batch) -> list[KVChunk]:
    return [chunk_of(batch, {s: (0, len(t)) for s, t in enumerate(batch.tables)})]


def split(batch: Batch, seed: int, begins: list[int] | None = None) -> list[KVChunk]:
    """Some blocks of some sequences at a time, each chunk from a pool of its own. begins: the
    first block of each sequence."""
    rng, lengths = random.Random(seed), [len(table) for table in batch.tables]
    at, chunks = [*(begins or [0] * len(lengths))], []
    while any(begin < end for begin, end in zip(at, lengths, strict=True)):
        spans = {}
        for seq, (begin, end) in enumerate(zip(at, lengths, strict=True)):
            if begin < end and rng.random() < 0.7:
                at[seq] = min(end, begin + rng.randint(1, max(1, end // 2)))
                spans[seq] = begin, at[seq]
        if spans:
            chunks.append(chunk_of(batch, spans, scatter=True))
    return chunks


def context_of(
    batch: Batch, chunks: list[KVChunk], block_mass: Tensor | None = None
) -> ForwardContext:
    """A step over these chunks, with what attention needs of it."""
    nothing = torch.empty(0)
    return ForwardContext(
        token_ids=nothing,
        positions=nothing,
        query_start=batch.query_start(),
        kv_lens=int32(batch.kv_lens),
        lengths=tuple(zip(batch.q_lens, batch.kv_lens, strict=True)),
        logit_rows=nothing,
        kv=Cache(chunks),
        attention=None,
        block_mass=block_mass,
    )


def cut(batch: Batch, firsts: Sequence[int], lasts: Sequence[int]) -> Batch:
    """The rows [first, last) of each sequence, which see the keys up to themselves."""
    starts = batch.query_start().tolist()[:-1]
    each = zip(starts, firsts, lasts, strict=True)
    rows = [batch.q[start + first : start + last] for start, first, last in each]
    q_lens = [last - first for first, last in zip(firsts, lasts, strict=True)]
    hidden = [n - last for n, last in zip(batch.q_lens, lasts, strict=True)]
    kv_lens = [n - h for n, h in zip(batch.kv_lens, hidden, strict=True)]
    tables = [t[: -(-n // batch.block_size)] for t, n in zip(batch.tables, kv_lens, strict=True)]
    return replace(batch, q=torch.cat(rows), q_lens=q_lens, kv_lens=kv_lens, tables=tables)


def in_pieces(
    batch: Batch, sizes: Sequence[int], rng: random.Random
) -> Iterator[tuple[Batch, list[int]]]:
    """Every row once, each sequence in pieces of sizes drawn from `sizes`; and where in the whole
    batch the rows of the piece are.
    """
    starts = batch.query_start().tolist()[:-1]
    firsts = [0] * len(starts)
    while firsts != batch.q_lens:
        lasts = [
            min(first + rng.choice(sizes), n) for first, n in zip(firsts, batch.q_lens, strict=True)
        ]
        rows = [
            row
            for start, first, last in zip(starts, firsts, lasts, strict=True)
            for row in range(start + first, start + last)
        ]
        yield cut(batch, firsts, lasts), rows
        firsts = lasts


def small_batch(**settings: Any) -> Batch:
    """Decodes, guesses, prompts whole and on top of earlier keys, one key, no key. The last
    sequence only pads; its result is 0.
    """
    settings = {"dtype": torch.float32, "head_dim": 24, "kv_heads": 1} | settings
    return make_batch([1, 5, 30, 40, 3, 1, 1], [200, 140, 30, 180, 150, 1, 0], **settings)


def attend(
    backend: AttentionBackend,
    batch: Batch,
    chunks: list[KVChunk],
    sinks: Tensor | None = None,
    mass: Tensor | None = None,
) -> Tensor:
    """The first layer's result, but for the row that only pads."""
    return backend.run(0, batch.q, context_of(batch, chunks, mass), sinks)[:-1]


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).abs().max() / want.abs().max()).item()
