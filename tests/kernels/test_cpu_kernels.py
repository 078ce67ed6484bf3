"""The C kernels against float64, and the law that splitting KV into calls moves no bit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draw_rules import RULES, runs_as_fast
from live_server import until
from marks import BUILDS, HAS_TILES, SMALLER, needs_compiler, smaller
from paged_batches import Batch, chunk_of, int32, make_batch, relative_error
from torch import Tensor

from nanoengine.context import KVChunk, KVTarget, SoftmaxState
from nanoengine.engine.sampler import draw_key
from nanoengine.errors import EngineError
from nanoengine.kernels import c_build
from nanoengine.kernels.c_build import KernelBuildError
from nanoengine.kernels.cpu_kernels import CpuKernels
from nanoengine.models.activations import GATED, clamped_swiglu
from nanoengine.models.draw import Draws, draw, likeliest
from nanoengine.models.layer_ops import TorchOps
from nanoengine.models.products import Norm
from nanoengine.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
DTYPES = list(TOLERANCE)
VARIANTS = {"native": (), **SMALLER}

pytestmark = [
    pytest.mark.usefixtures("two_threads"),
    needs_compiler,
]


@pytest.fixture(scope="module", params=BUILDS)
def kernels(build_folder, request):
    """As this machine compiles them, and as one without matrix tiles would."""
    return CpuKernels.load(build_folder, BUILDS[request.param])


def whole(batch: Batch) -> list[KVChunk]:
    return [chunk_of(batch, {s: (0, len(t)) for s, t in enumerate(batch.tables)})]


def fold(
    kernels: CpuKernels, batch: Batch, chunks, out: Tensor | None = None, window: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The softmax state after all chunks; `out`, if given, receives the attention."""
    tokens, heads, head_dim = batch.q.shape
    shapes = (tokens, heads), (tokens, heads), (tokens, heads, head_dim)
    row_max, row_sum, acc = (torch.full(shape, torch.nan) for shape in shapes)
    lengths = batch.query_start(), int32(batch.kv_lens)
    for at, chunk in enumerate(chunks, 1):
        kernels.attend(
            batch.q,
            chunk,
            *lengths,
            SoftmaxState(row_max, row_sum, acc),
            batch.scale,
            is_first=at == 1,
            out=out if at == len(chunks) else None,
            window=window,
        )
    return row_max, row_sum, acc


def attend(kernels: CpuKernels, batch: Batch, chunks=None) -> Tensor:
    out = torch.full(batch.q.shape, torch.nan, dtype=batch.q.dtype)
    fold(kernels, batch, chunks or whole(batch), out)
    return out


def assert_close(kernels: CpuKernels, batch: Batch) -> None:
    assert relative_error(attend(kernels, batch), batch.reference()) < TOLERANCE[batch.q.dtype]


def same_bits(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    """Equal as bytes: unlike ==, this tells -0 from +0."""
    return all(
        torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b, strict=True)
    )


# Prefill and decode, alone and on top of earlier keys; a last block full, partial and of one key.
Q_LENS = [1, 2, 7, 64, 300, 1, 4]
KV_LENS = [1, 33, 300, 64, 512, 513, 4]


@pytest.mark.some(13)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 5, 16, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_blocks_and_groups(kernels, dtype, block_size, group):
    assert_close(
        kernels,
        make_batch(Q_LENS, KV_LENS, dtype=dtype, group=group, block_size=block_size, head_dim=32),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [7, 16, 64, 72, 80, 128, 256])
def test_head_dims(kernels, dtype, head_dim):
    assert_close(kernels, make_batch(Q_LENS, KV_LENS, dtype=dtype, head_dim=head_dim))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_instruction_set(build_folder, variant, dtype):
    other = CpuKernels.load(build_folder, VARIANTS[variant])
    for head_dim in (64, 72, 5):
        assert_close(other, make_batch(Q_LENS, KV_LENS, dtype=dtype, head_dim=head_dim))


def test_variants_are_other_builds(build_folder):
    loaded = {
        name: CpuKernels.load(build_folder, flags).isa
        for name, flags in {**BUILDS, **smaller("generic")}.items()
    }
    assert loaded["generic"] == "generic"
    if HAS_TILES:
        assert (loaded["native"], loaded["no_tiles"]) == ("amx_bf16", "avx512_bf16")
    else:
        assert loaded["native"] in ("generic", "avx2", "avx512", "avx512_bf16")


