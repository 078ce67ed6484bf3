"""Flash attention against dense attention, by way of a reference kernel that keeps flash-attn's
calling convention: which calls are made, how partial results merge, what is made once, which
kernel is taken.
"""

from __future__ import annotations

import inspect
import itertools
import random
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import (
    STREAMED,
    Driver,
    assert_greedy,
    assert_logits_are_transformers,
    host_gib,
    small_engine,
)
from torch import Tensor

from nanoengine import SamplingParams
from nanoengine.attention import flash_calls, flash_kernels
from nanoengine.attention import select as attention
from nanoengine.attention.flash_attention import FlashAttention, MergedState, make_flash
from nanoengine.attention.flash_calls import KernelCall, Lengths, plan_calls, seen_by
from nanoengine.attention.flash_kernels import (
    FindKernels,
    FlashAttnKernel,
    SdpaKernel,
    VarlenKernel,
    flash_attn_kernels,
    sdpa_kernels,
    varlen_kernels,
)
from nanoengine.attention.select import AttentionSetup, make_attention
from nanoengine.attention.torch_attention import TorchAttention
from nanoengine.config.attention import ATTENTION_LIMITS, AttentionConfig
from nanoengine.context import AttentionBackend, ForwardContext, KVChunk, Spans
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import ConfigError
from nanoengine.startup import parts

BLOCK, HEADS, KV_HEADS, HEAD_DIM = 4, 6, 2, 8
PLAIN = AttentionConfig(64)
CPU = torch.device("cpu")


