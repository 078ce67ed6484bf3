"""Drives an LLMEngine step by step for tests: checks the block accounting, records logits, schedule
and, recomputed from block tables alone, what every step had to move between the tiers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference, reference_greedy, reference_logits
from torch import Tensor

from nanoengine import SamplingParams
from nanoengine.config.engine import GIB
from nanoengine.devices.copy_streams import Convert
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.kv.block_manager import Block
from nanoengine.kv.kv_cache import HybridKVCacheManager
from nanoengine.kv.open_step import OpenStep
from nanoengine.loading.model_config import read_model_config
from nanoengine.outputs import RequestOutput
from nanoengine.sequence import ScheduledBatch
from nanoengine.sequence import Sequence as EngineSequence

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
# An engine that streams most of its KV in blocks of 8 tokens, with all checks on.
STREAMING: dict[str, Any] = {
    "device": "cpu",
    "num_threads": 1,
    "kvcache_block_size": 8,
    "num_gpu_blocks": 4,
    "enable_cpu_offload": True,
    "offload_mode": "stream",
    "ring_slots": 2,
    "slot_tokens": 16,
    "stream_mib_per_step": 1e6,  # nobody sits a step out: batches are equal with and without
    "debug_kv": True,
    "debug_copy_delay_ms": 0.1,
    "speculative": "off",  # with exact bf16 on the host it would draft
}


def device_lost(*_: Any) -> None:
    """In place of what a step does: it fails."""
    raise RuntimeError("device lost")


def break_engine(llm: Any) -> None:
    """From here on every step of an LLM fails."""
    llm.llm_engine.runner.launch = device_lost


class Driver:
    """Runs requests to their end; `logits[request_id]` are the rows their tokens were chosen
    from.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.logits: dict[int | str, list[Tensor]] = {}
        self.num_steps = 0
        self.max_batch = 0
        self.audit = Audit(engine.kv)
        sampler = engine.runner.sampler
        sample = sampler.sample

        def recording(
            logits: Tensor, seqs: Sequence[EngineSequence], positions: Sequence[int], *ahead: Any
        ) -> Tensor:
            for row, seq in zip(logits, seqs, strict=True):
                self.logits.setdefault(seq.seq_id, []).append(row.float().clone())
            self.max_batch = max(self.max_batch, len(seqs))
            return sample(logits, seqs, positions, *ahead)

        sampler.sample = recording

    def run(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    ) -> list[RequestOutput]:
        """All prompts queued at once; their outputs in order."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        ids = [self.engine.add_request(p, s) for p, s in zip(prompts, each, strict=True)]
        outputs = self.drain()
        return [outputs[i] for i in ids]

    def drain(self) -> dict[int | str, RequestOutput]:
        """Step until nothing is left."""
        outputs: dict[int | str, RequestOutput] = {}
        while self.engine.has_unfinished_requests:
            for output in self.step():
                outputs[output.request_id] = output
        return outputs

    def step(self) -> list[RequestOutput]:
        """One step, its accounting checked."""
        outputs = self.engine.step()
        self.engine.kv.check()
        self.num_steps += 1
        assert self.num_steps < 100_000, "the engine makes no progress"
        return outputs


STREAMED: dict[str, Any] = {
    "num_gpu_blocks": 6,
    "enable_cpu_offload": True,
    "offload_mode": "stream",
    "kv_offload_gib": 0.01,
    "slot_tokens": 8,
    "stream_mib_per_step": 1000.0,
}


def small_engine(path: Path, runs_ahead: bool = False, **settings: Any) -> LLMEngine:
    """fp32 on the CPU in blocks of 8 tokens, 64 of them, and no guesses; unless `settings` say
    otherwise.
    """
    defaults = {
        "kvcache_block_size": 8,
        "dtype": "float32",
        "device": "cpu",
        "num_gpu_blocks": 64,
        "speculative": "off",
    }
    made = LLMEngine(path, **(defaults | settings))
    made.runs_ahead = runs_ahead
    return made


def answer(
    engine: LLMEngine, prompts: Sequence[list[int]], each: Sequence[SamplingParams]
) -> list[RequestOutput]:
    """All at once, the accounting of blocks checked after every step."""
    return Driver(engine).run(prompts, each)


@dataclass(frozen=True)
class _Place:
    """Where a block was before a step."""

    on_device: bool
    host_slot: int | None
    host_len: int


class Audit:
    """What the steps must have moved, from the tables before and after they were placed.

    schedule: for each step (request id, tokens) of its batch. h2d_bytes: blocks that a step reads
    and that are not on the device, whole, plus the tokens of blocks that were brought back to it.
    d2h_bytes: growth of host copies that are still there (a lower bound under host pressure).
    spared_bytes: of h2d_bytes, what windowed layers see nothing of: fills without it are left out.
    between_bytes: beside h2d_bytes, blocks on both tiers between such blocks: they may cross too.
    """

    def __init__(self, kv: HybridKVCacheManager) -> None:
        self.schedule: list[tuple[tuple[int, int], ...]] = []
        self.h2d_bytes = self.d2h_bytes = self.peak_streamed = self.spared_bytes = 0
        self.between_bytes = 0
        self._kv = kv
        self._open_step = kv.open_step
        kv.open_step = self._audited

    def _audited(self, batch: ScheduledBatch) -> OpenStep:
        self.schedule.append(tuple((item.seq.seq_id, item.num_tokens) for item in batch.items))
        before = {
            block: _Place(block.device_slot is not None, block.host_slot, block.host_len)
            for block in self._all_blocks()
        }
        step = self._open_step(batch)
        self._count(batch, before)
        return step

    def _all_blocks(self) -> list[Block]:
        tables = [table.blocks for table in self._kv.tables.values()]
        blocks = [block for table in tables for block in table]
        return [*dict.fromkeys([*blocks, *self._kv.blocks.cached])]

    def _count(self, batch: ScheduledBatch, before: dict[Block, _Place]) -> None:
        spec = self._kv.spec
        token_bytes = spec.host_block_bytes // spec.block_size
        reads: list[set[Block]] = []
        between: set[Block] = set()
        for item in batch.items:
            num_blocks = -(-(item.seq.num_computed + item.num_tokens) // spec.block_size)
            blocks = self._kv.tables[item.seq.seq_id].blocks[:num_blocks]
            on_host = (block for block in blocks if block.host_slot is not None)
            reads.append({block for block in on_host if block.device_slot is None})
            streamed = [at for at, block in enumerate(blocks) if block in reads[-1]]
            inner = blocks[streamed[0] : streamed[-1]] if streamed else []
            between |= {b for b in inner if b.device_slot is not None and b.is_on_host}
        self.peak_streamed = max(self.peak_streamed, sum(map(bool, reads)))
        if spec.slot_blocks:
            self.h2d_bytes += len(set().union(*reads)) * sum(spec.read_bytes)
            self.between_bytes += len(between) * sum(spec.read_bytes) * bool(spec.least_run)
            for window, num_bytes in zip(spec.windows, spec.read_bytes, strict=bool(spec.windows)):
                spared = len(set().union(*reads)) - len(self._seen(batch, reads, window))
                self.spared_bytes += spared * num_bytes
        for block, num_tokens in self._computed().items():
            if block.device_slot is not None and not before[block].on_device:
                self.h2d_bytes += num_tokens * token_bytes
        for block in self._all_blocks():
            old = before[block]
            if block.host_slot is not None:
                kept = old.host_len if block.host_slot == old.host_slot else 0
                self.d2h_bytes += (block.host_len - kept) * token_bytes

    def _seen(
        self, batch: ScheduledBatch, reads: list[set[Block]], window: int | None
    ) -> set[Block]:
        """Those of the blocks that a layer with this window sees."""
        seen: set[Block] = set()
        for item, read in zip(batch.items, reads, strict=True):
            first = 0 if window is None else max(0, item.start + 1 - window)
            blocks = self._kv.tables[item.seq.seq_id].blocks[first // self._kv.spec.block_size :]
            seen |= read.intersection(blocks)
        return seen

    def _computed(self) -> dict[Block, int]:
        """Tokens with KV in each block, by the lengths of the sequences that hold it."""
        size = self._kv.spec.block_size
        computed: dict[Block, int] = {}
        for table in self._kv.tables.values():
            for index, block in enumerate(table.blocks):
                num_tokens = max(0, min(size, table.seq.num_computed - index * size))
                if index < len(table.published):
                    num_tokens = size  # full since it was found or published
                computed[block] = max(computed.get(block, 0), num_tokens)
        return computed


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """The generated ids of each output."""
    return [output.outputs[0].token_ids for output in outputs]


def expected(
    path: Path, prompt: Sequence[int], num_tokens: int, guess: Sequence[int] = ()
) -> list[int]:
    """transformers' greedy continuation; each is computed once in a test session. guess: see
    reference_greedy.
    """
    return list(_expected(path, tuple(prompt), num_tokens, tuple(guess)))


@functools.cache
def _expected(
    path: Path, prompt: tuple[int, ...], num_tokens: int, guess: tuple[int, ...]
) -> tuple[int, ...]:
    return tuple(reference_greedy(reference(path), prompt, num_tokens, guess))


def assert_greedy(
    path: Path, prompts: Sequence[list[int]], outputs: Sequence[RequestOutput], num_tokens: int
) -> None:
    """Every answer is transformers' greedy continuation of its prompt, `num_tokens` long."""
    for prompt, tokens in zip(prompts, token_ids(outputs), strict=True):
        assert tokens == expected(path, prompt, num_tokens, tokens)


