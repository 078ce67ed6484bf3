"""Attention sinks: a score of each head that takes its part of every softmax and gives no value.
Every backend against float64; neither chunks, pools nor pieces of a prompt count a sink twice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from marks import BUILDS, EMULATED, needs_compiler, smaller
from paged_batches import attend, relative_error, small_batch, split, whole

from nanoengine.attention.cpu_attention import CpuAttention
from nanoengine.attention.flash_attention import FlashAttention
from nanoengine.attention.flash_kernels import SdpaKernel
from nanoengine.config.attention import AttentionConfig
from nanoengine.context import AttentionBackend
from nanoengine.kernels.cpu_kernels import CpuKernels

CPU = torch.device("cpu")
# Below every score, among them, and above them all.
SINKS = torch.tensor([-9.0, 0.3, 12.0])
Make = Callable[[AttentionConfig], AttentionBackend]
PARTITION = 64  # keys of a partition in Triton, see `make`


@pytest.mark.some(3)
@pytest.mark.parametrize("window", [None, 40, pytest.param(7, marks=pytest.mark.breadth)])
def test_backends_against_float64(make: Make, window: int | None) -> None:
    """In one chunk and in many; a call without sinks afterwards knows nothing of them."""
    batch = small_batch()
    backend = make(AttentionConfig(24, windows=(window,)))
    got = attend(backend, batch, whole(batch), SINKS)
    assert relative_error(got, batch.reference(window, SINKS)[:-1]) < 5e-6
    assert torch.equal(attend(backend, batch, split(batch, 3), SINKS), got)
    plain = attend(backend, batch, whole(batch), None)
    assert relative_error(plain, batch.reference(window)[:-1]) < 5e-6


def test_results_of_a_flash_kernel_are_merged_with_the_sink() -> None:
    batch = small_batch()
    backend = FlashAttention(24**-0.5, SdpaKernel(CPU), CPU)
    for sinks in (SINKS, None):
        for chunks in (whole(batch), split(batch, 3)):
            got = attend(backend, batch, chunks, sinks)
            assert relative_error(got, batch.reference(sinks=sinks)[:-1]) < 5e-6


@needs_compiler
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 3e-6), (torch.bfloat16, 8e-3)], ids=str)
@pytest.mark.parametrize("isa", {**BUILDS, **smaller("generic"), **EMULATED}.items())
def test_the_c_kernel(
    build_folder: Path, isa: tuple[str, tuple[str, ...]], dtype: torch.dtype, limit: float
) -> None:
    """In every mode; one thread or several, one pool or many."""
    kernels = CpuKernels.load(build_folder, isa[1])
    for window in (None, 40):
        batch = small_batch(dtype=dtype, head_dim=32, block_size=80)
        backend = CpuAttention(AttentionConfig(32, windows=(window,)), kernels)
        got = attend(backend, batch, whole(batch), SINKS)
        assert relative_error(got, batch.reference(window, SINKS)[:-1]) < limit
        for seed in range(3):
            torch.set_num_threads(1 + seed)
            assert torch.equal(attend(backend, batch, split(batch, seed), SINKS), got)


def test_mass_is_what_the_sink_leaves(make: Make) -> None:
    batch = small_batch()
    mass = torch.zeros(len(batch.tables), max(map(len, batch.tables)))
    attend(make(AttentionConfig(24)), batch, split(batch, 1), SINKS, mass)
    torch.testing.assert_close(mass.double(), batch.mass(SINKS), rtol=2e-5, atol=2e-5)