class ReferenceKernel:
    """Softmax in float64, with flash-attn's conventions and complaints."""

    name = "reference"

    def __init__(self) -> None:
        self.calls: list[KernelCall] = []

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: KernelCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        self.calls.append(call)
        queries, keys = self._lengths(call)
        assert len(q) == sum(queries)
        out = torch.zeros(q.shape, dtype=torch.float64)
        lse = torch.full((q.shape[1], len(q)), torch.inf)
        for i, (row, num_queries) in enumerate(
            zip(call.query_start.tolist(), queries, strict=False)
        ):
            ids = call.block_table[i, : -(-keys[i] // k.shape[1])].long()
            own_k, own_v = (pool[ids].flatten(0, 1)[: keys[i]] for pool in (k, v))
            for j in range(num_queries):
                seen = keys[i] - num_queries + 1 + j if call.causal else keys[i]
                assert seen > 0, "a query that sees no key has entered a call"
                out[row + j], lse[:, row + j] = _attend_one(
                    q[row + j], own_k[:seen], own_v[:seen], scale
                )
        return out.to(q.dtype), lse

    @staticmethod
    def _lengths(call: KernelCall) -> tuple[list[int], list[int]]:
        index_tensors = (call.query_start, call.key_start, call.num_keys, call.block_table)
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in index_tensors)
        queries, keys = call.query_start.diff().tolist(), call.num_keys.tolist()
        assert call.query_start[0] == call.key_start[0] == 0
        assert call.key_start.diff().tolist() == keys
        assert min(queries) > 0 and min(keys) > 0
        assert (max(queries), max(keys)) == (call.max_queries, call.max_keys)
        assert len(call.block_table) == len(queries)
        return queries, keys


def _attend_one(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One query [heads, head_dim] over keys [keys, kv_heads, head_dim]."""
    group = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("hd,khd->hk", q.double(), k) * scale
    out = torch.einsum("hk,khd->hd", scores.softmax(-1), v)
    return out, scores.logsumexp(-1).float()


# -- batches


@dataclass
class FakeKV:
    """The chunks of a step, the same in every layer; each dies when the next one is asked for."""

    chunks: list[KVChunk]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        raise AssertionError("attention does not write")

    def read(self, layer: int) -> Iterator[KVChunk]:
        for chunk in self.chunks:
            k, v = chunk.k.clone(), chunk.v.clone()
            yield replace(chunk, k=k, v=v)
            k.fill_(torch.nan)
            v.fill_(torch.nan)


@dataclass
class Batch:
    """Sequences laid end to end, their blocks in two pools whose unused rows hold NaN."""

    lengths: Lengths
    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    pools: list[tuple[Tensor, Tensor]]
    tables: list[list[tuple[int, int]]]  # (pool, slot) of each block of each sequence
    cuts: random.Random = field(default_factory=lambda: random.Random(0))

    def dense(self) -> Tensor:
        """Causal attention over the whole of each sequence, without blocks, in float64."""
        outs = []
        queries = self.q.split([n for n, _ in self.lengths])
        for q, k, v in zip(queries, self.keys, self.values, strict=True):
            group = q.shape[1] // k.shape[1]
            k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q.double(), k) * HEAD_DIM**-0.5
            future = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
            weights = scores.masked_fill(future, -torch.inf).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(outs)

    def chunks(self, longest: int) -> list[KVChunk]:
        """Every sequence's blocks in order: each chunk takes, from one pool, up to `longest` of
        what is next, of some of the sequences that have it there.
        """
        done, chunks = [0] * len(self.tables), []
        while any(n < len(table) for n, table in zip(done, self.tables, strict=True)):
            pool, spans = self.cuts.randrange(2), []
            for i, table in enumerate(self.tables):
                ready = _ahead(table[done[i] :], pool)
                slots = ready[: self.cuts.randint(1, longest)]
                if slots and self.cuts.random() < 0.7:
                    spans.append((i, done[i], slots))
                    done[i] += len(slots)
            if spans:
                chunks.append(chunk_of(self.pools[pool], tuple(spans)))
        return chunks

    def context(self, backend: AttentionBackend, chunks: list[KVChunk]) -> ForwardContext:
        return context(self.lengths, chunks, backend)


def _ahead(table: list[tuple[int, int]], pool: int) -> tuple[int, ...]:
    """Slots of the blocks from the first on that lie in `pool` without a break."""
    return tuple(slot for _, slot in itertools.takewhile(lambda at: at[0] == pool, table))


def chunk_of(pool: tuple[Tensor, Tensor], spans: Spans) -> KVChunk:
    width = max(len(slots) for _, _, slots in spans)
    table = [[*slots, *[-1] * (width - len(slots))] for _, _, slots in spans]
    columns = ([i for i, _, _ in spans], [f for _, f, _ in spans], [len(s) for _, _, s in spans])
    index, first, num = (torch.tensor(column, dtype=torch.int32) for column in columns)
    return KVChunk(*pool, index, first, num, torch.tensor(table, dtype=torch.int32), spans)


def context(lengths: Lengths, chunks: list[KVChunk], backend: AttentionBackend) -> ForwardContext:
    none = torch.empty(0, dtype=torch.int64)
    starts = list(itertools.accumulate((n for n, _ in lengths), initial=0))
    return ForwardContext(
        token_ids=none,
        positions=none,
        query_start=torch.tensor(starts, dtype=torch.int32),
        kv_lens=torch.tensor([n for _, n in lengths], dtype=torch.int32),
        lengths=lengths,
        logit_rows=none,
        kv=FakeKV(chunks),
        attention=backend,
    )


def make_batch(
    lengths: Lengths,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    shared: int = 0,
    stretch: float = 1.0,
    two_pools: bool = True,
) -> Batch:
    """shared: blocks at the beginning that all sequences have. stretch: of the queries."""
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    # As in the model: q is a view of a fused row, so that its tokens lie further apart.
    q = normal(sum(n for n, _ in lengths), HEADS + 3, HEAD_DIM)[:, :HEADS] * stretch
    common = [normal(shared * BLOCK, KV_HEADS, HEAD_DIM) for _ in "kv"]
    keys, values = (
        [torch.cat([begin, normal(n - len(begin), KV_HEADS, HEAD_DIM)]) for _, n in lengths]
        for begin in common
    )
    counts = [-(-n // BLOCK) for _, n in lengths]
    pools = []
    free = []
    for _ in range(2):
        shape = (sum(counts) + 2, BLOCK, KV_HEADS, HEAD_DIM)
        pools.append(
            (torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))
        )
        free.append(rng.sample(range(shape[0]), shape[0]))
    tables: list[list[tuple[int, int]]] = []
    for i, count in enumerate(counts):
        pool = rng.randrange(2) if two_pools else 0
        table = list(tables[0][:shared]) if i else []
        while len(table) < count:
            pool = pool ^ (two_pools and rng.random() < 0.3)
            table.append((pool, free[pool].pop()))
        for at, (pool, slot) in enumerate(table):
            for side, rows in enumerate((keys[i], values[i])):
                part = rows[at * BLOCK : (at + 1) * BLOCK]
                pools[pool][side][slot, : len(part)] = part
        tables.append(table)
    return Batch(lengths, q, keys, values, pools, tables, random.Random(seed))


def flash(kernel: Any = None) -> FlashAttention:
    return FlashAttention(HEAD_DIM**-0.5, kernel or ReferenceKernel(), CPU)


def _flash_of(config: AttentionConfig) -> FlashAttention:
    return FlashAttention(config.score_scale, ReferenceKernel(), CPU)


def run(batch: Batch, longest: int, backend: AttentionBackend | None = None) -> Tensor:
    backend = backend or flash()
    return backend.run(0, batch.q, batch.context(backend, batch.chunks(longest)))


# -- results

BATCHES: dict[str, Lengths] = {
    "one token": ((1, 1),),
    "decode": ((1, 2), (1, 16), (1, 17), (1, 31), (1, 1)),
    "whole prefills": ((5, 5), (16, 16), (1, 1), (23, 23)),
    "chunked prefills": ((7, 30), (16, 32), (3, 5), (20, 21)),
    "mixed": ((1, 40), (9, 33), (1, 12), (13, 13), (1, 4), (2, 8)),
    "a chunk of one block": ((4, 20), (4, 18), (4, 19)),
}


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 8), marks=pytest.mark.breadth)])
@pytest.mark.parametrize("longest", [1, 2, 100])
@pytest.mark.parametrize("name", BATCHES)
def test_equals_dense_attention(name: str, longest: int, seeds: range) -> None:
    """However the blocks are cut into chunks of two pools; `longest`: blocks of a span."""
    for seed in seeds:
        batch = make_batch(BATCHES[name], seed)
        got = run(batch, longest)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, batch.dense().float(), atol=2e-6, rtol=0)


def test_equals_the_plain_backend_on_shared_prefixes() -> None:
    """Sequences that begin with the same blocks ask about them in one call."""
    lengths = ((1, 30), (6, 21), (1, 17))
    batch = make_batch(lengths, 3, shared=4)
    kernel = ReferenceKernel()
    got = run(batch, 100, flash(kernel))
    torch.testing.assert_close(got, batch.dense().float(), atol=2e-6, rtol=0)
    plain = run(make_batch(lengths, 3, shared=4), 100, TorchAttention(AttentionConfig(HEAD_DIM)))
    torch.testing.assert_close(got, plain, atol=2e-6, rtol=0)
    together = [call for call in kernel.calls if len(call.num_keys) > 1]
    assert any((call.block_table[0, 0] == call.block_table[1, 0]).item() for call in together)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_partial_results_in_half_precision_merge_in_fp32(dtype: torch.dtype) -> None:
    """Each call rounds its own result once; 30 merges add nothing that shows."""
    batch = make_batch(((1, 120), (17, 100)), 1, dtype=dtype)
    got = run(batch, 1)
    assert got.dtype == dtype
    error = (got.double() - batch.dense()).abs().max()
    assert error < 2 * torch.finfo(dtype).eps


def test_scores_far_beyond_the_range_of_exp() -> None:
    """Differences of log-sum-exps are taken before they are exponentiated."""
    batch = make_batch(((1, 40), (9, 30)), 2, stretch=2000.0)
    got = run(batch, 1)
    assert got.isfinite().all()
    torch.testing.assert_close(got, batch.dense().float(), atol=1e-3, rtol=0)


def test_poison_that_is_read_shows() -> None:
    """NaN in a key that a query sees reaches that query, and no other sequence."""
    batch = make_batch(((1, 9), (1, 9)), two_pools=False)
    batch.pools[0][0][batch.tables[0][1][1], 0] = torch.nan
    got = run(batch, 1)
    assert got[0].isnan().all() and got[1].isfinite().all()


# -- which calls


@pytest.mark.parametrize("block", [1, 3])
def test_queries_and_keys_meet_exactly_once(block: int) -> None:
    """For every length, number of queries and span; causal ranges are the diagonal's."""
    for kv_len in range(1, 10):
        for num_queries, begin in itertools.product(range(1, kv_len + 1), range(0, kv_len, block)):
            for stop in range(begin + 1, kv_len + block, block):
                end = min(stop, kv_len)
                full, causal = seen_by(begin, end, num_queries, kv_len)
                keys = range(begin, end)
                pairs = [(p, key) for p in full for key in keys]
                seen = [end - begin - len(causal) + 1 + j for j in range(len(causal))]
                pairs += [(p, keys[i]) for p, n in zip(causal, seen, strict=True) for i in range(n)]
                queries = range(kv_len - num_queries, kv_len)
                assert sorted(pairs) == [(p, key) for p in queries for key in keys if key <= p]
                assert all(n > 0 for n in seen)


def test_a_decode_is_one_call_without_a_mask_for_each_chunk() -> None:
    batch = make_batch(((1, 17), (1, 30), (1, 5)), two_pools=False)
    kernel = ReferenceKernel()
    backend = flash(kernel)
    spans = tuple((i, 0, tuple(s for _, s in t)) for i, t in enumerate(batch.tables))
    chunk = chunk_of(batch.pools[0], spans)
    backend.run(0, batch.q, batch.context(backend, [chunk]))
    (call,) = kernel.calls
    assert not call.causal and call.rows == slice(0, 3) and call.max_queries == 1
    assert call.block_table is chunk.block_table


def test_a_boundary_inside_a_span_cuts_the_queries() -> None:
    """Tokens 6 to 15 of 16 ask; the first chunk ends at key 12, the second at the last."""
    batch = make_batch(((10, 16),), two_pools=False)
    slots = tuple(slot for _, slot in batch.tables[0])
    first, second = (
        chunk_of(batch.pools[0], ((0, at, part),)) for at, part in ((0, slots[:3]), (3, slots[3:]))
    )
    full, causal = plan_calls(first, batch.lengths)
    assert (full.causal, full.rows, full.max_keys) == (False, slice(6, 10), 12)
    assert (causal.causal, causal.rows, causal.max_keys) == (True, slice(0, 6), 12)
    (last,) = plan_calls(second, batch.lengths)
    assert (last.causal, last.rows, last.max_keys) == (True, slice(6, 10), 4)


def test_blocks_past_the_end_ask_nothing() -> None:
    pool = make_batch(((1, 40),)).pools[0]
    assert plan_calls(chunk_of(pool, ((0, 2, (0, 1)),)), ((1, 8),)) == ()
    (call,) = plan_calls(chunk_of(pool, ((0, 1, (0, 1)), (1, 2, (3,)))), ((1, 8), (1, 8)))
    assert call.num_keys.tolist() == [4] and call.block_table.tolist() == [[0, 1]]


# -- merging


def merged(*parts: tuple[Tensor, Tensor], rows: slice | Tensor = slice(None)) -> Tensor:
    """Three rows after these (output, log-sum-exp) were merged into `rows`."""
    state = MergedState.on(CPU)
    state.start(torch.empty(3, HEADS, HEAD_DIM))
    for out, lse in parts:
        state.merge(rows, out, lse.clone())
    return state.result(torch.float32)


@pytest.mark.parametrize("rows", [slice(None), torch.tensor([2, 0, 1])], ids=["slice", "indices"])
@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinite_log_sum_exp_means_no_keys(sign: int, rows: slice | Tensor) -> None:
    """Before, between and after parts that have keys; flash-attn says +inf."""
    real = [(torch.randn(3, HEADS, HEAD_DIM), torch.randn(HEADS, 3)) for _ in range(2)]
    nothing = torch.zeros(3, HEADS, HEAD_DIM), torch.full((HEADS, 3), sign * torch.inf)
    with_nothing = merged(nothing, real[0], nothing, nothing, real[1], nothing, rows=rows)
    assert with_nothing.isfinite().all()
    assert torch.equal(with_nothing, merged(*real, rows=rows))
    some = torch.where(torch.arange(3) == 1, sign * torch.inf, 0.5).expand(HEADS, 3).clone()
    two = merged(real[0], (torch.zeros(3, HEADS, HEAD_DIM), some), rows=rows)
    place = 1 if isinstance(rows, slice) else int(rows[1])
    assert torch.equal(two[place], real[0][0][1])


def test_a_nan_is_not_taken_for_no_keys() -> None:
    out, lse = torch.ones(3, HEADS, HEAD_DIM), torch.zeros(HEADS, 3)
    bad = lse.clone()
    bad[:, 1] = torch.nan
    got = merged((out, lse), (out, bad))
    assert got[1].isnan().all() and got[0].isfinite().all() and got[2].isfinite().all()


# -- what is made once


def test_index_tensors_are_made_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for every step anew: neither other lengths nor other spans meet an old plan."""
    made: list[int] = []
    on_device = flash_calls.to_device

    def counting(values: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        made.append(len(values))
        return on_device(values, dtype, device)

    monkeypatch.setattr(flash_calls, "to_device", counting)
    kernel = ReferenceKernel()
    backend = flash(kernel)
    for seed, lengths in enumerate([BATCHES["mixed"], BATCHES["mixed"], BATCHES["decode"]]):
        batch = make_batch(tuple(lengths), seed)
        ctx = batch.context(backend, batch.chunks(2))
        dense = batch.dense().float()
        counts = []
        calls: list[list[KernelCall]] = []
        for layer in range(3):
            before = len(made)
            kernel.calls = []
            torch.testing.assert_close(backend.run(layer, batch.q, ctx), dense, atol=2e-6, rtol=0)
            counts.append(len(made) - before)
            calls.append(kernel.calls)
        assert all(a is b is c for a, b, c in zip(*calls, strict=True))
        assert counts[0] > 0 and counts[1:] == [0, 0]


def test_the_same_spans_with_other_lengths_are_another_step() -> None:
    """A decode step later on the same blocks: one key more."""
    backend = flash()
    batch = make_batch(((1, 6),), two_pools=False)
    chunk = chunk_of(batch.pools[0], ((0, 0, tuple(slot for _, slot in batch.tables[0])),))
    for kv_len in (5, 6):
        shorter = replace(
            batch,
            lengths=((1, kv_len),),
            keys=[batch.keys[0][:kv_len]],
            values=[batch.values[0][:kv_len]],
        )
        got = backend.run(0, batch.q, shorter.context(backend, [chunk]))
        torch.testing.assert_close(got, shorter.dense().float(), atol=2e-6, rtol=0)


def _storages(backend: FlashAttention | TorchAttention) -> list[int]:
    state = backend._state
    assert state is not None
    return [t.untyped_storage().data_ptr() for t in (state.row_max, state.row_sum, state.acc)]


@pytest.mark.parametrize(
    "make", [flash, lambda: TorchAttention(AttentionConfig(HEAD_DIM))], ids=["flash", "torch"]
)
def test_buffers_stay_after_the_largest_step(
    make: Callable[[], FlashAttention | TorchAttention],
) -> None:
    """A smaller step leaves them where they are; results are not in them."""
    backend = make()
    large, small = make_batch(BATCHES["mixed"], 1), make_batch(BATCHES["decode"], 2)
    first = run(large, 2, backend)
    storages = _storages(backend)
    kept = first.clone()
    assert first.untyped_storage().data_ptr() not in storages
    for batch in (small, large, small):
        got = run(batch, 2, backend)
        torch.testing.assert_close(got, batch.dense().float(), atol=2e-6, rtol=0)
        assert _storages(backend) == storages
    assert torch.equal(first, kept)


def test_gathered_rows_reuse_their_buffers() -> None:
    """Sequences 0 and 2 of three share a chunk: their rows are not neighbours."""
    batch = make_batch(((2, 8), (3, 8), (4, 8)), two_pools=False)
    backend = flash()
    slots = [tuple(slot for _, slot in table) for table in batch.tables]
    chunks = [
        chunk_of(batch.pools[0], ((0, 0, slots[0]), (2, 0, slots[2]))),
        chunk_of(batch.pools[0], ((1, 0, slots[1]),)),
    ]
    ctx = batch.context(backend, chunks)
    buffers: list[list[int]] = []
    for _ in range(2):
        got = backend.run(0, batch.q, ctx)
        torch.testing.assert_close(got, batch.dense().float(), atol=2e-6, rtol=0)
        buffers.append([t.data_ptr() for t in (backend._gathered, *backend._state.scratch)])
    assert buffers[0] == buffers[1] and all(buffers[0])


# -- the whole engine


def test_an_engine_that_streams_equals_transformers(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks across blocks, shared prefixes, mixed batches; NaN in undelivered memory, delays."""
    monkeypatch.setattr(parts, "make_attention", lambda *args: (_flash_of(args[-1].config), ""))
    path = tiny("llama")
    rng = random.Random(5)
    long = [rng.randrange(256) for _ in range(60)]
    prompts = [long, long[:7], [*long[:32], 9, 9], [1], [rng.randrange(256) for _ in range(33)]]
    driver = Driver(
        LLMEngine(
            path,
            dtype="float32",
            device="cpu",
            kvcache_block_size=8,
            num_gpu_blocks=7,
            max_num_batched_tokens=20,
            max_num_seqs=3,
            enable_cpu_offload=True,
            offload_mode="stream",
            kv_offload_gib=host_gib(path, 100, 8),
            slot_tokens=16,
            ring_slots=2,
            debug_kv=True,
            debug_copy_delay_ms=0.2,
        )
    )
    assert driver.engine.plan.attention == "reference"
    outputs = driver.run(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert driver.engine.kv.peak_streamed > 1
    assert_greedy(path, prompts, outputs, 8)
    assert_logits_are_transformers(driver, path, outputs)
    driver.engine.close()


# -- which kernel is taken

REFERENCE = ReferenceKernel()


def _flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, None]:
    assert return_attn_probs and softmax_scale and block_table is not None
    call = KernelCall(
        rows=slice(None),
        query_start=cu_seqlens_q,
        key_start=cu_seqlens_k,
        num_keys=cu_seqlens_k.diff(),
        block_table=block_table,
        lengths=(),
        max_queries=max_seqlen_q,
        max_keys=max_seqlen_k,
        causal=causal,
    )
    return *REFERENCE.attend(q, k, v, call, softmax_scale), None


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: object = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    assert enable_gqa and seqused_k is not None and return_aux == {"lse": True}
    assert torch.equal(seqused_k, cu_seq_k.diff())
    causal = {(-1, 0): True, (-1, -1): False}[window_size]
    out, lse, _ = _flash_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, scale, causal, True, block_table
    )
    return out, lse


def _varlen_of_torch_2_11(query: Tensor, *, return_aux: object = None) -> None:
    raise AssertionError("must not be called")


def _varlen_of_torch_2_12(*args: Any, num_splits: int | None = None, **kwargs: Any) -> Any:
    if num_splits is not None:
        raise RuntimeError("num_splits requires FA3.\nC++ stack")
    return _varlen(*args, **kwargs)


_varlen_of_torch_2_12.__signature__ = inspect.signature(_varlen)


def _changed(change: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """flash-attn whose results `change` spoils; it is given (out, lse, causal)."""

    def spoiled(*args: Any, causal: bool = False, **kwargs: Any) -> tuple[Tensor, Tensor, None]:
        return *change(*_flash_attn(*args, causal=causal, **kwargs)[:2], causal), None

    spoiled.__signature__ = inspect.signature(_flash_attn)
    return spoiled


def _install(
    monkeypatch: pytest.MonkeyPatch, flash_attn: Any = None, varlen: Any = _varlen
) -> None:
    module = types.SimpleNamespace(varlen_attn=varlen, AuxRequest=dict)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    if flash_attn is not None:
        flash_attn = types.SimpleNamespace(flash_attn_varlen_func=flash_attn, __version__="2.8.3")
        monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)


def choose(dtype: torch.dtype = torch.bfloat16, block: int = 256, dim: int = 64) -> str:
    """The name of what is taken, and why what comes before it was not."""
    refusals: list[str] = []
    for find in (flash_attn_kernels, varlen_kernels):
        taken, why = make_flash(find, CPU, dtype, block, AttentionConfig(dim))
        refusals += [why] if why else []
        if taken is not None:
            return "; ".join([taken.name, *refusals])
    return f"none: {'; '.join(refusals)}"


VERSION = torch.__version__


def test_flash_attn_comes_first_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, _flash_attn)
    assert choose() == "flash-attn 2.8.3"