def test_block_larger_than_a_segment(kernels):
    for q_len in (1, 4, 9):
        assert_close(
            kernels, make_batch([q_len], [1500], dtype=torch.float32, block_size=4096, group=1)
        )


def test_more_heads_in_a_group_than_rows_in_an_item(kernels):
    assert_close(kernels, make_batch([9], [70], dtype=torch.float32, kv_heads=1, group=250))


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores(kernels, dtype):
    """Sharp softmax: exponents beyond what exp can represent, and a maximum that keeps growing."""
    batch = make_batch([1, 40], [200, 200], dtype=dtype)
    for key in batch.keys:
        key.mul_(40)
    grown = make_batch([1, 40], [200, 200], dtype=dtype)
    ramp = torch.linspace(1, 60, 200)[:, None, None]
    for key in grown.keys:
        key.mul_(ramp.to(dtype))
    for b in (batch, grown):
        refill(b)
        # Scores of some hundreds carry a rounding error of 1e-5 into float32 exponents.
        limit = 5e-5 if dtype == torch.float32 else TOLERANCE[dtype]
        assert relative_error(attend(kernels, b), b.reference()) < limit


def refill(batch: Batch) -> None:
    """Write the keys into the pool again, after a test changed them."""
    for table, key in zip(batch.tables, batch.keys, strict=True):
        for block, part in zip(table, key.split(batch.block_size), strict=True):
            batch.k_pool[block, : len(part)] = part


def random_split(batch: Batch, rng: random.Random) -> list[KVChunk]:
    """Chunks that hold every block once, in order, with sequences cut at unrelated places."""
    at = [0] * len(batch.tables)
    chunks = []
    while any(a < len(t) for a, t in zip(at, batch.tables, strict=True)):
        spans = {}
        for s, table in enumerate(batch.tables):
            step = rng.choice([0, 1, 1, 2, 3, len(table)])
            if at[s] < len(table) and step:
                spans[s] = (at[s], min(at[s] + step, len(table)))
                at[s] = spans[s][1]
        if spans:
            chunks.append(chunk_of(batch, spans, scatter=rng.random() < 0.5))
    return chunks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["native", "generic"])
