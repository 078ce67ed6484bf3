"""Requests over the real scheduler and KV manager without a model: KV checked by value.

The "keys" of a token are a rolling hash of all tokens up to it, and the next token is drawn from
the same hash. So every read tells whether it is the right block of the right sequence, delivered
whole, and every answer can be computed with a plain loop. A step has next to no maths in it, which
makes long random runs cheap.

Between steps `ShadowEngine.check` compares all KV that anybody can still reach, in tables and in
the prefix cache, on both tiers, with what it must be.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from nanoengine.config.engine import EngineConfig
from nanoengine.context import KVChunk
from nanoengine.devices.copy_streams import Convert, Event, InlineStream, WorkerEvent, WorkerStream
from nanoengine.devices.cpu import CpuDevice
from nanoengine.devices.device import Device
from nanoengine.devices.stream_check import CheckedDevice
from nanoengine.engine.scheduler import Scheduler
from nanoengine.kv.block_manager import Block
from nanoengine.kv.host_pool import HostPool
from nanoengine.kv.kv_cache import HybridKVCacheManager
from nanoengine.kv.kv_memory import KVMemory
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.kv.open_step import OpenStep
from nanoengine.kv.step_kv import StepKV
from nanoengine.kv.step_plan import StepPlan
from nanoengine.outputs import RequestMetrics
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Request, ScheduledBatch, ScheduledSequence, SequenceStatus
from nanoengine.sequence import Sequence as EngineSequence
from nanoengine.workers.step_record import StepRecord, decode, encode

NUM_LAYERS = 3
VOCAB = 5  # few tokens: equal beginnings happen by themselves
MODULUS = 1 << 22  # exact in float32
COPIES = ("inline", "threads", "held")


class Boom(Exception):
    """A step that was told to fail."""


def extended(hashes: Sequence[int], token_ids: Sequence[int], salt: str = "") -> list[int]:
    """For each token the hash of the salt and all tokens up to it; those before have `hashes`."""
    before = hashes[-1] if hashes else 1 + crc32(salt.encode()) % MODULUS
    return list(
        itertools.accumulate(
            token_ids, lambda h, t: (h * 1_000_003 + t + 1) % MODULUS, initial=before
        )
    )[1:]


def answer(prompt: Sequence[int], num_tokens: int, salt: str = "") -> list[int]:
    """What a right engine generates."""
    tokens = list(prompt)
    hashes = extended([], prompt, salt)
    for _ in range(num_tokens):
        tokens.append(next_token(hashes[-1]))
        hashes += extended(hashes, tokens[-1:])
    return tokens[len(prompt) :]


def next_token(prefix_hash: int) -> int:
    return prefix_hash // 7 % VOCAB


# -- copies that come as late as events allow


class HeldEvent(WorkerEvent):
    """An event of a HeldStream: who waits for it makes the stream go on up to it."""

    def __init__(self, stream: HeldStream) -> None:
        super().__init__()
        self._stream = stream
        self.block = self._proceed

    def _proceed(self) -> None:
        while not self.is_done():
            self._stream.proceed()


class HeldStream:
    """Work that nobody does until somebody waits for it: no thread, no chance, no early copy.

    Together with inline copies, which come as early as can be, this makes a missing wait show as
    a wrong value every time.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.work: deque[Callable[[], None] | HeldEvent] = deque()
        self._inline = InlineStream(name)
        self.copies = self._inline.copies
        self.take_failed = self._inline.take_failed
        self._is_busy = False

    def copy(
        self, dst: Tensor, src: Tensor, owner: object = None, convert: Convert | None = None
    ) -> None:
        """See device.Stream."""
        self.work.append(partial(self._inline.copy, dst, src, owner, convert))

    def fill(self, dst: Tensor, value: float) -> None:
        """See device.Stream."""
        self.work.append(partial(self._inline.fill, dst, value))

    def record(self) -> HeldEvent:
        """See device.Stream."""
        event = HeldEvent(self)
        self.work.append(event)
        return event

    def wait(self, event: Event) -> None:
        """See device.Stream."""
        self.work.append(partial(self._inline.wait, event))

    def proceed(self) -> None:
        """Do the next piece of work."""
        assert not self._is_busy, "streams wait for each other"
        work = self.work.popleft()
        if isinstance(work, HeldEvent):
            work.set()
        else:
            self._is_busy = True
            work()
            self._is_busy = False