def test_else_torchs_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch)
    want = f"varlen_attn of torch {VERSION}, num_splits=1; flash-attn is not installed"
    assert choose(torch.float16, 512, 128) == want


def test_torch_2_12_refuses_num_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, varlen=_varlen_of_torch_2_12)
    name = choose()
    assert name.startswith(f"varlen_attn of torch {VERSION}; ")
    assert name.endswith("num_splits=1: num_splits requires FA3.")


def test_torch_2_11_has_no_block_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, varlen=_varlen_of_torch_2_11)
    lacks = f"varlen_attn of torch {VERSION} lacks block_table, seqused_k, enable_gqa"
    assert choose() == f"none: flash-attn is not installed; {lacks}"


def _with_causality(change: Callable[[bool], bool]) -> Callable[..., Any]:
    """flash-attn that is told another causality than was asked for."""

    def confused(*args: Any, causal: bool = False, **kwargs: Any) -> Any:
        return _flash_attn(*args, causal=change(causal), **kwargs)

    confused.__signature__ = inspect.signature(_flash_attn)
    return confused


def _top_left(*args: Any, causal: bool = False, cu_seqlens_k: Tensor, **kwargs: Any) -> Any:
    """Query i sees keys up to i, as flash-attn before 2.1 had it: as if the rest were not there."""
    if causal:
        cu_seqlens_k = kwargs["cu_seqlens_q"]
        kwargs["max_seqlen_k"] = kwargs["max_seqlen_q"]
    return _flash_attn(*args, causal=causal, cu_seqlens_k=cu_seqlens_k, **kwargs)


