"""Groups of ranks: what they gather, and how they end. Each rank is a thread of this process."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from descriptors import open_descriptors
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from marks import needs_compiler
from rank_threads import PATIENCE_S, sharing_ranks
from torch import Tensor

from nanoengine.context import ReplayKey
from nanoengine.errors import EngineError
from nanoengine.kernels import c_build
from nanoengine.kernels.call_tape import CallTape
from nanoengine.workers import shared_memory_group
from nanoengine.workers.gloo_group import GlooGroup
from nanoengine.workers.group import DTYPES, Group
from nanoengine.workers.shared_memory_group import SharedMemoryGroup, make_region

Make = Callable[..., Any]
SOON_S = 10.0  # of what takes milliseconds: less than PATIENCE_S, and no pause of a machine


@contextmanager
def gloo_ranks(size: int, timeout_s: float = PATIENCE_S) -> Iterator[list[Group]]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(size) as pool:
        store = Path(folder) / "store"
        met = [pool.submit(GlooGroup, store, rank, size, timeout_s) for rank in range(size)]
        groups = [future.result() for future in met]
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


@pytest.mark.some(2)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_gets_all_columns(ranks: Make, size: int) -> None:
    shapes = st.tuples(
        st.integers(0, 40),
        st.lists(st.integers(0, 70), min_size=size, max_size=size),
        st.sampled_from(DTYPES),
        st.integers(1, 2),
    )

    @settings(
        derandomize=True, max_examples=60, deadline=None, suppress_health_check=[*HealthCheck]
    )
    @example([(1, [1] * size, torch.int64, 2)], 0)
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


@needs_compiler
def test_a_gather_goes_through_the_memory_in_pieces(
    build_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 bytes here: several rows a piece, one, and parts of one, of more than one rank."""
    flags = ("-DPIECE=64", "-DYIELD_NS=0", "-DSLEEP_NS=1000000")
    monkeypatch.setattr(c_build, "CFLAGS", (*c_build.CFLAGS, *flags))
    shapes = [(50, (3, 2, 0)), (7, (16, 9, 1)), (5, (40, 70, 16)), (1, (0, 0, 33))]

    def run(group: Group) -> None:
        for rows, widths in shapes * 3:
            parts = [some(rows, width, torch.float32, width) for width in widths]
            whole = torch.cat(parts, dim=1)
            assert same_bits(group.gather(parts[group.rank], widths), whole)
            first = group.gather_to_first(parts[group.rank], widths)
            assert first is None if group.rank else same_bits(first, whole)

    with sharing_ranks(3, build_folder) as groups:
        assert at_once(groups, run) == [None] * 3


def test_who_waits_when_the_group_is_aborted_or_comes_later_gets_an_error(ranks: Make) -> None:
    with ranks(2) as (first, second):
        timer = threading.Timer(0.2, first.abort)
        begin = time.perf_counter()
        timer.start()
        with pytest.raises(EngineError, match="has ended: it was aborted"):
            first.gather(torch.ones(1, 1), (1, 1))
        assert 0.15 < time.perf_counter() - begin < SOON_S
        for call in (
            lambda group: group.gather(torch.ones(1, 1), (1, 1)),
            lambda group: group.gather_to_first(torch.ones(1, 1), (1, 1)),
            lambda group: group.broadcast(torch.ones(1)),
        ):
            assert all("has ended" in text for text in at_once([first, second], call))
        timer.join()


@needs_compiler
def test_an_abort_wakes_all_ranks() -> None:
    with sharing_ranks(4) as groups:
        timer = threading.Timer(0.3, groups[3].abort)  # which is not there itself
        timer.start()
        begin = time.perf_counter()
        ends = at_once(groups[:3], lambda group: group.gather(torch.ones(2, 1), (1,) * 4))
        assert time.perf_counter() - begin < SOON_S
        assert all("it was aborted" in end for end in ends)
        timer.join()


def test_a_rank_may_come_late(ranks: Make) -> None:
    def run(group: Group) -> Tensor:
        if group.rank == 1:
            time.sleep(0.1)
        return group.gather(torch.full((2, 1), group.rank), (1, 1, 1))

    with ranks(3) as groups:
        for whole in at_once(groups, run):
            assert whole.tolist() == [[0, 1, 2]] * 2


def test_who_does_not_come_in_time_ends_the_group(ranks: Make) -> None:
    ended = threading.Event()

    def run(group: Group) -> Tensor | None:
        if group.rank == 1:
            ended.wait(SOON_S)
        try:
            return group.gather(torch.ones(1, 1), (1, 1))
        finally:
            ended.set()

    with ranks(2, timeout_s=0.2) as groups:
        begin = time.perf_counter()
        first, second = at_once(groups, run)
        assert time.perf_counter() - begin < SOON_S
        assert "in time" in first or "rank 1 did not come within 0.2 s" in first
        assert "has ended" in second


