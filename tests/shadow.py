"""Requests over the real scheduler and KV manager without a model: KV checked by value.

The "keys" of a token are a rolling hash of all tokens up to it, and the next token is drawn from
the same hash. So every read tells whether it is the right block of the right sequence, delivered
whole, and every answer can be computed with a plain loop. A step has next to no maths in it, which
makes long random runs cheap.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanoengine.config import EngineConfig
from nanoengine.context import KVChunk
from nanoengine.device import make_device
from nanoengine.kv_cache import HybridKVCacheManager, KVSpec, StepKV
from nanoengine.sampling_params import SamplingParams
from nanoengine.scheduler import Scheduler
from nanoengine.sequence import RequestMetrics, ScheduledBatch
from nanoengine.sequence import Sequence as EngineSequence
from nanoengine.stream_check import CheckedDevice

NUM_LAYERS = 3
VOCAB = 5  # few tokens: equal beginnings happen by themselves
MODULUS = 1 << 22  # exact in float32


class Boom(Exception):
    """A step that was told to fail."""


def prefix_hashes(token_ids: Sequence[int], start: int = 0) -> list[int]:
    """For each token the hash of all tokens up to it."""
    return list(
        itertools.accumulate(token_ids, lambda h, t: (h * 1_000_003 + t + 1) % MODULUS, initial=1)
    )[1 + start :]


def answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What a right engine generates."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(prefix_hashes(tokens)[-1]))
    return tokens[len(prompt) :]


def next_token(prefix_hash: int) -> int:
    return prefix_hash // 7 % VOCAB


@dataclass
class ShadowEngine:
    """Scheduler and HybridKVCacheManager around `run`, which checks every read by value."""

    device_blocks: int
    host_blocks: int = 0
    ring_slots: int = 0
    slot_blocks: int = 0
    block_size: int = 4
    spare_blocks: int = 1
    prefix_caching: bool = True
    max_delay_s: float = 0.0
    settings: dict[str, int] = field(default_factory=dict)
    finished: dict[int, EngineSequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "decode_reserve_blocks": 0}
        config = EngineConfig("shadow", **(defaults | self.settings))
        spec = KVSpec(
            NUM_LAYERS,
            self.device_blocks,
            self.block_size,
            1,
            2,
            torch.float32,
            self.host_blocks,
            self.ring_slots,
            self.slot_blocks,
            self.spare_blocks,
        )
        workers = bool(self.slot_blocks)
        self.device = CheckedDevice(make_device("cpu", 1, workers, self.max_delay_s))
        reserve = config.decode_reserve_blocks
        self.kv = HybridKVCacheManager(spec, self.device, self.prefix_caching, reserve, debug=True)
        self.scheduler = Scheduler(config, self.kv, config.max_num_batched_tokens)
        self.num_steps = 0
        self._ids = itertools.count()

    def add(self, prompt: list[int], num_tokens: int) -> int:
        """Queue a request; raises PromptTooLongError as the engine does."""
        self.kv.check_fits(len(prompt), num_tokens)
        seq_id = next(self._ids)
        total = len(prompt) + num_tokens
        params = SamplingParams(max_tokens=num_tokens)
        metrics = RequestMetrics(0.0)
        self.scheduler.add(
            EngineSequence(
                seq_id, list(prompt), len(prompt), params, 0, frozenset(), total, metrics
            )
        )
        return seq_id

    def step(self, fail_at: tuple[int, int] | None = None) -> None:
        """One step; with `fail_at` = (layer, chunk) it raises Boom when it has come so far."""
        batch = self.scheduler.schedule()
        assert batch.items or not self.scheduler.has_work, "no request can go on"
        self.num_steps += 1
        if batch.items:
            try:
                tokens = self.run(batch, fail_at)
            finally:
                self.kv.check()
            for seq in self.scheduler.postprocess(batch, tokens):
                self.finished[seq.seq_id] = seq
        self.kv.check()

    def abort(self, seq_id: int) -> None:
        self.scheduler.abort([seq_id])
        self.kv.check()

    def drain(self) -> None:
        """Step until nothing is left; every answer must be right."""
        while self.scheduler.has_work:
            self.step()
            assert self.num_steps < 20_000, "no progress"
        for seq in self.finished.values():
            expected = answer(seq.token_ids[: seq.num_prompt_tokens], seq.num_output_tokens)
            assert seq.output_token_ids == expected
            assert seq.num_tokens == seq.max_total_tokens

    def run(self, batch: ScheduledBatch, fail_at: tuple[int, int] | None = None) -> list[int]:
        """What ModelRunner does, with hashes for keys."""
        hashes = [
            prefix_hashes(item.seq.token_ids[: item.seq.num_computed + item.num_tokens])
            for item in batch.items
        ]
        fresh = [
            h
            for item, all_of_it in zip(batch.items, hashes, strict=True)
            for h in all_of_it[item.seq.num_computed :]
        ]
        step = self.kv.begin(batch)
        try:
            for layer in range(NUM_LAYERS):
                self._layer(layer, step, fresh, hashes, fail_at)
        finally:
            step.end()
        return [
            next_token(all_of_it[-1])
            for item, all_of_it in zip(batch.items, hashes, strict=True)
            if item.samples
        ]

    def _layer(
        self,
        layer: int,
        step: StepKV,
        fresh: list[int],
        hashes: list[list[int]],
        fail_at: tuple[int, int] | None,
    ) -> None:
        keys = rows(fresh, layer)
        step.write(layer, keys, -keys)
        seen = [0] * len(hashes)
        for number, chunk in enumerate(step.read(layer)):
            if fail_at == (layer, number):
                raise Boom
            self._check_chunk(layer, chunk, hashes, seen)
        blocks = [-(-len(h) // self.block_size) for h in hashes]
        assert seen == blocks, "a block was not read, or twice"

    def _check_chunk(
        self, layer: int, chunk: KVChunk, hashes: list[list[int]], seen: list[int]
    ) -> None:
        size = self.block_size
        indices, firsts = chunk.seq_index.tolist(), chunk.first_block.tolist()
        counts, tables = chunk.num_blocks.tolist(), chunk.block_table.tolist()
        for index, first, count, table in zip(indices, firsts, counts, tables, strict=True):
            assert first == seen[index], "blocks out of order"
            seen[index] += count
            for offset, block in enumerate(table[:count]):
                position = (first + offset) * size
                expected = rows(hashes[index][position : position + size], layer)
                valid = len(expected)
                assert torch.equal(chunk.k[block, :valid], expected), "wrong keys"
                assert torch.equal(chunk.v[block, :valid], -expected), "wrong values"

    def close(self) -> None:
        self.kv.close()


def rows(hashes: list[int], layer: int) -> Tensor:
    """[tokens, 1, 2]: hash and layer."""
    return torch.tensor([[[float(h), float(layer)]] for h in hashes]).view(len(hashes), 1, 2)