_top_left.__signature__ = inspect.signature(_flash_attn)
SPOILED: dict[str, tuple[Callable[..., Any], str]] = {
    "top left": (_top_left, "its output is not that of plain attention"),
    "never causal": (_with_causality(lambda _: False), "its output is not that of plain"),
    "always causal": (_with_causality(lambda _: True), "its output is not that of plain"),
    "log2": (
        _changed(lambda out, lse, _: (out, lse * 1.4427)),
        "its log-sum-exp is not that of plain attention",
    ),
    "shape": (
        _changed(lambda out, lse, _: (out, lse.unsqueeze(0))),
        "its log-sum-exp has the shape [1, 2, 2], not [2, 2]",
    ),
    "decodes": (
        _changed(lambda out, lse, causal: (out, lse if causal else lse.T)),
        "its log-sum-exp is not that of plain attention",
    ),
    "an old one": (lambda q, cu_seqlens_q: None, "lacks block_table, return_attn_probs"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_kernel_that_does_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    function, reason = SPOILED[name]
    _install(monkeypatch, function)
    assert reason in choose() and choose().startswith("varlen_attn")


@pytest.mark.parametrize(
    ("dtype", "block", "dim", "reason"),
    [
        (torch.float32, 256, 64, "bfloat16 or float16, not float32"),
        (torch.bfloat16, 128, 64, "kvcache_block_size to be a multiple of 256, not 128"),
        (torch.bfloat16, 256, 60, "a head_dim that is a multiple of 8 up to 256, not 60"),
        (torch.float16, 256, 512, "a head_dim that is a multiple of 8 up to 256, not 512"),
    ],
)
def test_a_limit_that_is_not_kept_is_named(
    dtype: torch.dtype, block: int, dim: int, reason: str
) -> None:
    config = AttentionConfig(dim)
    name = str(dtype).removeprefix("torch.")
    assert ATTENTION_LIMITS["flash-attn"].unmet(name, block, config) == reason
    with pytest.raises(
        ConfigError, match=f"'varlen' cannot be used: varlen needs {reason}; change"
    ):
        make_attention("varlen", AttentionSetup(torch.device("cuda"), dtype, block, config))


def test_a_broken_installation_is_told_from_none(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch)
    real = flash_kernels.import_module

    def broken(name: str) -> Any:
        if name == "flash_attn":
            raise ImportError("undefined symbol: _ZN3c104cuda")
        return real(name)

    monkeypatch.setattr(flash_kernels, "import_module", broken)
    assert "flash-attn: undefined symbol: _ZN3c104cuda" in choose()


def test_an_engine_takes_what_its_device_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, refused = torch.device("cuda"), {"flash_attn_kernels", "varlen_kernels", "sdpa_kernels"}

    def make(find: Callable[..., Any], *asked: object) -> tuple[Any, str]:
        assert asked == (cuda, torch.float16, 256, PLAIN)
        return (None, "the reason") if find.__name__ in refused else (flash(), "")

    def name(wanted: str = "auto", device: torch.device = cuda) -> str:
        setup = AttentionSetup(device, torch.float16, 256, PLAIN, None, "no compiler")
        backend, reasons = make_attention(wanted, setup)
        return f"{backend.name} ({reasons})"

    monkeypatch.setattr(attention, "make_flash", make)
    assert name(device=CPU) == "torch (c needs float32 or bfloat16, not float16)"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "nanoengine.attention.triton_attention", None)
        reasons = "; the reason; the reason"
        assert name().startswith("torch (Triton: ") and name().endswith(f"{reasons}; the reason)")
        refused.remove("sdpa_kernels")
        assert name().startswith("reference (Triton: ") and name().endswith(f"{reasons})")
    triton_attention = pytest.importorskip("nanoengine.attention.triton_attention")
    monkeypatch.setattr(triton_attention, "_shared_memory", lambda device: 99 << 10)
    monkeypatch.setattr(triton_attention, "copies_boxes", lambda device: False)
    assert name().startswith("Triton ") and "reason" not in name()
    assert name("sdpa") == "reference ()"
    with pytest.raises(ConfigError, match="attention_backend='varlen' cannot be used: the reason"):
        name("varlen")
    with pytest.raises(ConfigError, match="'c' is not for device='cuda', which has triton, flash"):
        name("c")
    refused.remove("varlen_kernels")
    assert name("varlen") == "reference ()"


# -- PyTorch's scaled_dot_product_attention


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 0.02)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("name", BATCHES)
def test_sdpa_equals_dense_attention(name: str, dtype: torch.dtype, limit: float) -> None:
    """Rows of length 1, blocks without keys, boundaries inside spans."""
    (kernel,), _ = sdpa_kernels(CPU)
    for longest in (1, 2, 100):
        batch = make_batch(BATCHES[name], seed=longest, dtype=dtype)
        got = run(batch, longest, flash(kernel))
        torch.testing.assert_close(got.double(), batch.dense(), atol=limit, rtol=0)