def host_gib(path: Path, num_blocks: int, block_size: int) -> float:
    """kv_offload_gib for so many fp32 host blocks of the checkpoint at `path`."""
    config = read_model_config(path)
    return (num_blocks + 0.5) * block_size * config.kv_bytes_per_token(4) / GIB


def assert_logits_are_transformers(
    driver: Driver, path: Path, outputs: Sequence[RequestOutput]
) -> None:
    """Every row that a token of `outputs` was chosen from is within 1e-4 of transformers'."""
    for output in outputs:
        prompt = output.prompt_token_ids
        tokens = prompt + output.outputs[0].token_ids
        logits = reference_logits(reference(path), tokens)[len(prompt) - 1 : -1]
        ours = torch.stack(driver.logits[output.request_id])
        torch.testing.assert_close(ours, logits, atol=1e-4, rtol=0)


def assert_bits_of_numbers(coded: Path, numbers: Path, dtype: str) -> None:
    """A checkpoint of codes has the logits of its numbers, resident, streamed and in place."""
    gib = host_gib(coded, 60, 8)
    tiers: list[dict[str, Any]] = [
        {"num_gpu_blocks": 7, "kv_offload_gib": gib, "offload_mode": mode}
        for mode in ("stream", "in_place")
    ]
    runs = [(numbers, {}), *((coded, settings) for settings in ({}, *tiers))]
    found = []
    for folder, settings in runs:
        driver = Driver(small_engine(folder, dtype=dtype, **settings))
        (output,) = driver.run([[7 * i % 256 for i in range(90)]])
        driver.engine.close()
        found.append(torch.stack(driver.logits[output.request_id]))
    assert all(torch.equal(each, found[0]) for each in found)


