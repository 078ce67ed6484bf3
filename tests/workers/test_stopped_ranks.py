"""A rank that is stopped, as by a debugger or a frozen container: who waits for it hears signals
and closing, and gathers that had to wait have the same bits.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import needs_compiler
from rank_threads import sharing_ranks

from nanoengine import LLM, EngineClosedError, SamplingParams
from nanoengine.api import engine_thread, turns
from nanoengine.api.async_llm import AsyncLLM
from nanoengine.kernels import c_build
from nanoengine.workers import processes, shared_memory_group
from nanoengine.workers.shared_memory_group import SharedMemoryGroup

pytestmark = [needs_compiler, pytest.mark.usefixtures("threads_as_before")]

SOON_S = 20.0  # of what takes a second: no pause of a machine, and less than a rank is waited for
ENDLESS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@contextmanager
def signals_after(seconds: float, count: int) -> Iterator[None]:
    """Ctrl-C to this process, some times, 0.3 s apart."""

    def send() -> None:
        time.sleep(seconds)
        for _ in range(count):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_a_gather_hears_signals_while_it_waits() -> None:
    """And the group has ended: nobody knows what was given."""
    with sharing_ranks(2, timeout_s=300.0) as (first, _):
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt), signals_after(0.2, 1):
            first.gather(torch.ones(1, 1), (1, 1))
        assert time.monotonic() - begin < SOON_S
        with pytest.raises(shared_memory_group.EngineError, match="it was aborted"):
            first.gather(torch.ones(1, 1), (1, 1))


def test_gathers_that_look_up_at_every_wait_have_the_same_bits(
    build_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many pieces; the ranks come late at random, and call again hundreds of times."""
    flags = ("-DPIECE=64", "-DYIELD_NS=0", "-DSLEEP_NS=1000000")
    monkeypatch.setattr(c_build, "CFLAGS", (*c_build.CFLAGS, *flags))
    monkeypatch.setattr(shared_memory_group, "PATIENCE_S", 1e-6)
    shapes = [(50, (3, 2, 0)), (7, (16, 9, 1)), (5, (40, 70, 16)), (1, (0, 0, 33))]
    parts = {widths: [torch.randn(rows, width) for width in widths] for rows, widths in shapes}
    num_calls = [0, 0, 0]

    def run(group: SharedMemoryGroup) -> None:
        gather, late = group._library.gather, random.Random(group.rank)

        def counted(call: bytes) -> int:
            num_calls[group.rank] += 1
            return int(gather(call))

        group._library = type("Counting", (), {"gather": staticmethod(counted)})
        for _, widths in shapes * 5:
            time.sleep(late.random() / 100)
            whole, mine = torch.cat(parts[widths], dim=1), parts[widths][group.rank]
            assert torch.equal(group.gather(mine, widths), whole)
            first = group.gather_to_first(mine, widths)
            assert first is None if group.rank else torch.equal(first, whole)

    with sharing_ranks(3, build_folder, 300.0) as groups:
        libraries = [group._library for group in groups]
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(run, groups))
        for group, library in zip(groups, libraries, strict=True):
            group._library = library
    assert sum(num_calls) > 2 * 3 * 2 * 20, "no gather had to go on where it was"


def test_the_time_in_which_this_process_was_stopped_is_no_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock that jumps, as after Ctrl-Z and fg, ends nothing."""
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600 * (clock() > begin + 0.2))
    with sharing_ranks(2, timeout_s=300.0) as (first, second), ThreadPoolExecutor(1) as pool:
        begin = clock()
        waits = pool.submit(first.gather, torch.ones(1, 1), (1, 1))
        while clock() < begin + 0.5:
            time.sleep(0.01)
        assert second.gather(torch.zeros(1, 1), (1, 1)).tolist() == [[1, 0]]
        assert waits.result().tolist() == [[1, 0]]


@pytest.fixture(autouse=True)
def briefly_waited_for(pids: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks have half a second to end; those of a test that has failed are killed."""
    monkeypatch.setattr(processes, "STOP_S", 0.5)
    yield
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def of_two(tiny: Callable[[str], Path]) -> dict[str, Any]:
    """Settings of an engine of two ranks."""
    blocks = {"num_gpu_blocks": 64, "kvcache_block_size": 8, "dtype": "bfloat16"}
    return {"model": tiny("llama"), "tensor_parallel_size": 2, "num_threads": 2} | blocks


@pytest.mark.breadth
def test_a_second_interrupt_ends_the_wait_for_a_stopped_rank(
    tiny: Callable[[str], Path], pids: list[int]
) -> None:
    llm = LLM(**of_two(tiny))
    os.kill(pids[0], signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt), signals_after(0.2, 2):
        llm.generate([[5, 6, 7]], ENDLESS, use_tqdm=False)
    assert time.monotonic() - begin < SOON_S
    llm.close()
    assert time.monotonic() - begin < 2 * SOON_S
    assert not Path(f"/proc/{pids[0]}").exists()


def test_closing_ends_the_wait_for_a_stopped_rank(
    tiny: Callable[[str], Path], pids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PATIENCE_S", 0.3)
    llm = LLM(**of_two(tiny))
    os.kill(pids[0], signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(llm.generate, [[5, 6, 7]], ENDLESS, False)
        time.sleep(0.2)
        begin = time.monotonic()
        llm.close()
        assert time.monotonic() - begin < SOON_S
        with pytest.raises(EngineClosedError, match="was closed"):
            call.result(SOON_S)
    assert not Path(f"/proc/{pids[0]}").exists()


@pytest.mark.breadth
def test_closing_an_async_llm_ends_the_wait_for_a_stopped_rank(
    tiny: Callable[[str], Path], pids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "PATIENCE_S", 0.3)
    llm = AsyncLLM(**of_two(tiny))
    os.kill(pids[0], signal.SIGSTOP)

    async def ask() -> None:
        with pytest.raises(EngineClosedError, match=r"was closed; make a new AsyncLLM"):
            async for _ in llm.generate([5, 6, 7], ENDLESS, "one"):
                pass

    async def close() -> None:
        asked = asyncio.create_task(ask())
        await asyncio.sleep(0.2)
        await asyncio.to_thread(llm.close)
        await asyncio.wait_for(asked, SOON_S)

    begin = time.monotonic()
    asyncio.run(close())
    assert time.monotonic() - begin < SOON_S
    assert not Path(f"/proc/{pids[0]}").exists()
