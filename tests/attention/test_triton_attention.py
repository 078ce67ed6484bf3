"""The Triton kernels, interpreted on the CPU (conftest.py): against float64 and PyTorch, and the
law that the split of a context into chunks moves no bit. The interpreter multiplies bfloat16 as if
it were integers, so here they run in float32 and float16; and all compile for a GPU without one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiled import compiled_by
from kernel_bounds import check_kernels
from marks import named
from paged_batches import (
    Batch,
    context_of,
    in_pieces,
    make_batch,
    relative_error,
    split,
    whole,
)
from torch import Tensor

from nanoengine.config.attention import AttentionConfig
from nanoengine.context import ForwardContext, KVChunk, KVTarget
from nanoengine.errors import ConfigError
from nanoengine.models.activations import clamped_swiglu, gelu_mul, silu_mul
from nanoengine.models.layer_ops import TorchOps
from nanoengine.models.products import Norm

pytest.importorskip("triton", reason="Triton is not installed")

from any_rows import use_dots_of_any_rows

from nanoengine.attention import triton_attention
from nanoengine.attention.select import AttentionSetup, make_attention
from nanoengine.attention.triton_attention import TritonAttention, query_tiles
from nanoengine.kernels.cuda_graph import graph_size
from nanoengine.kernels.triton_kernels import TritonKernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "nine heads, odd sizes": {"group": 9, "kv_heads": 1, "head_dim": 40, "block_size": 8},
    "large blocks": {"block_size": 128, "head_dim": 128},
    "block of 12": {"block_size": 12, "kv_heads": 1},
}
# (query tokens, keys): prompts, decodes on both sides of a partition, a window edge of one key.
LENGTHS = {
    "mixed": ((5, 1, 3, 1), (5, 700, 40, 1)),
    "decodes": ((1, 1, 1), (3, 512, 513)),
    "prompt": ((40,), (90,)),
    "whole prompt": ((33, 2), (33, 2)),
}


@pytest.fixture(autouse=True)
def kernels_stay_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel touches memory beside the tensors that it was given."""
    check_kernels(monkeypatch)


def context(batch: Batch, chunks: list[KVChunk]) -> ForwardContext:
    """context_of on the device."""
    chunks = [
        replace(chunk, **{name: getattr(chunk, name).to(DEVICE) for name in TENSORS})
        for chunk in chunks
    ]
    ctx = context_of(batch, chunks)
    return replace(ctx, query_start=ctx.query_start.to(DEVICE), kv_lens=ctx.kv_lens.to(DEVICE))


TENSORS = ("k", "v", "seq_index", "first_block", "num_blocks", "block_table")