def assert_codes_on_a_gpu(coded: Path, numbers: Path, what: str) -> None:
    """On an emulated GPU the plan has so many codes ("23 of FP8"), and logits are transformers'."""
    virtual_gpu = pytest.importorskip("virtual_gpu", reason="Triton is not installed")
    with virtual_gpu.VirtualGpu():
        settings = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "max_model_len": 64}
        greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        driver = Driver(small_engine(coded, device="cuda", **settings))
        outputs = driver.run([[7 * i % 256 for i in range(20)]], greedy)
        assert f"codes as stored: {what}" in str(driver.engine.plan)
        driver.engine.close()
    assert_logits_are_transformers(driver, numbers, outputs)


def fail_copies(stream: Any, numbers: set[int]) -> None:
    """Of the copies that a (checked) stream makes from now on, let those with these numbers fail.

    They get a source of the wrong size, so that the real copy raises and delivers nothing.
    """
    copies, made = getattr(stream, "inner", stream).copies, itertools.count()
    make = copies.make

    def failing(dst: Tensor, src: Tensor, owner: object, convert: Convert | None) -> None:
        broken = next(made) in numbers
        make(dst, torch.empty(3, dtype=torch.uint8) if broken else src, owner, convert)

    copies.make = failing


def assert_all_free(engine: LLMEngine) -> None:
    """Nothing is held, in flight or, once the prefix cache is reset, taken on either tier."""
    engine.kv.reset_prefix_cache()
    manager = engine.kv.blocks
    assert not engine.kv.tables and not manager.in_flight
    assert not engine.kv.states._slots
    for pool in (manager.device, manager.host):
        assert pool.num_free == pool.num_slots
    engine.kv.check()


def assert_tiers_agree(runs: Mapping[str, tuple[Driver, list[list[int]], list[Tensor]]]) -> None:
    """By layout ("resident" and others): the driver, and of each prompt the ids and the logits. All
    have the same steps, ids and bits; only "stream" copies to the device.
    """
    resident, ids, logits = runs["resident"]
    for layout, (driver, their_ids, their_logits) in runs.items():
        assert driver.audit.schedule == resident.audit.schedule
        assert their_ids == ids
        assert all(map(torch.equal, their_logits, logits)), layout
        assert (driver.engine.kv.counters.h2d_bytes > 0) == (layout == "stream")