@pytest.mark.parametrize("block_size", [1, 5, 16, 256])
def test_splitting_moves_no_bit(build_folder, dtype, variant, block_size):
    kernels = CpuKernels.load(build_folder, VARIANTS[variant])
    longest = 70 if block_size == 1 else 600
    q_lens, kv_lens = [1, 4, 7, 60, 2], [longest, 33, longest, 60, longest - 1]
    batch = make_batch(q_lens, kv_lens, dtype=dtype, block_size=block_size, head_dim=24)
    want = fold(kernels, batch, whole(batch))
    for seed in range(6):
        rng = random.Random(seed)
        torch.set_num_threads(rng.choice([1, 2, 3]))
        assert same_bits(fold(kernels, batch, random_split(batch, rng)), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_and_threads_move_no_bit(kernels, dtype):
    q_lens, kv_lens = [1, 100, 3, 1], [1000, 700, 40, 3]
    batch = make_batch(q_lens, kv_lens, dtype=dtype)
    want = fold(kernels, batch, whole(batch))
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        chunks = [chunk_of(batch, {s: (0, len(t))}) for s, t in enumerate(batch.tables)]
        assert same_bits(fold(kernels, batch, chunks), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shared_prefix_moves_no_bit(kernels, dtype):
    """The segments of several sequences take turns, those of one block among them."""
    batch = make_batch([1, 2, 1], [700, 900, 300], dtype=dtype)
    batch.tables[1][:40] = batch.tables[0][:40]
    batch.tables[2][:10] = batch.tables[0][:10]
    alone = [chunk_of(batch, {s: (0, len(t))}) for s, t in enumerate(batch.tables)]
    assert same_bits(fold(kernels, batch, whole(batch)), fold(kernels, batch, alone))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_that_end_in_one_block_share_no_keys_of_the_other(kernels, dtype):
    """Each sees as far as its own last key, which lies in a block of both."""
    batch = make_batch([1, 1, 2], [290, 300, 300], dtype=dtype, block_size=256)
    batch.tables[0][:], batch.tables[2][:] = batch.tables[1], batch.tables[1]  # all are numbers
    alone = [chunk_of(batch, {s: (0, len(t))}) for s, t in enumerate(batch.tables)]
    assert same_bits(fold(kernels, batch, whole(batch)), fold(kernels, batch, alone))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads, group, window", [(2, 3, None), (5, 4, 300), (1, 40, None)])
def test_many_share_a_prefix(kernels, dtype, kv_heads, group, window):
    """More rows than one piece of work holds, over a block of several segments; with a window that
    begins elsewhere for each; with more heads to a group than matrix tiles take.
    """
    lens = [600 + 7 * i for i in range(45)]
    heads = {"kv_heads": kv_heads, "group": group, "head_dim": 32}
    batch = make_batch([1 + i % 3 for i in range(45)], lens, dtype=dtype, block_size=600, **heads)
    for table in batch.tables[1:]:
        table[0] = batch.tables[0][0]
    alone = [chunk_of(batch, {s: (0, len(t))}) for s, t in enumerate(batch.tables)]
    got = fold(kernels, batch, whole(batch), window=window)
    assert same_bits(got, fold(kernels, batch, alone, window=window))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chunk_in_the_future_leaves_rows_untouched(kernels, dtype):
    """Prefill rows that lie before a chunk keep their bits, even bits that no fold would make."""
    batch = make_batch([3, 50], [64, 64], dtype=dtype)
    state = fold(kernels, batch, [chunk_of(batch, {0: (0, 3), 1: (0, 3)})])
    row_max, row_sum, acc = state
    acc[-50:][:34] = -0.0
    row_max[-50:][:34] = -torch.inf
    before = [x.clone() for x in state]
    kernels.attend(
        batch.q,
        chunk_of(batch, {0: (3, 4), 1: (3, 4)}),
        batch.query_start(),
        int32(batch.kv_lens),
        SoftmaxState(*state),
        batch.scale,
    )
    unseen = slice(3, 3 + 34)  # positions 14..47; the chunk begins at 48
    assert same_bits([x[unseen] for x in state], [x[unseen] for x in before])
    assert not torch.equal(row_sum[37:], before[1][37:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_minus_zero_is_not_kept(kernels, dtype):
    """-1 weighed with an underflowed 0: a tile computed for a neighbour only would mend it."""
    batch = make_batch([64], [64], dtype=dtype)
    batch.q.fill_(1.0)
    first, second, *_ = batch.tables[0]
    batch.k_pool.fill_(0.0)
    batch.v_pool.fill_(0.0)
    batch.v_pool[first] = -1.0
    batch.k_pool[second], batch.v_pool[second] = 100.0, -0.0
    want = fold(kernels, batch, whole(batch))
    one_by_one = [chunk_of(batch, {0: (b, b + 1)}) for b in range(4)]
    assert same_bits(fold(kernels, batch, one_by_one), want)
    assert not torch.signbit(want[2][16:]).any()


def test_rows_without_keys_finish_as_zero(kernels):
    for dtype in DTYPES:
        batch = make_batch([2], [5], dtype=dtype)
        out = attend(kernels, batch, [chunk_of(batch, {})])
        assert torch.equal(out, torch.zeros_like(out))


def test_empty_calls(kernels):
    batch = make_batch([1], [5], dtype=torch.float32)
    row_max, row_sum, acc = state = fold(kernels, batch, [chunk_of(batch, {})])
    assert (row_max == -torch.inf).all() and not row_sum.any() and not acc.any()
    assert same_bits(fold(kernels, batch, [chunk_of(batch, {0: (0, 0)})]), state)
    whole_then_empty = [*whole(batch), chunk_of(batch, {0: (0, 0)})]
    assert same_bits(fold(kernels, batch, whole_then_empty), fold(kernels, batch, whole(batch)))


def test_sequence_without_queries(kernels):
    batch = make_batch([0, 2], [20, 20], dtype=torch.bfloat16)
    assert_close(kernels, batch)


def test_a_pool_of_interleaved_k_and_v(kernels):
    """The host pool keeps K and V of a block side by side: blocks are then not contiguous."""
    batch = make_batch([1, 9], [300, 300], dtype=torch.bfloat16)
    both = torch.stack([batch.k_pool, batch.v_pool], dim=1)
    (chunk,) = whole(batch)
    apart = KVChunk(
        both[:, 0],
        both[:, 1],
        chunk.seq_index,
        chunk.first_block,
        chunk.num_blocks,
        chunk.block_table,
    )
    assert torch.equal(attend(kernels, batch, [apart]), attend(kernels, batch))


def test_more_partials_than_a_window_holds(kernels):
    """Decode partials are bounded to 16 MiB: 300 blocks of 64 heads of 256 take two rounds."""
    batch = make_batch(
        [1, 2], [300, 9], dtype=torch.bfloat16, kv_heads=8, group=8, head_dim=256, block_size=1
    )
    assert_close(kernels, batch)
    want = fold(kernels, batch, whole(batch))
    assert same_bits(fold(kernels, batch, random_split(batch, random.Random(0))), want)


def test_two_callers_at_once(kernels):
    batches = [make_batch([1, 50], [400, 300], dtype=torch.float32, seed=s) for s in range(2)]
    want = [attend(kernels, batch) for batch in batches]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            got = list(pool.map(lambda batch: attend(kernels, batch), batches))
            assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_that_do_not_follow_each_other(kernels, dtype):
    batch = make_batch([1, 9], [30, 30], dtype=dtype)
    apart = replace(batch, q=batch.q.transpose(0, 1).contiguous().transpose(0, 1))
    assert apart.q.stride() != batch.q.stride()
    assert torch.equal(attend(kernels, apart), attend(kernels, batch))


def test_nan_in_the_input_stays_visible(kernels):
    for q_len in (1, 20):
        batch = make_batch([q_len], [40], dtype=torch.float32)
        batch.k_pool[batch.tables[0][0], 3] = torch.nan
        assert attend(kernels, batch)[-1].isnan().all()


def test_other_dtypes_are_refused(kernels):
    batch = make_batch([1], [5], dtype=torch.float16)
    with pytest.raises(EngineError, match="float16"):
        attend(kernels, batch)


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(KernelBuildError, match="no C compiler"):
        CpuKernels.load(tmp_path)


def test_failing_compiler(tmp_path):
    with pytest.raises(KernelBuildError, match="no-such-flag"):
        CpuKernels.load(tmp_path, ("--no-such-flag",))
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_ends_with_its_builder(tmp_path):
    """And what it has started, as gcc starts cc1."""
    compiler, pids = tmp_path / "cc", tmp_path / "pids"
    compiler.write_text(
        f"#!/bin/sh\nsleep 120 &\necho $! $$ > {pids}.tmp\nmv {pids}.tmp {pids}\nwait\n"
    )
    compiler.chmod(0o700)
    program = "import sys; from pathlib import Path; from nanoengine.kernels import c_build\n"
    program += "c_build.build_library(Path(sys.argv[1]))"
    environment = os.environ | {"CC": str(compiler)}
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, env=environment, cwd=ROOT) as builder:
        until(pids.is_file)
        started = [Path("/proc", pid) for pid in pids.read_text().split()]
        assert all(path.exists() for path in started)
        builder.kill()
    until(lambda: not any(is_alive(path) for path in started))


def is_alive(process: Path) -> bool:
    """Whether it runs; one that nobody waits for stays as a zombie."""
    try:
        return "State:\tZ" not in (process / "status").read_text()
    except OSError:
        return False


def test_torn_library_is_rebuilt(tmp_path):
    source = tmp_path / "answer.c"
    source.write_text("int answer(void) { return 42; }\n")
    path = c_build.build_library(tmp_path, source=source)
    whole = path.read_bytes()
    path.write_bytes(whole[:-2000])
    assert c_build.load_library(source, tmp_path).answer() == 42
    assert path.stat().st_size > len(whole) - 2000


def test_cache_is_reused(tmp_path):
    source = tmp_path / "answer.c"
    source.write_text("int answer(void) { return 42; }\n")
    path = c_build.build_library(tmp_path, source=source)
    before = path.stat().st_ino  # a library that is built anew is another file
    assert c_build.load_library(source, tmp_path).answer() == 42
    assert path.stat().st_ino == before


def test_another_header_is_another_build(tmp_path):
    source, header = tmp_path / "answer.c", tmp_path / "answer.h"
    source.write_text('#include "answer.h"\nint answer(void) { return ANSWER; }\n')
    for value in (41, 42):
        header.write_text(f"#define ANSWER {value}\n")
        assert c_build.load_library(source, tmp_path).answer() == value
    assert len(list(tmp_path.glob("*.so"))) == 2


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same_rounding(got: Tensor, want: Tensor) -> None:
    """bf16: one step of the last place, and rarely; fp32: a few, for sums run in another order."""
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-6)
        return
    steps = (got.view(torch.int16).int() - want.view(torch.int16).int()).abs()
    assert steps.max() <= 1
    assert (steps > 0).float().mean() < 0.01


def llama_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


@pytest.fixture(params=["native", "generic"])
def variant(request, build_folder) -> CpuKernels:
    return CpuKernels.load(build_folder, VARIANTS[request.param])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, dim", [(1, 576), (200, 576), (3, 61), (0, 64)])
def test_rms_norm(variant, dtype, tokens, dim):
    x, weight = normal(tokens, dim, dtype=dtype), normal(dim, dtype=dtype, seed=1)
    out = torch.full_like(x, torch.nan)
    variant.rms_norm(x, weight, 1e-5, out)
    assert_same_rounding(out, llama_norm(x, weight, 1e-5)) if tokens else None


@pytest.mark.parametrize("tokens, dim", [(1, 576), (200, 576), (3, 61)])
def test_rms_norm_with_a_weight_in_float32_rounds_once(variant, tokens, dim):
    """With weights that bfloat16 would lose beside 1."""
    x = normal(tokens, dim, dtype=torch.bfloat16)
    weight = 1 + normal(dim, dtype=torch.float32, seed=1) / 1000
    out = torch.full_like(x, torch.nan)
    variant.rms_norm(x, weight, 1e-5, out)
    assert_same_rounding(out, TorchOps().rms_norm(x, Norm(weight, 1e-5)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_in_place(kernels, dtype):
    fused = normal(5, 9, 40, dtype=dtype)
    weight, before = normal(40, dtype=dtype, seed=1), fused.clone()
    kernels.rms_norm(fused[:, 2:6], weight, 1e-6, fused[:, 2:6])
    assert_same_rounding(fused[:, 2:6].contiguous(), llama_norm(before[:, 2:6], weight, 1e-6))
    assert torch.equal(fused[:, :2], before[:, :2])
    assert torch.equal(fused[:, 6:], before[:, 6:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "tokens, head_dim, parts", [(1, 64, 2), (70, 64, 2), (6, 20, 2), (3, 256, 2), (6, 48, 1)]
)
def test_rope_store(variant, dtype, tokens, head_dim, parts):
    heads, kv_heads, block_size = 6, 2, 16
    fused = normal(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    before = fused.clone()
    q, k, v = fused.split([heads, kv_heads, kv_heads], dim=1)
    angles = normal(tokens, 1, head_dim // 2, dtype=torch.float32, seed=1) * 3
    pool = torch.zeros(8, parts, block_size, kv_heads, head_dim, dtype=dtype)
    slots = torch.randperm(8 * block_size)[:tokens]
    k_slots = slots // block_size * parts * block_size + slots % block_size
    v_slots = k_slots + block_size
    k_slots[-1] = v_slots[-1] = slots[-1] = -1
    rows = pool.flatten(0, 2)
    target = KVTarget(rows, k_slots, v_slots if parts == 2 else None)
    variant.rope_store(q, k, v, angles.cos(), angles.sin(), target)
    first, second = before[:, : heads + kv_heads].float().chunk(2, dim=-1)
    turned = torch.cat(
        (
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ),
        dim=-1,
    ).to(dtype)
    assert_same_rounding(fused[:, : heads + kv_heads].contiguous(), turned)
    assert torch.equal(v, before[:, heads + kv_heads :])
    want = torch.zeros_like(pool)
    for token, slot in enumerate(slots[:-1].tolist()):
        stored = torch.stack((k[token], v[token])[:parts])
        want[slot // block_size, :, slot % block_size] = stored
    assert torch.equal(pool, want)
    q = before[:, 1:heads]
    variant.rotate(q, angles.cos(), angles.sin())
    assert torch.equal(q, fused[:, 1:heads])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, dim", [(1, 576), (200, 576), (3, 61)])
def test_add_with_a_gate(variant, dtype, tokens, dim):
    """Gates far from zero, too; the product is rounded before the sum, in float32 as well."""
    x, y = normal(tokens, dim, dtype=dtype), normal(tokens, dim, dtype=dtype, seed=1)
    gate = normal(tokens, 1, dtype=torch.float32, seed=2) * 30
    without, want = x.clone(), TorchOps().accumulate(x.clone(), y, gate)
    variant.add(x, y, gate)
    if dtype is torch.float32:
        torch.testing.assert_close(x, want, rtol=1e-7, atol=1e-7)
    else:
        assert_same_rounding(x, want)
    variant.add(without, y)
    assert torch.equal(without, normal(tokens, dim, dtype=dtype) + y)


GATE_SIZES = pytest.mark.parametrize("tokens, dim", [(1, 1536), (40, 1536), (3, 37)])


def gated_by(kernels, activation, tokens, dim, dtype):
    """What it and a reference make of random gates, and of some far from zero; no NaN is lost."""
    gate_up = normal(tokens, 2 * dim, dtype=dtype) * 4
    gate_up[0, :4] = torch.tensor([0.0, -200.0, 200.0, torch.nan])
    out = torch.empty(tokens, dim, dtype=dtype)
    kernels.gate_mul(gate_up, activation, out)
    want = GATED[activation](gate_up)
    assert out[0, 3].isnan()
    out[0, 3] = want[0, 3] = 0
    return out, want


@pytest.mark.parametrize("dtype", DTYPES)
@GATE_SIZES
def test_gelu_mul(variant, dtype, tokens, dim):
    out, want = gated_by(variant, "gelu_pytorch_tanh", tokens, dim, dtype)
    # torch's 1 + tanh cancels where the gate is small: it is the less exact of the two.
    torch.testing.assert_close(out, want, atol=3e-6 if dtype is torch.float32 else 0.02, rtol=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
@GATE_SIZES
def test_silu_mul(variant, dtype, tokens, dim):
    out, want = gated_by(variant, "silu", tokens, dim, dtype)
    assert_same_rounding(out, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, dim", [(1, 1), (3, 37), (40, 3000)])
def test_add(variant, dtype, tokens, dim):
    x, summand = normal(tokens, dim, dtype=dtype), normal(tokens, dim, dtype=dtype) * 30
    want = x + summand
    variant.add(x, summand)
    assert torch.equal(x, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_clamped_swiglu(variant, dtype):
    gate_up = normal(3, 2 * 37, dtype=dtype) * 6
    gate_up[0, :3] = torch.tensor([0.0, -200.0, 200.0])
    gate_up[1, 37:39] = torch.tensor([-200.0, 200.0])
    out = torch.empty(3, 37, dtype=dtype)
    variant.gate_mul(gate_up, "clamped_swiglu", out)
    torch.testing.assert_close(out, clamped_swiglu(gate_up.float()).to(dtype))
    gate_up[2, 0] = gate_up[2, 39] = torch.nan
    variant.gate_mul(gate_up, "clamped_swiglu", out)
    assert out[2, :3].isnan().tolist() == [True, False, True]


def test_rounding_to_bf16_is_torch_s(variant):
    """Ties to even, overflow to infinity, NaN: attention over no more keys only rounds."""
    x = torch.tensor([1.00390625, 1.01171875, 3.4e38, -3.4e38, torch.nan, torch.inf, 0.1, -0.0])
    batch = make_batch([1], [1], dtype=torch.bfloat16, kv_heads=1, group=1, head_dim=8)
    out = torch.empty(1, 1, 8, dtype=torch.bfloat16)
    state = SoftmaxState(torch.zeros(1, 1), torch.ones(1, 1), x.view(1, 1, 8))
    nothing, lengths = chunk_of(batch, {}), (batch.query_start(), int32([1]))
    variant.attend(batch.q, nothing, *lengths, state, batch.scale, out=out)
    assert torch.equal(out.flatten().nan_to_num(nan=7.0), x.to(torch.bfloat16).nan_to_num(nan=7.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 5, 16, 3000, 49152])
def test_argmax(variant, dtype, dim):
    x = normal(7, dim, dtype=dtype)
    x[1], x[2] = 3.0, -torch.inf  # all equal: the first
    x[3, dim // 2], x[4, 0] = torch.nan, torch.inf
    x[5, dim // 3 :] = x[5].max()
    assert torch.equal(variant.argmax(x), x.argmax(dim=-1))
    wide = normal(4, 2 * dim, dtype=dtype)[:, dim:]
    assert torch.equal(variant.argmax(wide), wide.argmax(dim=-1))


@pytest.mark.some(7)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_draw(variant, dtype, rules):
    """Against PyTorch, which sorts; also rows that lie apart, and many equal logits, of which the
    first tokens count as the likeliest.
    """
    params, rows, vocab = SamplingParams(**rules), 40, 49157
    logits = 3 * normal(rows, 2 * vocab, dtype=dtype)[:, vocab:]
    logits[::5] = logits[::5].round()
    logits[1::5, 100:] = -torch.inf
    keys = [draw_key(7, position) for position in range(rows)]
    keys[10:12] = [0, (1 << 64) - 1]
    draws = Draws.of([params] * rows, keys, lambda x, dtype: torch.tensor(x, dtype=dtype))
    got, want = variant.draw(logits, draws), draw(logits, draws)
    different = (got != want).nonzero().flatten().tolist()
    assert len(different) <= 2
    for row in different:
        assert runs_as_fast(got[row], want[row], logits[row].float(), draws, row)


def test_of_equal_logits_the_first_are_kept(variant):
    logits, keys = torch.zeros(50, 700), [draw_key(1, at) for at in range(50)]
    for rules, kept in (({"top_k": 3}, 3), ({"top_p": 0.01}, 7), ({"top_k": 9, "top_p": 0.2}, 2)):
        draws = Draws.of(
            [SamplingParams(**rules)] * 50, keys, lambda x, dtype: torch.tensor(x, dtype=dtype)
        )
        assert {*variant.draw(logits, draws).tolist()} == {*range(kept)}


@pytest.mark.parametrize("count", [0, 1, 2, 20, 257])
@pytest.mark.parametrize("width", [300, 49157])
def test_likeliest(variant, width, count):
    """Of equals the first; rows that lie apart; a row with NaN gives places within it."""
    x = -(5 * normal(9, 2 * width, dtype=torch.float32))[:, width:].abs()
    x[1], x[2, 3:] = 0.0, -torch.inf
    x[3:5] = x[3:5].round()
    x[5, 7], x[6, width - 1] = torch.nan, 0.0
    got = variant.likeliest(x, count)
    order = x.sort(dim=1, descending=True, stable=True).indices[:, :count]
    clear = [*range(5), *range(6, 9)]
    assert torch.equal(got[clear], order[clear])
    assert torch.equal(likeliest(x, count)[clear], order[clear])
    assert got.shape == (9, count) and ((got >= 0) & (got < width)).all()
    for row in range(9):
        assert torch.equal(variant.likeliest(x[row : row + 1], count)[0], got[row])


def test_a_row_is_drawn_alone(variant):
    """Beside rows with other rules, NaN and infinity; with one thread and with two."""
    logits = 2 * normal(4 * len(RULES), 5000, dtype=torch.float32)
    logits[3], logits[7, 5], logits[11, 9] = torch.nan, torch.inf, torch.nan
    params = [SamplingParams(**rules) for rules in RULES.values() for _ in range(4)]
    keys = [draw_key(3, position) for position in range(len(params))]

    def drawn(rows):
        draws = Draws.of(
            [params[row] for row in rows],
            [keys[row] for row in rows],
            lambda x, dtype: torch.tensor(x, dtype=dtype),
        )
        return variant.draw(logits[rows], draws).tolist()

    together = drawn([*range(len(params))])
    assert together == [drawn([row])[0] for row in range(len(params))]
    assert all(0 <= token < 5000 for token in together)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert drawn([*range(len(params))]) == together