def attend(
    batch: Batch,
    chunks: list[KVChunk],
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    head_dim = batch.q.shape[-1]
    config = AttentionConfig(head_dim, windows=(window,), softcap=softcap)
    backend = TritonAttention(config, batch.q.dtype, DEVICE)
    sinks = None if sinks is None else sinks.to(DEVICE)
    return backend.run(0, batch.q.to(DEVICE), context(batch, chunks), sinks).cpu()


# "mixed" runs all kernels: by default the other lengths are in float32 alone.
TYPED = [
    pytest.param(
        lengths,
        dtype,
        id=f"{name}-{dtype}",
        marks=[] if name == "mixed" or dtype == torch.float32 else [pytest.mark.slow],
    )
    for name, lengths in LENGTHS.items()
    for dtype in TOLERANCE
]


@pytest.mark.some(3)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("lengths, dtype", TYPED)
def test_against_float64(
    lengths: tuple[tuple[int, ...], tuple[int, ...]], shape: dict[str, Any], dtype: torch.dtype
) -> None:
    """Unwritten slots hold NaN: nothing past a length is used."""
    batch = make_batch(*lengths, dtype=dtype, **shape)
    got = attend(batch, whole(batch))
    assert relative_error(got, batch.reference()) < TOLERANCE[dtype]


@pytest.mark.some(1)
@pytest.mark.parametrize("checked_rows", [1, 3])
def test_heads_of_a_kv_head_in_several_programs(
    monkeypatch: pytest.MonkeyPatch, checked_rows: int
) -> None:
    """Where the rows of all of them do not fit the shared memory."""
    monkeypatch.setattr(triton_attention, "_shared_memory", lambda _: 12 << 10)
    batch = make_batch(*LENGTHS["mixed"], dtype=torch.float32, group=24)
    config = AttentionConfig(batch.q.shape[-1])
    backend = TritonAttention(config, torch.float32, DEVICE, checked_rows)
    (chunk,) = whole(batch)
    assert backend._program(batch.q, chunk) == ((12, 16) if checked_rows == 1 else (4, 16))
    got = backend.run(0, batch.q.to(DEVICE), context(batch, [chunk])).cpu()
    assert relative_error(got, batch.reference()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", named(SHAPES, "nine heads, odd sizes"))
def test_chunks_and_pools_move_no_bit(shape: dict[str, Any], seed: int) -> None:
    batch = make_batch((5, 1, 3, 1, 1), (5, 700, 40, 1, 300), dtype=torch.float32, **shape)
    chunks = split(batch, seed)
    assert len(chunks) > 2
    assert torch.equal(attend(batch, chunks), attend(batch, whole(batch)))


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "window, shape",
    named(
        dict(zip(SHAPES, zip((None, 70, 20, None), SHAPES.values(), strict=True), strict=True)),
        "nine heads, odd sizes",
        "large blocks",
    ),
)
def test_the_rows_of_a_call_move_no_bit(
    monkeypatch: pytest.MonkeyPatch, window: int | None, shape: dict[str, Any]
) -> None:
    """All queries of a sequence at once, and few at a time; across partitions, tiles and blocks."""
    use_dots_of_any_rows(monkeypatch)
    monkeypatch.setattr(triton_attention, "PARTITION", 32)
    monkeypatch.setattr(triton_attention, "SHORT", 2)  # and then partitions of 128 keys
    batch = make_batch((26, 2, 20), (160, 300, 140), dtype=torch.float32, **shape)
    sinks = torch.randn(batch.q.shape[1]) * 3 if window else None
    what = window, sinks, 1.5 if window else None
    want, sizes = attend(batch, whole(batch), *what), set()
    for piece, rows in in_pieces(batch, (1, 2, 5, 18), random.Random(1)):
        got = attend(piece, split(piece, len(rows)), *what)
        assert torch.equal(got, want[rows]), f"pieces of {piece.q_lens} rows"
        sizes.update(piece.q_lens)
    assert {1, 2, 5, 18} <= sizes


def test_one_kernel_runs_with_any_number_of_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler may order the sums of another one otherwise."""
    kernel, kinds = triton_attention.decode, []

    class Noted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def run(*args: Any, **options: Any) -> None:
                kinds.append((options["ROWS"], options["num_warps"]))
                kernel[grid](*args, **options)

            return run

    monkeypatch.setattr(triton_attention, "decode", Noted())
    for num_queries in (1, 3, 9):
        batch = make_batch((num_queries,), (60,), dtype=torch.float32)
        config = AttentionConfig(batch.q.shape[-1])
        backend = TritonAttention(config, batch.q.dtype, DEVICE, checked_rows=9)
        backend.run(0, batch.q.to(DEVICE), context(batch, whole(batch)))
    assert len(kinds) == 3 and len(set(kinds)) == 1


def test_neighbours_move_no_bit() -> None:
    """A decode alone and beside others, prompts among them."""
    batch = make_batch((1, 4, 1), (600, 9, 30), dtype=torch.float32)
    alone = replace(
        batch, q=batch.q[:1], q_lens=[1], kv_lens=[600], keys=[], values=[], tables=batch.tables[:1]
    )
    assert torch.equal(attend(alone, whole(alone)), attend(batch, whole(batch))[:1])


def test_rows_that_only_pad_a_batch_give_zeros() -> None:
    """A query without keys and without blocks, as a step that is padded for a graph has it."""
    batch = make_batch((1,), (20,), dtype=torch.float32)
    padded = replace(
        batch,
        q=torch.cat((batch.q, batch.q)),
        q_lens=[1, 1],
        kv_lens=[20, 0],
        tables=[batch.tables[0], []],
    )
    got = attend(padded, whole(padded))
    assert torch.equal(got[:1], attend(batch, whole(batch)))
    assert not got[1].any()


def test_tiles_are_those_that_a_chunk_concerns() -> None:
    """Blocks of 4: queries 8 to 17 of 18 keys, in chunks of keys [0, 8), [8, 12) and [12, 20)."""
    pool = torch.empty(9, 4, 1, 8)

    def tiles(first: int, num: int) -> list[int]:
        spans = ((0, first, tuple(range(num))), (1, 0, (0,)))
        chunk = KVChunk(pool, pool, *[torch.empty(0)] * 4, spans=spans)
        return [query for _, query in query_tiles(chunk, ((10, 18), (1, 3)), 3, 1)]

    assert tiles(0, 2) == [0, 3, 6, 9]
    assert tiles(2, 1) == [0, 3, 6, 9]
    assert tiles(3, 1) == [3, 6, 9]  # the first four queries see nothing of it
    assert tiles(3, 2) == [0, 3, 6, 9]  # the last chunk writes what all of them have seen


# -- the small kernels -----------------------------------------------------------------------------


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_norms(dtype: torch.dtype) -> None:
    """Of rows, of heads that are a view, and after a sum; in the steps of PyTorch's."""
    ops, kernels = TorchOps(), TritonKernels()
    fused, weight = normal(5, 9, 40, dtype=dtype), normal(40, dtype=dtype)
    heads = fused[:, 2:6]
    out = torch.empty_like(heads, memory_format=torch.contiguous_format)
    kernels.rms_norm(heads, weight, 1e-5, out)
    torch.testing.assert_close(out, ops.rms_norm(heads, Norm(weight, 1e-5)))
    wide = 1 + weight.float() / 1000  # would lose that in 16 bits
    kernels.rms_norm(heads, wide, 1e-5, out)
    torch.testing.assert_close(out, ops.rms_norm(heads, Norm(wide, 1e-5)))
    x, residual = normal(5, 360, dtype=dtype), 2 * normal(5, 360, dtype=dtype)
    weight, expected = normal(360, dtype=dtype), residual + x
    out = torch.empty_like(x)
    kernels.add_rms_norm(residual, x, weight, 1e-5, out)
    assert torch.equal(residual, expected)
    torch.testing.assert_close(out, ops.rms_norm(expected, Norm(weight, 1e-5)))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gating(dtype: torch.dtype) -> None:
    both = normal(5, 2 * 300, dtype=dtype) * 4
    out = torch.empty(5, 300, dtype=dtype, device=DEVICE)
    TritonKernels().gate_mul(both, "silu", out)
    torch.testing.assert_close(out, silu_mul(both))
    TritonKernels().gate_mul(both, "gelu_pytorch_tanh", out)
    torch.testing.assert_close(out, gelu_mul(both))
    TritonKernels().gate_mul(both, "clamped_swiglu", out)
    torch.testing.assert_close(out, clamped_swiglu(both.float()).to(dtype))


@pytest.mark.parametrize("parts", [2, 1])
def test_rotation_and_store(parts: int) -> None:
    """Slot -1 is not stored; q is turned in its place inside the fused projection. Of one part, k
    alone is stored.
    """
    fused = normal(3, 8, 24)
    q, k, v = fused.split_with_sizes([4, 2, 2], dim=1)
    angles = normal(3, 1, 12)
    pool = torch.full((10, 2, 24), torch.nan, device=DEVICE)
    slots = [*torch.tensor([[7, -1, 0], [8, -1, 1]][:parts], device=DEVICE), None][:2]
    target = KVTarget(pool.clone(), *slots, torch.tensor([0, 2], device=DEVICE))
    expected = TorchOps().rotate_and_store(q, k, v, angles.cos(), angles.sin(), target)
    ours = KVTarget(pool, *slots)
    TritonKernels().rope_store(q, k, v, angles.cos(), angles.sin(), ours)
    torch.testing.assert_close(q, expected)
    torch.testing.assert_close(pool, target.pool, equal_nan=True)


def test_sizes_of_graphs() -> None:
    assert [graph_size(n) for n in (1, 2, 3, 5, 9, 128, 129, 256, 257)] == [
        *(1, 2, 4, 8, 16, 128, 144, 256, 257),
    ]


def test_mass_of_very_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid has 65,535 programs in its second dimension, at most."""
    grids: list[tuple[int, ...]] = []

    class Launcher:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(triton_attention, "add_mass", Launcher())
    backend = TritonAttention(AttentionConfig(16), torch.float32, torch.device("cpu"))
    ctx: Any = SimpleNamespace(query_start=None, kv_lens=None, block_mass=torch.empty(2, 1 << 16))
    backend._add_mass(ctx, 16, (torch.empty(2, 1, 1), torch.empty(2, 1, 1)))
    assert grids == [(1 << 16, 2)]


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_tiles_that_the_gpu_copies_by_descriptors(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Are the numbers that threads load: of any pool and chunk, with NaN past what is stored."""
    batch = make_batch((40, 1, 5, 3), (700, 90, 300, 3), dtype=dtype, head_dim=32, block_size=32)
    want = attend(batch, split(batch, 3))
    made: list[tuple[Any, Any]] = []
    boxes = TritonAttention._boxes

    def recording(*of: Any) -> tuple[Any, Any]:
        made.append(boxes(*of))
        return made[-1]

    monkeypatch.setattr(TritonAttention, "_boxes", recording)
    monkeypatch.setattr(triton_attention, "copies_boxes", lambda _: True)
    assert torch.equal(attend(batch, split(batch, 3)), want)
    assert any(box is not None for box, _ in made), "the pool is laid out so that it can be"


def test_which_gpus_copy_tiles_by_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, does in (((8, 9), False), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert triton_attention.copies_boxes(torch.device("cuda")) == does
    monkeypatch.setattr(
        torch.version, "hip", "7.0"
    )  # AMD's have the name, and numbers of their own
    assert not triton_attention.copies_boxes(torch.device("cuda"))
    assert not triton_attention.copies_boxes(torch.device("cpu"))


def test_the_shared_memory_of_an_amd_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch for AMD knows no memory that one must ask for."""
    there: Any = SimpleNamespace(shared_memory_per_block=64 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: there)
    assert triton_attention._shared_memory(torch.device("cuda")) == 64 << 10
    there.shared_memory_per_block_optin = 99 << 10
    assert triton_attention._shared_memory(torch.device("cuda")) == 99 << 10


def test_heads_that_do_not_fit_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latents of DeepSeek, of 576, on a GeForce: in float32 a program takes too much memory."""
    monkeypatch.setattr(triton_attention, "_shared_memory", lambda _: 99 << 10)
    monkeypatch.setattr(triton_attention, "copies_boxes", lambda _: False)
    asked = AttentionSetup(torch.device("cuda"), torch.bfloat16, 256, AttentionConfig(576))
    made, _ = make_attention("triton", asked)
    assert made.name.startswith("Triton")
    with pytest.raises(ConfigError, match="heads of 576 need 193 KiB of a GPU with 99 KiB"):
        make_attention("triton", replace(asked, dtype=torch.float32))


# -- compiled, without a GPU -----------------------------------------------------------------------


COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nanoengine.attention import triton_attention_kernels
from nanoengine.kernels import triton_kernels

T = "*bf16"
INDEX = dict.fromkeys(
    "tiles seq_index first_block num_blocks table query_start kv_lens part_start".split(), "*i32"
)
STATE = "state_max state_sum state_acc part_max part_sum part_acc kept_max kept_sum mass cos"
STATE = dict.fromkeys([*STATE.split(), "sin", "sinks"], "*fp32")
VALUES = dict.fromkeys("q k v out x residual weight pool gate_up".split(), T)
SLOTS = {"k_slots": "*i64", "v_slots": "*i64"}
NUMBERS = {"scale": "fp32", "eps": "fp32"}
TYPES = INDEX | STATE | VALUES | SLOTS | NUMBERS
SHAPE = dict(HEADS=32, GROUP=4, GROUPS_OF_KEYS=1, HEAD_DIM=128, DIM=128, BLOCK=256)
SHAPE |= dict(TILE=128, TILE_PAD=128, WINDOW=0, PARTITION=512, SHORT=32, FEW=17)
SHAPE |= dict(key_box=None, value_box=None)
NO_MASS = dict(kept_max=None, kept_sum=None)
WINDOWED = SHAPE | NO_MASS | dict(WINDOW=1000)
MERGE = dict(HEADS=32, HEAD_DIM=128, DIM=128, PARTITION=512, SHORT=32, FEW=17, AT_ONCE=8)
MERGE |= dict(WINDOW=0, LONGEST=0)
for function, constants, options in (
    (
        triton_attention_kernels.prefill,
        SHAPE | NO_MASS | {"ROWS": 128, "sinks": None},
        {"num_warps": 8, "num_stages": 2},
    ),
    (triton_attention_kernels.prefill, SHAPE | {"ROWS": 128}, {"num_warps": 8, "num_stages": 2}),
    (triton_attention_kernels.prefill, WINDOWED | {"ROWS": 128}, {"num_warps": 8, "num_stages": 2}),
    (
        triton_attention_kernels.decode,
        SHAPE | NO_MASS | {"ROWS": 16, "LONGEST": 0},
        {"num_warps": 4, "num_stages": 2},
    ),
    (
        triton_attention_kernels.decode,
        SHAPE | {"ROWS": 64, "LONGEST": 0},
        {"num_warps": 8, "num_stages": 2},
    ),
    (
        triton_attention_kernels.decode,
        WINDOWED | {"ROWS": 128, "LONGEST": 2000},
        {"num_warps": 8, "num_stages": 2},
    ),
    (triton_attention_kernels.merge, MERGE, {"num_warps": 2}),
    (
        triton_attention_kernels.merge,
        MERGE | NO_MASS | {"WINDOW": 1000, "LONGEST": 2000, "sinks": None},
        {"num_warps": 2},
    ),
    (
        triton_attention_kernels.add_mass,
        dict(HEADS=32, BLOCK=256, TILE=128, ROWS=256),
        {"num_warps": 4},
    ),
    (triton_kernels._rms_norm, dict(HEADS=1, SIZE=4096, SIZE_PAD=4096, ADDS=True), {}),
    (
        triton_kernels._rope_store,
        dict(HEADS=32, HEADS_PAD=32, KV_HEADS=8, KV_PAD=8, HALF=64, HALF_PAD=64),
        {},
    ),
    (triton_kernels._gate_mul, dict(SIZE=14336, STEP=2048, GELU=False), {}),
    (triton_kernels._gate_mul, dict(SIZE=2048, STEP=2048, GELU=True), {}),
    (triton_kernels._clamped_swiglu, dict(SIZE=2880, STEP=2048), {}),
):
    names = [parameter.name for parameter in function.params]
    types = {n: "constexpr" if n in constants else TYPES.get(n, "i32") for n in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    attributes = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if "*" in types[n]}
    source = ASTSource(function, types, places, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(json.dumps([function.__name__, made.metadata.shared, "ptx" in made.asm]))
"""


def test_all_compile_for_a_gpu() -> None:
    """The interpreter takes what the compiler refuses: types of branches, shapes, shared memory."""
    found = compiled_by("-c", COMPILE)
    assert len(found) == 14
    assert all(shared <= 227 << 10 and has_code for _, shared, has_code in found), found


AS_LAUNCHED = Path(__file__).parents[1] / "helpers" / "compile_attention.py"


@pytest.mark.parametrize(
    ("shapes", "capabilities"),
    [
        pytest.param("bfloat16,2,4,256", "89", marks=pytest.mark.breadth),
        pytest.param("bfloat16,1,8,512", "90", marks=pytest.mark.breadth),
        pytest.param(
            "bfloat16,2,4,64/bfloat16,2,4,128/float16,2,4,128/bfloat16,2,4,256/bfloat16,1,16,576",
            "80,89,90,120",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "float32,2,4,128/float32,1,8,512/float32,1,16,576", "90", marks=pytest.mark.slow
        ),
    ],
)
def test_all_fit_a_gpu_as_they_are_launched(shapes: str, capabilities: str) -> None:
    """The shared memory of a card of that kind, whatever the heads: those of Gemma, of DeepSeek."""
    found = compiled_by(AS_LAUNCHED, shapes, capabilities)
    kernels = {each["kernel"] for each in found}
    assert {"prefill", "decode", "merge", "add_mass", "_rms_norm", "_rope_store"} < kernels
    for each in found:
        assert each["shared_kib"] <= each["most_kib"], each
