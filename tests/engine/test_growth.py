"""What an engine keeps of requests that have ended, counted round by round: nothing that grows."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from descriptors import open_descriptors
from driver import assert_all_free

from nanoengine import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from nanoengine.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.breadth
Tiny = Callable[[str], Path]
Work = Callable[[int], object]
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "num_gpu_blocks": 64,
    "kvcache_block_size": 8,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
}
OFFLOAD: dict[str, Any] = {
    "enable_cpu_offload": True,
    "offload_mode": "stream",
    "kv_offload_gib": 0.005,
    "ring_slots": 2,
    "slot_tokens": 16,
}
WAYS: dict[str, dict[str, Any]] = {
    "resident": {},
    "streamed": OFFLOAD,
    "guesses": {"speculative": "ngram:4"},
}
A_ROUND = 64  # requests, of which those of one kind are LEAST at least
FILLING, COUNTED = 5, 6  # rounds until caches are full, and those that are counted
LEAST = 4  # more of one kind of object after each of the counted rounds is growth
# Of what is counted in other units: blocks of Python's allocator, and KiB of the process.
LEAST_BLOCKS, LEAST_KIB = 8 * A_ROUND, 1024


def params_of(number: int) -> SamplingParams:
    """Every kind in turn, each form another one."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"top_p": 0.9, "n": 3},
        {"logprobs": 20},
        {"prompt_logprobs": 5},
        {"structured_outputs": StructuredOutputsParams(regex=f"[a-z]{{2}}x{number}")},
        {"structured_outputs": StructuredOutputsParams(choice=[f"a{number}", "b"])},
        {"repetition_penalty": 1.1, "bad_words": ["a"], "logit_bias": {5: 1.0}},
        {"stop": ["zz", f"{number}"], "min_tokens": 2},
    ]
    given = kinds[number % len(kinds)]
    return SamplingParams(max_tokens=3 + number % 7, seed=number, **given)


def run(llm: LLM, first: int) -> None:
    """So many requests, of which no two are alike, the first tokens of streams that are left, and
    beams.
    """
    numbers = range(first, first + A_ROUND)
    prompts = [f"{number} " * (number % 20 + 1) for number in numbers]
    llm.generate(prompts, [params_of(number) for number in numbers], use_tqdm=False)
    beams = BeamSearchParams(beam_width=2, max_tokens=3)
    for number in range(first, first + LEAST):
        llm.beam_search([f"b {number}"], beams, use_tqdm=False)
        next(iter(llm.stream(f"s {number}", SamplingParams(max_tokens=8))))


def mapped_kib() -> tuple[int, int]:
    """How many mappings the process has, and the KiB that it alone keeps: not those of files, which
    the kernel drops and reads again as it likes.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    kinds = ("RssAnon:", "RssShmem:", "VmSwap:")
    held = sum(int(line.split()[1]) for line in lines if line.startswith(kinds))
    return len(Path("/proc/self/maps").read_text().splitlines()), held


def counts() -> Counter[object]:
    """Live objects by type; what else a process can have too much of, by name."""
    gc.collect()
    found: Counter[object] = Counter(map(type, gc.get_objects()))
    found["open files"] = open_descriptors().total() * LEAST  # one more in each round is too many
    found["threads"] = threading.active_count() * LEAST
    mappings, kib = mapped_kib()
    found["mappings"] = mappings
    found["blocks"] = sys.getallocatedblocks() * LEAST // LEAST_BLOCKS
    found["memory"] = kib * LEAST // LEAST_KIB
    return found


def grown(rounds: list[Counter[object]]) -> dict[str, list[int]]:
    """What there was more of after each round than before it."""
    return {
        str(kind): [each[kind] for each in rounds]
        for kind in rounds[-1]
        if all(after[kind] - before[kind] >= LEAST for before, after in pairwise(rounds))
    }


def assert_nothing_grows(work: Work) -> None:
    """work(first): a round of requests from this number on."""
    for number in range(FILLING):
        work(number * A_ROUND)
    found = [counts()]
    for number in range(FILLING, FILLING + COUNTED):
        work(number * A_ROUND)
        found.append(counts())
    assert not grown(found)


@pytest.mark.parametrize("way", WAYS)
def test_ended_requests_leave_nothing(tiny: Tiny, way: str) -> None:
    pytest.importorskip("llguidance")
    with LLM(tiny("llama"), **SETTINGS, **WAYS[way]) as llm:
        assert_nothing_grows(lambda first: run(llm, first))
        assert_all_free(llm.llm_engine)


async def ended(llm: AsyncLLM, number: int) -> None:
    """A stream that is left after its first token, aborted by its name, or heard to its end."""
    name = f"r{number}"
    async for _ in llm.generate(f"{number} abc", SamplingParams(max_tokens=40), name):
        if number % 3 == 0:
            return
        if number % 3 == 1:
            await llm.abort(name)


def test_streams_that_are_left_leave_nothing(tiny: Tiny) -> None:
    """All of a round at once."""

    async def rounds() -> None:
        llm, loop = AsyncLLM(tiny("llama"), **SETTINGS), asyncio.get_running_loop()

        async def one(first: int) -> None:
            await asyncio.gather(*(ended(llm, first + i) for i in range(A_ROUND)))

        def work(first: int) -> None:
            asyncio.run_coroutine_threadsafe(one(first), loop).result()

        await loop.run_in_executor(None, assert_nothing_grows, work)
        llm.shutdown()

    asyncio.run(rounds())


def test_growth_is_seen() -> None:
    """Of objects, files and bytes, a few in each round; one object, or a single rise, is none."""
    kept: list[object] = []

    class Kept:
        pass

    def written() -> object:
        """Memory of its own: the allocator may have some left of other tests."""
        memory = mmap.mmap(-1, 3 << 20)
        memory.write(b"x" * len(memory))
        return memory

    late = (FILLING + 2) * A_ROUND
    assert_nothing_grows(lambda first: kept.append(Kept()))
    assert_nothing_grows(lambda first: kept.extend(Kept() for _ in range(99 * (first == late))))
    leaks: list[Callable[[], object]] = [
        lambda: [Kept() for _ in range(LEAST)],
        lambda: os.fdopen(os.open(os.devnull, os.O_RDONLY)),
        lambda: [*map(str, range(10**6, 10**6 + 12 * A_ROUND))],
        written,
    ]
    for leak in leaks:
        with pytest.raises(AssertionError):
            assert_nothing_grows(lambda first, leak=leak: kept.append(leak()))  # type: ignore[misc]
        kept.clear()
