"""Attention mass: what each KV block gets of the probability that a step's queries give to keys."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import BUILDS, EMULATED, SMALLER, needs_compiler
from paged_batches import Batch, context_of, make_batch, split, whole
from torch import Tensor

from nanoengine.attention.cpu_attention import CpuAttention
from nanoengine.config.attention import AttentionConfig
from nanoengine.context import AttentionBackend, KVChunk
from nanoengine.kernels.cpu_kernels import CpuKernels

CPU = torch.device("cpu")
# Decodes, verify steps of 9 and 17 rows, prompts whole and on top of earlier keys, one key, no key.
LENGTHS = [1, 9, 17, 70, 3, 40, 1, 1], [300, 520, 65, 70, 600, 290, 1, 0]
FEW = [1, 5, 20, 1], [40, 150, 290, 0]  # what Triton's interpreter does in a second
FULL_LAYERS = 2
ISAS = {
    **BUILDS,
    **SMALLER,
    **EMULATED,
}
Make = Callable[[AttentionConfig], AttentionBackend]
PARTITION = 128  # keys of a partition in Triton, see `make`


def no_mass(batch: Batch) -> Tensor:
    """A place for each block, as columns of a larger tensor."""
    most = max(len(table) for table in batch.tables)
    return torch.zeros(len(batch.tables), most + 3)[:, :most]


def run(
    backend: AttentionBackend, batch: Batch, chunks: list[KVChunk], mass: Tensor | None
) -> list[Tensor]:
    """The result of each layer: one with a window between two that see all keys."""
    ctx = context_of(batch, chunks, mass)
    return [backend.run(layer, batch.q, ctx) for layer in range(FULL_LAYERS + 1)]


def config_of(batch: Batch) -> AttentionConfig:
    return AttentionConfig(batch.q.shape[-1], windows=(None, 40, None))


def assert_mass(got: Tensor, batch: Batch, limit: float) -> None:
    """That of the layers without a window, block by block and as a sum."""
    want = FULL_LAYERS * batch.mass()
    torch.testing.assert_close(got.double(), want, rtol=limit, atol=limit)
    rows = torch.tensor(batch.q_lens) * batch.q.shape[1] * FULL_LAYERS
    given = torch.where(torch.tensor(batch.kv_lens) > 0, rows, 0)
    torch.testing.assert_close(got.sum(1), given.float(), rtol=1e-3, atol=0)


def some_batch(lengths: tuple[list[int], list[int]] = LENGTHS, **settings: Any) -> Batch:
    """Some blocks get much more than others: their keys are larger."""
    settings = {"dtype": torch.float32, "head_dim": 24, "kv_heads": 1} | settings
    batch = make_batch(*lengths, **settings)
    for keys, table in zip(batch.keys, batch.tables, strict=True):
        for number, (block, part) in enumerate(
            zip(table, keys.split(batch.block_size), strict=False)
        ):
            part *= 1 + number % 3
            batch.k_pool[block, : len(part)] = part
    return batch


@pytest.mark.parametrize("groups", [(1, 3), (3, 1)])
def test_layers_may_have_other_numbers_of_heads(make: Make, groups: tuple[int, int]) -> None:
    """As Laguna's."""
    batches = [some_batch(FEW, group=group) for group in groups]
    backend, mass = make(AttentionConfig(24)), no_mass(batches[0])
    first, second = (context_of(batch, whole(batch), mass) for batch in batches)
    backend.run(0, batches[0].q, first)
    backend.run(1, batches[1].q, replace(first, kv=second.kv))
    want = sum(batch.mass() for batch in batches)
    torch.testing.assert_close(mass.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.some(1)
@pytest.mark.parametrize("block_size", [16, 48, pytest.param(256, marks=pytest.mark.breadth)])
def test_against_float64(make: Make, block_size: int) -> None:
    """Ragged batches, in one chunk and in many."""
    batch = some_batch(FEW, block_size=block_size)
    for chunks in (whole(batch), split(batch, block_size)):
        mass = no_mass(batch)
        run(make(config_of(batch)), batch, chunks, mass)
        assert_mass(mass, batch, 2e-5)


@pytest.mark.some(4)
@pytest.mark.parametrize(
    "group",
    [1, 3, 8, *(pytest.param(group, marks=pytest.mark.breadth) for group in (2, 4, 5, 6, 7))],
)
def test_every_size_of_group(make: Make, group: int) -> None:
    """One query and several of two KV heads."""
    batch = some_batch(([1, 3], [30, 140]), block_size=48, group=group, kv_heads=2, head_dim=16)
    mass = no_mass(batch)
    run(make(config_of(batch)), batch, whole(batch), mass)
    assert_mass(mass, batch, 2e-5)


@pytest.mark.some(1)
def test_it_is_added_and_moves_no_bit_of_the_result(make: Make) -> None:
    """Two steps, and one between them that asks for none."""
    batch = some_batch(FEW, block_size=48)
    backend, mass = make(config_of(batch)), no_mass(batch)
    asked, plain, again = (run(backend, batch, whole(batch), m) for m in (mass, None, mass))
    assert_mass(mass / 2, batch, 2e-5)
    assert_bits(asked, plain)
    assert_bits(again, plain)


@needs_compiler
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    "isa, dtype, limit",
    # Emulated machines compute float32 as this one does.
    [(isa, torch.float32, 2e-5) for isa in ISAS if isa not in EMULATED]
    + [
        pytest.param(isa, torch.bfloat16, 2e-3, marks=[pytest.mark.breadth] * (isa == "pairs in C"))
        for isa in ISAS
    ],
)
@pytest.mark.parametrize("block_size", [16, 300])
def test_every_build_of_the_c_kernel(
    build_folder: Path, isa: str, dtype: torch.dtype, limit: float, block_size: int
) -> None:
    """Neither asking moves a bit of the result, nor chunks and threads one of the mass."""
    batch = some_batch(block_size=block_size, dtype=dtype, head_dim=32)
    backend = CpuAttention(config_of(batch), CpuKernels.load(build_folder, ISAS[isa]))
    plain, mass = run(backend, batch, whole(batch), None), no_mass(batch)
    assert_bits(run(backend, batch, whole(batch), mass), plain)
    assert_mass(mass, batch, limit)
    for seed in range(3):
        torch.set_num_threads(1 + seed)
        again = no_mass(batch)
        assert_bits(run(backend, batch, split(batch, seed), again), plain)
        assert torch.equal(again, mass)


