"""Many short requests, random aborts and shared prefixes through one long-lived engine.

Every answer is that of a fresh engine, nothing is held at the end, and memory does not grow.
"""

from __future__ import annotations

import functools
import gc
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from driver import assert_all_free, host_gib

from nanoengine import SamplingParams
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.outputs import RequestOutput

BLOCK = 4
MOST_TOKENS = 12
MOST_AT_ONCE = 6
STATM = Path("/proc/self/statm")

Tiny = Callable[[str], Path]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def streaming_engine(path: Path) -> LLMEngine:
    """Eight device blocks for six requests of up to eighteen blocks each."""
    return LLMEngine(
        path,
        dtype="float32",
        device="cpu",
        kvcache_block_size=BLOCK,
        num_gpu_blocks=8,
        enable_cpu_offload=True,
        offload_mode="stream",
        kv_offload_gib=host_gib(path, 50, BLOCK),
        ring_slots=2,
        slot_tokens=2 * BLOCK,
        max_num_seqs=MOST_AT_ONCE,
        max_num_batched_tokens=16,
        decode_reserve_blocks=1,
    )


@functools.cache
def answer_of_a_fresh_engine(path: Path, prompt: tuple[int, ...]) -> list[int]:
    """MOST_TOKENS greedy tokens; fewer are their beginning. All KV is on the device."""
    engine = LLMEngine(path, dtype="float32", device="cpu", kvcache_block_size=64, num_gpu_blocks=2)
    engine.add_request(list(prompt), greedy(MOST_TOKENS))
    outputs: list[RequestOutput] = []
    while not outputs:
        outputs = engine.step()
    engine.close()
    return outputs[0].outputs[0].token_ids


def some_prompts(rng: random.Random, count: int) -> list[tuple[int, ...]]:
    """Each begins with some of one of three texts and goes on with tokens of its own."""
    texts = [[rng.randrange(256) for _ in range(50)] for _ in range(3)]
    return [
        (*rng.choice(texts)[: rng.randrange(51)], *(rng.randrange(256) for _ in range(tail)))
        for tail in (rng.randrange(1, 10) for _ in range(count))
    ]


@dataclass
class Soak:
    """Keeps an engine busy: some requests more, some aborted, a step."""

    engine: LLMEngine
    prompts: list[tuple[int, ...]]
    rng: random.Random
    asked: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    num_aborted: int = 0
    most_at_once: int = 0

    def run(self, num_requests: int) -> None:
        """So many requests more; returns when all have ended."""
        wanted = len(self.asked) + num_requests
        while len(self.asked) < wanted or self.engine.has_unfinished_requests:
            while len(self.asked) < wanted and len(self.unfinished) < 2 * MOST_AT_ONCE:
                self.ask()
            if self.unfinished and self.rng.random() < 0.12:
                self.keep(self.engine.abort(self.rng.choice(self.unfinished)))
                self.num_aborted += 1
            self.keep(self.engine.step())
            self.engine.kv.check()
            self.most_at_once = max(self.most_at_once, len(self.engine.scheduler.running))

    @property
    def unfinished(self) -> list[int]:
        scheduler = self.engine.scheduler
        return [seq.seq_id for seq in [*scheduler.running, *scheduler.waiting]]

    def ask(self) -> None:
        prompt, num_tokens = self.rng.choice(self.prompts), self.rng.randint(1, MOST_TOKENS)
        request_id = self.engine.add_request(list(prompt), greedy(num_tokens))
        self.asked[request_id] = prompt, num_tokens

    def keep(self, outputs: list[RequestOutput]) -> None:
        self.outputs |= {output.request_id: output for output in outputs}

    def check(self, path: Path) -> None:
        """Every answer is that of a fresh engine, as far as it goes."""
        assert self.outputs.keys() == self.asked.keys()
        for request_id, (prompt, num_tokens) in self.asked.items():
            completion = self.outputs[request_id].outputs[0]
            was_aborted = completion.finish_reason == "abort"
            assert was_aborted or len(completion.token_ids) == num_tokens
            expected = answer_of_a_fresh_engine(path, prompt)
            assert completion.token_ids == expected[: len(completion.token_ids)]


def resident_bytes() -> int:
    gc.collect()
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(path: Path, num_requests: int, num_prompts: int) -> None:
    """A third is warm-up; what the others add to the process's memory is looked at."""
    rng = random.Random(num_requests)
    soak = Soak(streaming_engine(path), some_prompts(rng, num_prompts), rng)
    soak.run(num_requests // 3)
    before = resident_bytes() if STATM.exists() else 0
    soak.run(num_requests - num_requests // 3)
    if before:
        assert resident_bytes() < 1.02 * before, "memory grows with the number of requests"
    outputs = soak.outputs.values()
    assert len(soak.asked) == num_requests and soak.num_aborted > num_requests // 50
    assert soak.most_at_once > MOST_AT_ONCE // 2
    assert sum(output.num_cached_tokens > 0 for output in outputs) > num_requests // 4
    counters = soak.engine.kv.counters
    assert counters.h2d_bytes and counters.d2h_bytes, "everything fitted the device"
    soak.check(path)
    assert_all_free(soak.engine)
    soak.engine.close()


@pytest.mark.breadth
def test_a_hundred_requests_leave_no_trace(tiny: Tiny) -> None:
    soak(tiny("llama"), 100, 12)


@pytest.mark.slow
def test_a_thousand_requests_leave_no_trace(tiny: Tiny) -> None:
    soak(tiny("qwen3"), 1000, 40)