class HeldDevice(CpuDevice):
    """A CPU whose copies are held."""

    def __init__(self) -> None:
        super().__init__(1)
        self.held = [HeldStream("h2d"), HeldStream("d2h")]
        self.h2d, self.d2h = self.held

    def synchronize(self) -> None:
        """See CpuDevice."""
        for stream in self.held:
            self.compute.wait(stream.record())

    def close_streams(self) -> None:
        """See device.Device."""
        self.synchronize()


# -- copies that fail


class Faults:
    """Makes chosen copies of a stream fail, as if the link had."""

    def __init__(self, stream: InlineStream | WorkerStream | HeldStream) -> None:
        self.victims: set[int] = set()
        self._stream = stream
        self._copy = stream.copy
        self._countdown = 0
        stream.copy = self._faulty_copy

    def arm(self, number: int) -> None:
        """The copy with this number from here on, 1 is the next, is going to fail."""
        self._countdown = number

    def untold(self) -> set[int]:
        """Blocks of copies that have failed and of which the engine was not told yet."""
        return {number for failed in self._stream.copies._failed for number in failed.owner}

    def _faulty_copy(
        self, dst: Tensor, src: Tensor, owner: tuple[int, ...], convert: Convert | None = None
    ) -> None:
        self._countdown -= 1
        if not self._countdown:
            self.victims.update(owner)
            src = torch.empty(13)  # broadcasts to no block
        self._copy(dst, src, owner, convert)