def assert_bits(got: list[Tensor], want: list[Tensor]) -> None:
    for x, y in zip(got, want, strict=True):
        ints = torch.int16 if x.dtype is torch.bfloat16 else torch.int32
        assert torch.equal(x.view(ints), y.view(ints))


@needs_compiler
def test_random_batches_of_the_c_kernel(kernels: CpuKernels) -> None:
    """Sequences that share blocks, and any lengths, on both ways through the kernel."""
    for seed in range(12):
        rng = random.Random(seed)
        q_lens = [rng.choice((1, 2, 5, 9, 24, 25, 33, 130)) for _ in range(rng.randint(1, 4))]
        batch = make_batch(
            q_lens,
            [n + rng.randint(0, 700) for n in q_lens],
            dtype=torch.float32,
            kv_heads=rng.randint(1, 3),
            group=rng.randint(1, 8),
            head_dim=rng.choice((16, 40)),
            block_size=rng.choice((1, 7, 64, 256, 300, 1000)),
            seed=seed,
        )
        mass = no_mass(batch)
        run(CpuAttention(config_of(batch), kernels), batch, split(batch, seed), mass)
        assert_mass(mass, batch, 2e-5)


def test_every_block_that_has_keys_needs_a_place(make: Make) -> None:
    batch = some_batch(([1, 1], [20, 33]))
    mass = no_mass(batch)[:, :-1]
    with pytest.raises((AssertionError, IndexError)):
        run(make(config_of(batch)), batch, whole(batch), mass)
