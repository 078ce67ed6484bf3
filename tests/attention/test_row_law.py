"""One row, one arithmetic: the bits of a query row depend on its own tokens, its position and the
size of a KV block, and not on how many rows its sequence brings to a call.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from marks import BUILDS, EMULATED, SMALLER, needs_compiler
from paged_batches import Batch, chunk_of, in_pieces, int32, make_batch
from torch import Tensor

from nanoengine.context import KVTarget, SoftmaxState
from nanoengine.kernels.cpu_kernels import CpuKernels
from nanoengine.models.draw import Draws
from nanoengine.sampling_params import SamplingParams

pytestmark = [needs_compiler, pytest.mark.usefixtures("two_threads")]

# Other machines than this one; "no_tiles" where this one has matrix tiles.
BUILT_AS = {
    **BUILDS,
    **SMALLER,
    **EMULATED,
}
PIECES = (1, 2, 4, 5, 9, 16, 17, 33)
HEAD_DIMS = (16, 24, 40, 64, 80, 96, 128)
BLOCK_SIZES = (8, 16, 64, 256, 272, 600)
State = tuple[Tensor, Tensor, Tensor, Tensor]


def attended(
    kernels: CpuKernels,
    batch: Batch,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> State:
    """The softmax state after all keys, and the attention."""
    tokens, heads, head_dim = batch.q.shape
    shapes = (tokens, heads), (tokens, heads), (tokens, heads, head_dim)
    state = SoftmaxState(*(torch.full(shape, torch.nan) for shape in shapes))
    out = torch.full(batch.q.shape, torch.nan, dtype=batch.q.dtype)
    kernels.attend(
        batch.q,
        chunk_of(batch, {s: (0, len(t)) for s, t in enumerate(batch.tables)}),
        batch.query_start(),
        int32(batch.kv_lens),
        state,
        batch.scale,
        is_first=True,
        out=out,
        window=window,
        sinks=sinks,
        softcap=softcap,
    )
    return state.row_max, state.row_sum, state.acc, out.float()


def bits(state: State) -> list[Tensor]:
    """Tells -0 from +0."""
    return [x.view(torch.int32) for x in state]


def assert_pieces_move_no_bit(
    kernels: CpuKernels,
    batch: Batch,
    sizes: Sequence[int],
    rng: random.Random,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> None:
    what = window, sinks, softcap
    want = bits(attended(kernels, batch, *what))
    for piece, rows in in_pieces(batch, sizes, rng):
        torch.set_num_threads(rng.choice([1, 2, 3]))
        for got, whole in zip(bits(attended(kernels, piece, *what)), want, strict=True):
            assert torch.equal(got, whole[rows]), f"pieces of {piece.q_lens} rows"


@pytest.mark.parametrize("built_as", BUILT_AS)
@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 24))]
)
def test_the_rows_of_a_call_move_no_bit(build_folder: Path, built_as: str, seed: int) -> None:
    """A batch of random shape: all rows of a sequence at once, and in pieces of all sizes."""
    kernels = CpuKernels.load(build_folder, BUILT_AS[built_as])
    rng = random.Random(f"{built_as} {seed}")
    block_size = rng.choice(BLOCK_SIZES)
    most = 90 if block_size == 8 else 700
    q_lens = [rng.choice((1, 3, 17, 40, 150)) for _ in range(rng.randint(1, 3))]
    batch = make_batch(
        q_lens,
        [n + rng.randint(0, most) for n in q_lens],
        dtype=(torch.float32, torch.bfloat16)[seed % 2],
        kv_heads=rng.randint(1, 3),
        group=rng.randint(1, 8),
        head_dim=rng.choice(HEAD_DIMS),
        block_size=block_size,
        seed=seed,
    )
    window = rng.choice((None, None, 1, 20, 100, 300))
    sinks = rng.choice((None, batch.q[0, :, 0].float() * 3))
    softcap = rng.choice((None, 0.7, 50.0))
    assert_pieces_move_no_bit(kernels, batch, PIECES, rng, window, sinks, softcap)


# Emulated instructions are those of bfloat16: float32 is computed as in the native build.
PIECED = [
    (name, dtype)
    for name in BUILT_AS
    if name not in ("avx2", "avx512")
    for dtype in (torch.float32, torch.bfloat16)
    if dtype is torch.bfloat16 or name not in EMULATED
]


@pytest.mark.some(6)
@pytest.mark.parametrize(("built_as", "dtype"), PIECED)
@pytest.mark.parametrize("size", (1, 4, 5, 17))
def test_pieces_of_one_size_move_no_bit(
    build_folder: Path, built_as: str, dtype: torch.dtype, size: int
) -> None:
    """Across tiles (64 keys), segments (256) and blocks (300)."""
    kernels = CpuKernels.load(build_folder, BUILT_AS[built_as])
    batch = make_batch([70, 21], [590, 277], dtype=dtype, block_size=300)
    assert_pieces_move_no_bit(kernels, batch, [size], random.Random(0))
    assert_pieces_move_no_bit(kernels, batch, [size], random.Random(0), softcap=1.5)


@pytest.mark.parametrize("built_as", BUILT_AS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_operators_take_each_row_by_itself(
    build_folder: Path, built_as: str, dtype: torch.dtype
) -> None:
    """Alone, and among so many that threads share them."""
    kernels = CpuKernels.load(build_folder, BUILT_AS[built_as])
    rows, dim = 700, 148
    x = torch.randn(rows, 2 * dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = x[0, :dim].clone()

    def operate(part: Tensor) -> list[Tensor]:
        normed, widely, gated, clamped, by_gelu = torch.empty(5, len(part), dim, dtype=dtype)
        kernels.rms_norm(part[:, :dim], weight, 1e-5, normed)
        kernels.rms_norm(part[:, :dim], weight.float(), 1e-5, widely)
        kernels.gate_mul(part, "silu", gated)
        kernels.gate_mul(part, "gelu_pytorch_tanh", by_gelu)
        kernels.gate_mul(part, "clamped_swiglu", clamped)
        added = normed.clone()
        kernels.add(added, gated, part[:, :1].float().contiguous())
        turned = part[:, : 4 * 36].clone().view(len(part), 4, 36)
        q, k, v = turned.split([2, 1, 1], dim=1)
        angles = part[:, -18:].float().contiguous()
        slots = torch.arange(len(part))
        pool = torch.zeros(2 * len(part), 1, 36, dtype=dtype)
        target = KVTarget(pool, slots, slots + len(part))
        kernels.rope_store(q, k, v, angles.cos(), angles.sin(), target)
        given = normed, widely, gated, by_gelu, clamped, added, turned
        luck, shares = part[:, :2].float().sigmoid().T.tolist()
        limits = [SamplingParams(top_p=share) for share in shares]
        keys = [int(number * 2**64) for number in luck]
        draws = Draws.of(limits, keys, lambda x, dtype: torch.tensor(x, dtype=dtype))
        return [*given, pool[: len(part)], kernels.argmax(part), kernels.draw(part, draws)]

    whole = operate(x)
    for first, last in ((0, 1), (3, 5), (10, 27), (699, 700)):
        for got, want in zip(operate(x[first:last]), whole, strict=True):
            assert torch.equal(got, want[first:last])