@dataclass
class ShadowEngine:
    """Scheduler and HybridKVCacheManager around `run`, which checks every read by value.

    copies: one of COPIES; None is "threads" where there is a ring and "inline" where there is none.
    max_delay_s is for threads only.
    """

    device_blocks: int
    host_blocks: int = 0
    ring_slots: int = 0
    slot_blocks: int = 0
    block_size: int = 4
    spare_blocks: int = 1
    prefix_caching: bool = True
    max_delay_s: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    finished: dict[int, EngineSequence] = field(default_factory=dict)
    copies: str | None = None
    stream_blocks_per_step: int | None = None
    least_run_bytes: int = 0
    drafts_from: int = 0
    takes_turns: bool = False

    def __post_init__(self) -> None:
        defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "decode_reserve_blocks": 0}
        self.config = EngineConfig("shadow", **(defaults | self.settings))
        spec = KVSpec(
            ((1, 2),) * NUM_LAYERS,
            self.device_blocks,
            self.block_size,
            torch.float32,
            self.host_blocks,
            self.ring_slots,
            self.slot_blocks,
            self.spare_blocks,
            least_run_bytes=self.least_run_bytes,
            drafts_from=self.drafts_from,
        )
        self.copies = self.copies or ("threads" if self.slot_blocks else "inline")
        held = self.copies == "held"
        self.cpu = HeldDevice() if held else CpuDevice(1, self._has_threads, self.max_delay_s)
        self.device = CheckedDevice(self.cpu)
        reserve = self.config.decode_reserve_blocks
        self.kv = HybridKVCacheManager(
            spec,
            self.device,
            self.prefix_caching,
            reserve,
            debug=True,
            make_memory=self.make_memory,
        )
        self.scheduler = Scheduler(
            self.config,
            self.kv,
            self.config.max_num_batched_tokens,
            self.stream_blocks_per_step,
            self.takes_turns,
        )
        self.faults = {s.name: Faults(s) for s in (self.cpu.h2d, self.cpu.d2h)}
        self.num_steps = 0
        self.num_moved = dict.fromkeys(("stores", "loads", "fills"), 0)
        self._ids = itertools.count()
        self._hashes: dict[int, list[int]] = {}  # of each unfinished sequence
        self._content: dict[Block, list[int]] = {}  # what each reachable block must hold
        self._salts = {b"": ""}  # what stands for a salt in a block's key -> the salt
        self._misread: set[int] = set()  # who read anything else in this step, by place in it

    def make_memory(self, spec: KVSpec, device: Device, debug: bool) -> KVMemory:
        """See Ranks.make_memory; here there is one rank."""
        return KVMemory(spec, device, debug)

    # -- requests

    def add(self, prompt: list[int], num_tokens: int, salt: str = "") -> int:
        """Queue a request; raises PromptTooLongError as the engine does."""
        self.kv.spec.check_fits(len(prompt), num_tokens, lambda asked: "")
        seq_id = next(self._ids)
        total = len(prompt) + num_tokens
        params = SamplingParams(max_tokens=num_tokens)
        request = Request(params, 0, frozenset(), total, cache_salt=salt)
        metrics = RequestMetrics(0.0)
        seq = EngineSequence(seq_id, list(prompt), len(prompt), request, metrics)
        if salt:
            self._salts[sha256(salt.encode()).digest()] = salt
        self.equip(seq)
        self.scheduler.add(seq)
        return seq_id

    def equip(self, seq: EngineSequence) -> None:
        """Give a request what guesses for it; here it has nothing."""

    @property
    def unfinished(self) -> list[EngineSequence]:
        """Running sequences, oldest first, then waiting ones in order."""
        return [*self.scheduler.running, *self.scheduler.waiting]

    def step(
        self, fail_at: tuple[int, int] | None = None, fail_draft_at: tuple[int, int] | None = None
    ) -> ScheduledBatch:
        """One step; with `fail_at` = (layer, chunk) it raises Boom when it has come so far, and so
        with `fail_draft_at` = (layer, number of a draft).
        """
        batch = self.scheduler.schedule()
        self._check_batch(batch)
        self.num_steps += 1
        if batch.items:
            try:
                batch, tokens, following = self.run(batch, fail_at, fail_draft_at)
            except Boom:
                self.check()
                raise
            self._learn(batch)
            failed = self._take_failures(batch)
            for seq in self.scheduler.postprocess(batch, tokens, failed, following):
                self._hashes.pop(seq.seq_id, None)
                self.finished[seq.seq_id] = seq
        self.check()
        return batch

    def abort(self, seq_id: int) -> None:
        """End a request wherever it is; what it has generated so far must be right."""
        for seq in self.scheduler.abort(s for s in self.unfinished if s.seq_id == seq_id):
            self._hashes.pop(seq.seq_id, None)
            check_answer(seq)
        self.check()

    def drain(self, step: Callable[[], object] | None = None) -> None:
        """Step until nothing is left; every answer must be right. `step`: instead of self.step."""
        stuck, before, last = 0, (-1, -1), self.num_steps + 20_000
        while self.scheduler.has_work:
            limit = self._most_steps_without_a_turn()
            (step or self.step)()
            oldest = self.scheduler.running[0] if self.scheduler.running else None
            now = (oldest.seq_id, oldest.num_computed) if oldest else (-1, -1)
            stuck = stuck + 1 if oldest and now == before else 0
            assert stuck < limit, "the oldest request stands still"
            assert self.num_steps < last, "no progress"
            before = now
        for seq in self.finished.values():
            check_answer(seq)
            assert seq.num_tokens == seq.request.max_total_tokens or seq.output.error

    def _most_steps_without_a_turn(self) -> int:
        """The oldest is computed at least every other step; where the link has a budget, when all
        others have had their turns, each of which may have to be saved up for.
        """
        if self.stream_blocks_per_step is None:
            return 2
        steps_a_turn = -(-self.kv.spec.capacity_blocks // self.stream_blocks_per_step)
        return 2 + steps_a_turn * len(self.unfinished)

    def settle(self) -> None:
        """Wait for all copies, and check both tiers."""
        self.device.synchronize()
        self.check(settled=True)

    @property
    def num_held(self) -> int:
        """Copies and waits that are queued and have not begun (held copies only)."""
        return sum(len(s.work) for s in self.cpu.held) if isinstance(self.cpu, HeldDevice) else 0

    @property
    def is_idle(self) -> bool:
        """True when no copy is queued and no thread is there to make one."""
        offload = self.kv.memory.offload
        is_taking = offload is not None and offload.host._thread.is_alive()
        return not (self.num_held or self.cpu._workers or is_taking)

    def close(self) -> None:
        """Let copies end and free all pools."""
        self.kv.close()

    # -- a step

    def run(
        self,
        batch: ScheduledBatch,
        fail_at: tuple[int, int] | None = None,
        fail_draft_at: tuple[int, int] | None = None,
    ) -> tuple[ScheduledBatch, list[int], list[int]]:
        """What ModelRunner does, with hashes for keys: the batch with its drafts, what it samples,
        and what the MTP head guesses after that.
        """
        self._misread = set()
        step = self.kv.open_step(batch)
        check_record(step.kv.plan)
        for kind in self.num_moved:
            self.num_moved[kind] += len(getattr(step.kv.plan.transfers, kind))
        try:
            batch = self.draft(batch, step, fail_draft_at)
            hashes = [self._hashes_of(item) for item in batch.items]
            each = zip(batch.items, hashes, strict=True)
            fresh = [h for item, all_of_it in each for h in all_of_it[item.start :]]
            layers = self.forward(step.kv, fresh, hashes, fail_at)
            batch = self.draft_between(batch, step, layers, fail_draft_at)
            deque(layers, maxlen=0)
            self.report(step.block_mass)
            step.mark_written()
        finally:
            step.close()
        each = zip(batch.items, hashes, strict=True)
        last = [
            h for item, all_of_it in each for h in all_of_it[len(all_of_it) - item.num_samples :]
        ]
        return batch, [*map(next_token, last)], self.guess(last)

    def forward(
        self, kv: StepKV, fresh: list[int], hashes: list[list[int]], fail_at: tuple[int, int] | None
    ) -> Iterator[None]:
        """The layers of a step. fresh: hashes of its tokens; hashes: all that each item reads."""
        for layer in range(NUM_LAYERS):
            self.layer(layer, kv, fresh, hashes, fail_at)
            yield

    def draft(
        self, batch: ScheduledBatch, step: OpenStep, fail_at: tuple[int, int] | None
    ) -> ScheduledBatch:
        """The batch with its drafts; here it has none."""
        assert not batch.num_drafts
        return batch

    def draft_between(
        self,
        batch: ScheduledBatch,
        step: OpenStep,
        layers: Iterator[None],
        fail_at: tuple[int, int] | None,
    ) -> ScheduledBatch:
        """The same for those who are not in the step; here nobody drafts."""
        assert not batch.resting
        return batch

    def guess(self, hashes: list[int]) -> list[int]:
        """What the head guesses after each token that is sampled, of which these are the hashes
        before; here there is none.
        """
        return []

    def report(self, mass: Tensor | None) -> None:
        """What attention says of the step; here nobody asks."""
        assert mass is None

    def _hashes_of(self, item: ScheduledSequence) -> list[int]:
        """Those of all tokens that a step reads: the item's guesses come after what is known."""
        known = self.hashes(item.seq)[: item.start + item.num_tokens]
        return known + extended(known, item.guesses)

    def hashes(self, seq: EngineSequence) -> list[int]:
        """The hashes of all tokens of `seq`, which only ever grow."""
        known = self._hashes.setdefault(seq.seq_id, [])
        known += extended(known, seq.token_ids[len(known) :], seq.request.cache_salt)
        return known

    def _take_failures(self, batch: ScheduledBatch) -> dict[int, str]:
        """Whom the engine says to have failed: all that read wrong KV, and nobody without cause."""
        failed = self.kv.take_failures(batch)
        for seq_id, reason in failed.items():
            ids = {block.block_id for block in self.kv.tables[seq_id].blocks}
            assert reason and not self.victims.isdisjoint(ids)
        for index, item in enumerate(batch.items):
            assert index not in self._misread or item.seq.seq_id in failed, "wrong keys, not told"
        return failed

    @property
    def victims(self) -> set[int]:
        """All blocks that ever were in a copy that failed."""
        return set().union(*(faults.victims for faults in self.faults.values()))

    def layer(
        self,
        layer: int,
        step: StepKV,
        fresh: list[int],
        hashes: list[list[int]],
        fail_at: tuple[int, int] | None,
    ) -> None:
        """One of them."""
        keys = rows(fresh, layer)
        step.target(layer).store(keys, -keys)
        seen = [0] * len(hashes)
        for number, chunk in enumerate(step.read(layer)):
            if fail_at == (layer, number):
                raise Boom("step")
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
            expected = rows(hashes[index][first * size : (first + count) * size], layer)
            valid = len(expected)
            keys = chunk.k[table[:count]].flatten(0, 1)[:valid]
            values = chunk.v[table[:count]].flatten(0, 1)[:valid]
            if not (torch.equal(keys, expected) and torch.equal(values, -expected)):
                assert self.victims, "wrong keys or values"
                self._misread.add(index)

    @property
    def _has_threads(self) -> bool:
        return self.copies == "threads"

    # -- what holds after every step

    def check(self, settled: bool = False) -> None:
        """Raise AssertionError unless everything adds up; `settled`: no copy is under way."""
        self.kv.check()
        self._check_queues()
        self._learn()
        self._check_cache()
        is_still = self.copies == "inline" or (self.copies == "held" and not self.num_held)
        self._check_memory(self.kv.memory, settled or is_still)

    def _check_memory(self, memory: KVMemory, is_still: bool) -> None:
        if memory.pool:  # not closed
            self._check_tier(torch.stack(memory.pool), on_host=False)
            if memory.offload and is_still:
                self._check_tier(host_content(memory.offload.host), on_host=True)

    def _check_batch(self, batch: ScheduledBatch) -> None:
        """What the scheduler may plan; an empty step only when there is nothing to do."""
        assert batch.items or not self.scheduler.has_work, "no request can go on"
        assert batch.num_tokens <= self.config.max_num_batched_tokens
        ids = [item.seq.seq_id for item in batch.items]
        assert len(set(ids)) == len(ids), "a sequence is planned twice"
        for item in batch.items:
            assert item.seq in self.scheduler.running
            num_guesses = len(item.guesses) + item.num_drafts
            assert 0 < item.num_tokens - num_guesses <= item.seq.num_remaining
            assert item.samples or not num_guesses
        resting = [item.seq.seq_id for item in batch.resting]
        assert len({*ids, *resting}) == len(ids) + len(resting), "it rests, and runs"
        for item in batch.resting:
            assert item.seq in self.scheduler.running and item.num_tokens == 1 + item.num_drafts

    def _check_queues(self) -> None:
        """Every sequence is in one queue, and only those that compute hold an open table."""
        tables = self.kv.tables
        running, waiting = self.scheduler.running, self.scheduler.waiting
        ids = [seq.seq_id for seq in self.unfinished]
        assert len(set(ids)) == len(ids), "a sequence is queued twice"
        assert tables.keys() <= set(ids), "a table outlives its sequence"
        assert len(running) <= self.config.max_num_seqs
        assert self.kv._kept.keys() == {seq.seq_id for seq in running}
        for seq in running:
            assert seq.status is SequenceStatus.RUNNING and not tables[seq.seq_id].is_preempted
        for seq in waiting:
            assert seq.status is SequenceStatus.WAITING
            assert seq.seq_id not in tables or tables[seq.seq_id].is_preempted

    def _learn(self, batch: ScheduledBatch | None = None) -> None:
        """Note what each block in a table or in the cache must hold; tables that share must agree.

        With a batch: after its step ran and before it is counted.
        """
        items = {item.seq.seq_id: item for item in batch.items} if batch else {}
        known, size = self._content, self.block_size
        self._content = {block: known[block] for block in self.kv.blocks.cached}
        for seq_id, table in self.kv.tables.items():
            item = items.get(seq_id)
            hashes = self._hashes_of(item) if item else self.hashes(table.seq)
            computed = len(hashes) if item else table.seq.num_computed
            for index, block in enumerate(table.blocks):
                stop = max(block.num_tokens, min(size, computed - index * size))
                content = hashes[index * size : index * size + stop] if stop > 0 else []
                other = self._content.get(block, content)
                shared = min(len(other), len(content))
                assert other[:shared] == content[:shared], "a block of two different prefixes"
                self._content[block] = max(other, content, key=len)

    def _check_cache(self) -> None:
        """A hash points only to a full, computed block, and to the tokens that are in it."""
        manager, tables = self.kv.blocks, self.kv.tables
        assert manager.num_available >= 0, "more blocks are held than there are"
        for block in manager.cached:
            assert not block.ref_count and block.key is not None, "cached, but not findable"
            assert manager.by_digest.get(block.key.digest) is block, "cached, but not findable"
        for digest, block in manager.by_digest.items():
            assert block.key and block.key.digest == digest, "found under another block's hash"
            assert block.num_tokens == self.block_size, "a hash points to a block that is not full"
            if block.parent is None or block.parent.key is not None:
                before = self._content[block.parent] if block.parent else []
                tokens = np.frombuffer(block.key.tokens, np.int32, self.block_size).tolist()
                salt = self._salts[block.key.tokens[4 * self.block_size :]]
                content = extended(before, tokens, salt)
                assert self._content[block] == content, "a hash of other tokens"
        for table in tables.values():
            counted = sum(block.num_tokens for block in table.blocks)
            assert counted == max(table.seq.num_computed, table.num_shared_tokens), (
                "KV is counted that was not computed"
            )
            full = table.seq.num_computed // self.block_size
            assert len(table.published) <= max(full, table.num_shared_tokens // self.block_size)
            assert len(table.published) <= len(table.blocks), "published ahead of time"
        for owner in manager.in_flight.values():
            assert owner in tables and not tables[owner].is_preempted, "nobody keeps this promise"

    def _check_tier(self, pool: Tensor, on_host: bool) -> None:
        """The valid tokens of every reachable block that has a slot on this tier."""
        place = {
            block: (block.host_slot, block.host_len)
            if on_host
            else (block.device_slot, block.num_tokens)
            for block in self._content
        }
        bad = {number for faults in self.faults.values() for number in faults.untold()}
        held = [
            (slot, n, block)
            for block, (slot, n) in place.items()
            if slot is not None and block.block_id not in bad
        ]
        if not held:
            return
        expected = np.full((len(held), self.block_size), np.nan, np.float32)
        for row, (_, num_tokens, block) in zip(expected, held, strict=True):
            row[:num_tokens] = self._content[block][:num_tokens]
        valid = ~np.isnan(expected)
        content = pool.numpy()[:, [slot for slot, _, _ in held]]
        for layer in range(NUM_LAYERS):
            keys, values = content[layer, :, 0, :, 0], content[layer, :, 1, :, 0]
            assert (keys[valid] == -values[valid]).all(), "keys and values apart"
            assert (keys[..., 0][valid] == expected[valid]).all(), (
                "a reachable block holds other KV"
            )
            assert (keys[..., 1][valid] == layer).all(), "KV of another layer"


def check_answer(seq: EngineSequence) -> None:
    """What `seq` has generated so far is what the plain loop generates."""
    prompt = seq.token_ids[: seq.num_prompt_tokens]
    expected = answer(prompt, seq.num_output_tokens, seq.request.cache_salt)
    assert seq.output_token_ids == expected, "a wrong answer"


def host_content(host: HostPool) -> Tensor:
    """A copy of all segments, [layers, blocks, 2, block_size, 1, 2]."""
    segments = range(host.num_segments)
    layers = range(NUM_LAYERS if segments else 0)
    whole = [torch.cat([host.segment(segment, layer) for segment in segments]) for layer in layers]
    return torch.stack(whole) if whole else torch.empty(0)


def rows(hashes: list[int], layer: float) -> Tensor:
    """[tokens, 1, 2]: hash and layer."""
    keys = np.empty((len(hashes), 1, 2), np.float32)
    keys[:, 0, 0], keys[:, 0, 1] = hashes, layer
    return torch.from_numpy(keys)


def check_record(plan: StepPlan) -> None:
    """What other ranks read of a step is what rank 0 planned."""
    record = StepRecord(plan, (), (), (), may_replay=False)
    assert decode(encode(record)) == record
