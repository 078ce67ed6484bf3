"""Keys and values that are no numbers reach the rows that see them, and none that sees no key of
their segment: so KV of earlier tokens, which others may share, stays whole.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from marks import BUILDS, EMULATED, needs_compiler, smaller
from paged_batches import Batch, make_batch
from test_row_law import attended, bits

from nanoengine.kernels.cpu_kernels import CpuKernels

pytestmark = [needs_compiler, pytest.mark.usefixtures("two_threads")]

BUILT_AS = {**BUILDS, **smaller("generic"), **EMULATED}
OTHERS, KV_LENS, BLOCK = [3, 1], [157, 81, 40], 16  # the first two sequences have what is broken
FIRST = 5 * BLOCK


def broken(batch: Batch, parts: str, number: float, num_keys: int) -> Batch:
    """The keys from FIRST on, their values or both, are this number."""
    pools = (batch.k_pool,) * ("k" in parts) + (batch.v_pool,) * ("v" in parts)
    for table in batch.tables[:2]:
        for pool in pools:
            pool[table[FIRST // BLOCK], :num_keys] = number
    return batch


@pytest.mark.parametrize("built_as", BUILT_AS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("num_queries", "softcap"), [(101, None), (5, None), (5, 3.0)])
def test_they_reach_the_rows_that_see_them(
    build_folder: Path,
    built_as: str,
    dtype: torch.dtype,
    window: int | None,
    num_queries: int,
    softcap: float | None,
) -> None:
    kernels = CpuKernels.load(build_folder, BUILT_AS[built_as])
    q_lens = [num_queries, *OTHERS]

    def batch() -> Batch:
        return make_batch(q_lens, KV_LENS, dtype=dtype, block_size=BLOCK)

    want = bits(attended(kernels, batch(), window, None, softcap))
    for parts, number, num_keys in (
        *(("k", torch.nan, BLOCK), ("k", torch.nan, 1), ("v", torch.nan, 1)),
        *(("kv", torch.nan, BLOCK), ("v", torch.inf, 3)),
    ):
        pools = broken(batch(), parts, number, num_keys)
        got = attended(kernels, pools, window, None, softcap)
        for length, rows in zip(KV_LENS[:2], got[-1].split(q_lens), strict=False):
            at = torch.arange(length - len(rows), length)
            sees = (at >= FIRST) & (at < FIRST + (window or length))
            assert not rows[sees].isfinite().any(), (parts, number, num_keys)
        at = torch.cat([torch.arange(n - q, n) for q, n in zip(q_lens, KV_LENS, strict=True)])
        apart = at < FIRST
        if window is not None:
            apart |= at + 1 - window >= FIRST + BLOCK
        assert apart.sum() > 2
        for mine, others in zip(bits(got), want, strict=True):
            assert torch.equal(mine[apart], others[apart]), (parts, number, num_keys)
