"""Groups of ranks: what they gather, and how they end. Each rank is a thread of this process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from marks import needs_compiler
from torch import Tensor

from nanoengine.errors import EngineError
from nanoengine.workers.gloo_group import GlooGroup
from nanoengine.workers.group import DTYPES, Group
from nanoengine.workers.shared_memory_group import SharedMemoryGroup, make_region

Make = Callable[..., Any]


@contextmanager
def gloo_ranks(size: int, **options: Any) -> Iterator[list[Group]]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(size) as pool:
        store = Path(folder) / "store"
        met = [pool.submit(GlooGroup, store, rank, size, **options) for rank in range(size)]
        groups = [future.result() for future in met]
        try:
            yield groups
        finally:
            for group in groups:
                group.close()


@contextmanager
def sharing_ranks(size: int, **options: Any) -> Iterator[list[Group]]:
    fd = make_region(size)
    groups = [SharedMemoryGroup(fd, rank, size, **options) for rank in range(size)]
    os.close(fd)
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


RANKS = {"gloo": gloo_ranks, "shared memory": sharing_ranks}
BOTH = [pytest.param("gloo"), pytest.param("shared memory", marks=needs_compiler)]


@pytest.fixture(params=BOTH)
def ranks(request: pytest.FixtureRequest) -> Make:
    """A context manager from a number of ranks to their groups."""
    return RANKS[request.param]


def at_once(groups: list[Group], call: Callable[[Group], Any]) -> list[Any]:
    """What each rank gets, in order; an EngineError is its text."""

    def caught(group: Group) -> Any:
        try:
            return call(group)
        except EngineError as error:
            return str(error)

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(caught, groups))


def some(rows: int, width: int, dtype: torch.dtype, seed: int, stride: int = 1) -> Tensor:
    """[rows, width] of every bit pattern that there is; stride: between columns."""
    generator = torch.Generator().manual_seed(seed)
    count = rows * width * stride * dtype.itemsize
    values = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    return values.view(dtype).view(rows, width * stride)[:, ::stride]


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_gets_all_columns(ranks: Make, size: int) -> None:
    shapes = st.tuples(
        st.integers(0, 40),
        st.lists(st.integers(0, 70), min_size=size, max_size=size),
        st.sampled_from(DTYPES),
        st.integers(1, 2),
    )

    @settings(max_examples=60, deadline=None, suppress_health_check=[*HealthCheck])
    @given(st.lists(shapes, min_size=1, max_size=4), st.integers(0, 1 << 30))
    def check(calls: list[Any], seed: int) -> None:
        def run(group: Group) -> None:
            for rows, widths, dtype, stride in calls:
                parts = [
                    some(rows, width, dtype, seed + r, stride) for r, width in enumerate(widths)
                ]
                whole, mine = torch.cat(parts, dim=1), parts[group.rank]
                assert same_bits(group.gather(mine, widths), whole)
                first = group.gather_to_first(mine, widths)
                assert first is None if group.rank else same_bits(first, whole)
                given = whole if group.rank == 0 else torch.zeros_like(whole)
                assert same_bits(group.broadcast(given), whole)

        assert at_once(groups, run) == [None] * size

    with ranks(size) as groups:
        check()