@needs_compiler
def test_ten_thousand_small_gathers_lose_no_wake_up(
    build_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here ranks sleep whenever they wait, and a rank that is not woken sleeps until it is late."""
    flags = ("-DPIECE=64", "-DYIELD_NS=0", "-DSLEEP_NS=100000000000")
    monkeypatch.setattr(c_build, "CFLAGS", (*c_build.CFLAGS, *flags))
    monkeypatch.setattr(shared_memory_group, "PATIENCE_S", PATIENCE_S)

    def run(group: Group) -> None:
        for i in range(10_000):
            begin = time.perf_counter()
            part = torch.full((1, 1), group.rank + i)
            assert group.gather(part, (1, 1)).tolist() == [[i, i + 1]]
            assert time.perf_counter() - begin < SOON_S, "a rank slept until it was late"

    with sharing_ranks(2, build_folder) as groups:
        assert at_once(groups, run) == [None] * 2


def test_two_groups_at_once(ranks: Make) -> None:
    """They do not mix, and one that ends leaves the other alone."""

    def run(group: Group) -> None:
        for i in range(50):
            whole = group.gather(torch.full((1, 1), base[id(group)] + i), (1, 1))
            assert whole.tolist() == [[base[id(group)] + i] * 2]

    with ranks(2) as ones, ranks(2) as others:
        base = {id(group): 1000 * (group in others) for group in (*ones, *others)}
        assert at_once([*ones, *others], run) == [None] * 4
        ones[0].abort()
        assert at_once(others, run) == [None] * 2


def test_wrong_tensors_are_refused(ranks: Make) -> None:
    with ranks(2) as (first, second):
        for part, widths in [
            (torch.ones(1, 2), (1, 1)),
            (torch.ones(2), (1, 1)),
            (torch.ones(1, 1), (1, 1, 1)),
            (torch.ones(1, 1), (1, -1)),
            (torch.ones(1, 1, dtype=torch.float64), (1, 1)),
            (torch.ones(1, 1, device="meta"), (1, 1)),
        ]:
            with pytest.raises(EngineError, match=r"to a gather|gather takes|exchange"):
                first.gather(part, widths)
            with pytest.raises(EngineError):
                first.gather_to_first(part, widths)
        with pytest.raises(EngineError, match="exchange"):
            first.broadcast(torch.ones(1, dtype=torch.bool))
        with pytest.raises(EngineError, match="fills a contiguous tensor"):
            second.broadcast(torch.ones(2, 2).T[:1])


@needs_compiler
def test_ranks_that_gather_different_shapes_are_told() -> None:
    def run(group: Group) -> None:
        group.gather(torch.ones(1 + group.rank, 1), (1, 1))

    with sharing_ranks(2) as groups:
        assert any("gives rows of another shape" in str(end) for end in at_once(groups, run))


@pytest.mark.some(1)
def test_closing_leaves_no_descriptor_and_no_mapping(ranks: Make) -> None:
    def run() -> tuple[Counter[str], int]:
        with ranks(2) as groups:
            at_once(groups, lambda group: group.gather(torch.ones(1, 1), (1, 1)))
            for group in groups:
                group.close()
            with pytest.raises(EngineError, match="closed"):
                groups[0].gather(torch.ones(1, 1), (1, 1))
            groups[0].abort()
            descriptors = open_descriptors()
            return descriptors, Path("/proc/self/maps").read_text().count("nanoengine-ranks")

    before, mapped = run()  # what is loaded once; and what other tests have left
    descriptors, mappings = run()
    assert not descriptors - before and mappings <= mapped


@needs_compiler
def test_other_descriptors_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb+") as file, pytest.raises(EngineError, match="no shared mem"):
        SharedMemoryGroup(file.fileno(), 0, 2)
    fd = make_region(2)
    try:
        with pytest.raises(EngineError, match="for a group of 3 ranks"):
            SharedMemoryGroup(fd, 0, 3)
        with pytest.raises(OSError):
            os.ftruncate(fd, 10)  # it is sealed
    finally:
        os.close(fd)


def test_closing_ends_a_call_in_another_thread(ranks: Make) -> None:
    for seconds in (0.2, 2.0, 10.0):  # a busy machine may need longer to begin the call
        with ranks(2) as groups, ThreadPoolExecutor(1) as pool:
            waits = pool.submit(at_once, groups[:1], lambda g: g.gather(torch.ones(1, 1), (1, 1)))
            time.sleep(seconds)
            begin = time.perf_counter()
            groups[0].close()
            (said,) = waits.result()
            assert time.perf_counter() - begin < SOON_S
        if said != "the group of ranks was closed":
            break
    assert "has ended" in said


@needs_compiler
def test_a_replayed_pass_gathers_again() -> None:
    """Of three passes the first is recorded; the others make its calls, gathers among them."""
    passes: list[int] = []

    def double(given: Tensor, out: Tensor) -> None:
        out.numpy()[...] = given.numpy() * 2

    def run(given: tuple[Group, CallTape]) -> list[list[list[float]]]:
        group, tape = given

        def step(value: float) -> list[list[float]]:
            x = torch.full((2, 1), value + group.rank)

            def forward() -> Tensor:
                passes.append(group.rank)
                part, out = torch.empty(2, 1), torch.empty(2, 3)
                tape.call(double, (x, part))
                tape.call(double, (group.gather(part, (1, 1, 1)), out))
                return group.gather(out[:, group.rank : group.rank + 1], (1, 1, 1))

            return tape.replay(ReplayKey((x,), ()), forward).tolist()

        return [step(value) for value in (1.0, 5.0, 9.0)]

    fd, tapes = make_region(3), [CallTape() for _ in range(3)]
    groups = [SharedMemoryGroup(fd, rank, 3, tape) for rank, tape in enumerate(tapes)]
    os.close(fd)
    try:
        with ThreadPoolExecutor(3) as pool:
            results = list(pool.map(run, zip(groups, tapes, strict=True)))
    finally:
        for group in groups:
            group.close()
    rows = [[[4 * (value + rank) for rank in range(3)]] * 2 for value in (1, 5, 9)]
    assert results == [rows] * 3
    assert sorted(passes) == [0, 1, 2]