def test_sdpa_passes_the_trial_and_a_wrong_log_sum_exp_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken, why = make_flash(sdpa_kernels, CPU, torch.float32, 8, AttentionConfig(16))
    assert taken is not None and taken.name.startswith("SDPA of torch") and not why
    real = SdpaKernel._call

    def wrong(self: SdpaKernel, *args: Any) -> tuple[Tensor, Tensor]:
        out, lse = real(self, *args)
        return out, lse + 0.1

    monkeypatch.setattr(SdpaKernel, "_call", wrong)
    taken, why = make_flash(sdpa_kernels, CPU, torch.float32, 8, AttentionConfig(16))
    assert taken is None and why.endswith("its log-sum-exp is not that of plain attention")


@pytest.mark.parametrize("streams", [False, True])
def test_an_engine_that_wants_sdpa_equals_transformers(
    tiny: Callable[[str], Path], streams: bool
) -> None:
    path = tiny("llama")
    settings = STREAMED | {"ring_slots": 2, "debug_kv": True} if streams else {}
    made = small_engine(
        path, attention_backend="sdpa", max_num_batched_tokens=20, max_num_seqs=3, **settings
    )
    assert made.plan.attention.startswith("SDPA of torch")
    driver = Driver(made)
    prompts = [[(i * 31 + n) % 256 for i in range(n)] for n in (1, 8, 37)]
    outputs = driver.run(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert_greedy(path, prompts, outputs, 6)
    assert_logits_are_transformers(driver, path, outputs)
    assert (made.kv.counters.h2d_bytes > 0) == streams
    made.close()


def test_an_unknown_backend_is_refused(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="attention_backend must be one of auto, flash-attn, var"):
        small_engine(tiny("llama"), attention_backend="flash")


def test_torchs_own_function_takes_what_we_give_it() -> None:
    """The real signature, on tensors without memory; it returns the log-sum-exp by heads."""
    module = pytest.importorskip("torch.nn.attention.varlen")
    if flash_kernels._lacks(module.varlen_attn, ("block_table",)):
        pytest.skip("this torch's varlen_attn has no block_table")
    kernel = VarlenKernel(module.varlen_attn, module.AuxRequest(lse=True), "", 1)
    meta = torch.device("meta")
    pool = torch.empty(9, 256, 2, 64, dtype=torch.bfloat16, device=meta)
    call = KernelCall(
        rows=slice(None),
        query_start=torch.empty(3, dtype=torch.int32, device=meta),
        key_start=torch.empty(3, dtype=torch.int32, device=meta),
        num_keys=torch.empty(2, dtype=torch.int32, device=meta),
        block_table=torch.empty(2, 4, dtype=torch.int32, device=meta),
        lengths=(),
        max_queries=4,
        max_keys=900,
        causal=True,
    )
    q = torch.empty(5, 8, 64, dtype=torch.bfloat16, device=meta)
    out, lse = kernel.attend(q, pool, pool, call, 0.125)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert lse.shape == (8, 5) and lse.dtype == torch.float32


def test_num_splits_is_passed_only_if_set() -> None:
    seen: list[dict[str, Any]] = []

    def function(*args: object, **kwargs: Any) -> tuple[None, None, None]:
        seen.append(kwargs)
        return None, None, None

    empty = torch.empty(0)
    call = KernelCall(slice(None), empty, empty, empty, empty, (), 1, 1, False)
    for splits in (1, None):
        FlashAttnKernel(function, "2", splits).attend(empty, empty, empty, call, 1.0)
    assert [kwargs.get("num_splits") for kwargs in seen] == [1, None]
    assert "num_splits" not in seen[1]


@pytest.mark.gpu
@pytest.mark.parametrize("find", [flash_attn_kernels, varlen_kernels, sdpa_kernels])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_real_kernel_on_a_gpu(find: FindKernels, dtype: torch.dtype) -> None:
    """Blocks of 256 over two pools: decodes, prefills and boundaries inside spans."""
    device = torch.device("cuda")
    backend, why = make_flash(find, device, dtype, 256, PLAIN)
    if backend is None:
        pytest.skip(why)
    lengths = ((1, 1500), (300, 1300), (1, 256), (513, 513), (1, 257))
    generator = torch.Generator().manual_seed(0)
    pools = [
        tuple(torch.randn(40, 256, 2, 64, generator=generator).to(device, dtype) for _ in "kv")
        for _ in range(2)
    ]
    q = torch.randn(sum(n for n, _ in lengths), 8, 64, generator=generator).to(device, dtype)
    slots = iter(range(40))
    chunks, rest = [], [list(itertools.islice(slots, -(-n // 256))) for _, n in lengths]
    for number, size in enumerate(itertools.cycle((1, 2, 3))):
        spans = tuple(
            (i, -(-lengths[i][1] // 256) - len(left), tuple(left[:size]))
            for i, left in enumerate(rest)
            if left
        )
        if not spans:
            break
        chunk = chunk_of(pools[number % 2], spans)
        chunks.append(replace(chunk, block_table=chunk.block_table.clamp(min=0).to(device)))
        rest = [left[size:] for left in rest]
    ctx = context(lengths, chunks, backend)
    plain = TorchAttention(PLAIN).run(0, q, ctx)
    torch.testing.assert_close(backend.run(0, q, ctx), plain, atol=2e-2, rtol=0)
