"""Measures, at start-up of an offloading engine, what a decode step costs.

Real steps of the real runner over KV of random numbers, at three sizes: next to nothing, some
blocks on the device, some on the host. What a block costs on each tier follows from the
differences, and from that the speed that the plan predicts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import torch

from nanoengine.config import EngineConfig, ModelConfig
from nanoengine.context import KVChunk, KVTarget
from nanoengine.devices.device import Device
from nanoengine.kv.kv_cache import HybridKVCacheManager
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import (
    Admission,
    RequestMetrics,
    ScheduledBatch,
    ScheduledSequence,
    Sequence,
)
from nanoengine.startup.memory_plan import MemoryPlan, activation_bytes, check_step_fits

NUM_BLOCKS = 32
MAX_BYTES = 3 << 28  # with one block more, within the first piece of the host pool
NUM_ROUNDS = 3
NUM_WARMUPS = 2
NUM_STEPS = 8
PROBE_ID = -1


class Runner(Protocol):
    """What is measured: the engine's ModelRunner."""

    def run(self, batch: ScheduledBatch) -> list[int]:
        """One forward pass; the tokens that the items of the batch sample, in order."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeCosts:
    """Seconds of a decode step of one request: the step itself, and each block on either tier.

    is_overlapped: host blocks come while the device computes, and the longer of both counts.
    """

    step_s: float
    device_block_s: float
    host_block_s: float
    is_overlapped: bool = False

    def tokens_per_s(self, num_blocks: int, device_blocks: int) -> float:
        """Predicted speed of one request with `num_blocks` blocks of context."""
        on_device = min(num_blocks, device_blocks)
        on_host = num_blocks - on_device
        computing = self.step_s + on_device * self.device_block_s
        streaming = on_host * self.host_block_s
        return 1 / (max(computing, streaming) if self.is_overlapped else computing + streaming)


def measure_decode(
    runner: Runner, kv: HybridKVCacheManager, device: Device, max_blocks: int
) -> DecodeCosts:
    """Time decode steps; leaves nothing behind. max_blocks: what one request may have."""
    most = max(1, min(NUM_BLOCKS, MAX_BYTES // kv.spec.block_bytes, max_blocks - 1))
    resident = min(most, kv.spec.num_blocks - 1)
    streamed = max(1, min(most, kv.spec.num_host_blocks - 1))
    sizes = [(1, False), (1 + resident, False), (1 + streamed, True)]
    times: list[list[float]] = [[], [], []]
    for _ in range(NUM_ROUNDS):  # in turns, so that a slow moment does not hit one size alone
        for seconds, (num_blocks, on_host) in zip(times, sizes, strict=True):
            lengths = [num_blocks * kv.spec.block_size]
            seconds += time_steps(runner, kv, device, lengths, on_host)
    step_s, resident_s, streamed_s = (statistics.fmean(each or [0.0]) for each in times)
    device_block_s = max(0.0, resident_s - step_s) / max(1, resident)
    if device.computes_later:
        return DecodeCosts(step_s, device_block_s, streamed_s / streamed, is_overlapped=True)
    return DecodeCosts(step_s, device_block_s, max(0.0, streamed_s - step_s) / streamed)


def time_steps(
    runner: Runner,
    kv: HybridKVCacheManager,
    device: Device,
    lengths: Iterable[int],
    on_host: bool = False,
) -> list[float]:
    """Seconds of decode steps of one batch, over random KV of so many tokens each; leaves nothing
    behind. Empty if they are more than fit.
    """
    seqs = [probe_sequence(PROBE_ID - i, num_tokens) for i, num_tokens in enumerate(lengths)]
    kv.start_step()
    try:
        if any(kv.admit(seq) is not Admission.ADMITTED for seq in seqs):
            return []
        for seq in seqs:
            kv.fill_random(seq, on_host)
        batch = ScheduledBatch(tuple(ScheduledSequence(seq, 1) for seq in seqs))
        with kv.full_device(keep_free=1) if on_host else nullcontext():
            for _ in range(NUM_WARMUPS):
                _step(runner, device, batch)
            return [_step(runner, device, batch) for _ in range(NUM_STEPS)]
    finally:
        for seq in seqs:
            kv.deallocate(seq)
        kv.reset_counters()


def probe_sequence(seq_id: int, num_tokens: int) -> Sequence:
    """A greedy request with a prompt of so many tokens, all the same."""
    return Sequence(
        seq_id=seq_id,
        token_ids=[0] * num_tokens,
        num_prompt_tokens=num_tokens,
        params=SamplingParams(temperature=0),
        seed=0,
        stop_token_ids=frozenset(),
        max_total_tokens=num_tokens + 1,
        metrics=RequestMetrics(time.perf_counter()),
    )


def _step(runner: Runner, device: Device, batch: ScheduledBatch) -> float:
    start = time.perf_counter()
    runner.run(batch)
    device.synchronize()
    return time.perf_counter() - start


class ScratchKV:
    """The KV of one layer, which all layers of a step write and read (model_runner.StepCache)."""

    def __init__(
        self,
        model: ModelConfig,
        size: int,
        dtype: torch.dtype,
        device: Device,
        lengths: list[int],
    ) -> None:
        """size: tokens of a block. lengths: of the sequences, which are new."""
        self.num_rows = len(lengths)
        counts = [-(-length // size) for length in lengths]
        firsts = [*accumulate(counts, initial=0)]
        shape = (firsts[-1], 2, size, model.num_kv_heads, model.head_dim)
        blocks = torch.zeros(shape, dtype=dtype, device=device.torch_device)
        begun = [*zip(firsts, lengths, strict=False)]
        rows = [
            (first + place // size) * 2 * size + place % size
            for first, length in begun
            for place in range(length)
        ]
        slots = device.tensor([rows, [row + size for row in rows]], torch.int64)
        self._target = KVTarget(blocks.flatten(0, 2), slots[0], slots[1])
        tables = [[*range(first, first - (-length // size))] for first, length in begun]
        spans = tuple((index, 0, tuple(table)) for index, table in enumerate(tables))
        padded = [[*table, *[0] * (max(counts) - len(table))] for table in tables]
        k, v = blocks.unbind(1)
        numbers = ([*range(len(lengths))], [0] * len(lengths), counts, padded)
        index, first_block, num_blocks, table = (device.tensor(x, torch.int32) for x in numbers)
        self._chunk = KVChunk(k, v, index, first_block, num_blocks, table, spans, is_last=True)

    def target(self, layer: int) -> KVTarget:
        """See context.KVCache."""
        return self._target

    def replay_key(self) -> None:
        """None: a probe is not replayed."""

    def read(self, layer: int) -> Iterator[KVChunk]:
        """See context.KVCache."""
        yield self._chunk

    def count(self) -> None:
        """Nobody asks what is in it."""

    def end(self) -> None:
        """Nothing is under way."""

    def begin(self, batch: ScheduledBatch) -> ScratchKV:
        """See model_runner.StepCaches."""
        return self


def profile_step(
    make_runner: Callable[[ScratchKV], Runner],
    model: ModelConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    device: Device,
) -> int | None:
    """Bytes that the largest step holds beside weights and KV, from running it: as many tokens and
    requests as may be in one, each sampled in the costliest way. None on a device that does not
    count.
    """
    num_seqs = config.max_num_seqs
    lengths = [config.max_num_batched_tokens // num_seqs] * num_seqs
    lengths[0] += config.max_num_batched_tokens % num_seqs
    params = SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01)
    seqs = [replace(probe_sequence(PROBE_ID, length), params=params) for length in lengths]
    batch = ScheduledBatch(tuple(ScheduledSequence(seq, seq.num_tokens) for seq in seqs))
    scratch = ScratchKV(model, config.kvcache_block_size, dtype, device, lengths)
    return device.peak_bytes_of(lambda: make_runner(scratch).run(batch))


def profiled_bytes(
    make_runner: Callable[[ScratchKV], Runner],
    model: ModelConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    device: Device,
) -> int | None:
    """What the largest step holds beside weights and KV, where the rest is for KV; None where the
    settings or the device make that needless. Raises OutOfMemoryError before such a step is tried
    that cannot fit.
    """
    if config.num_gpu_blocks or config.kv_cache_gib or not device.computes_later:
        return None
    tokens, seqs = config.max_num_batched_tokens, config.max_num_seqs
    estimated = activation_bytes(model, tokens, seqs, dtype.itemsize)
    check_step_fits(config, estimated, device.memory()[0])
    return profile_step(make_runner, model, config, dtype, device)


def predict_speed(
    plan: MemoryPlan,
    config: EngineConfig,
    runner: Runner,
    kv: HybridKVCacheManager,
    device: Device,
) -> tuple[MemoryPlan, DecodeCosts]:
    """The plan with what was measured, and that."""
    spec = plan.kv
    num_blocks = min(spec.most_held, -(-plan.max_model_len // spec.block_size))
    costs = measure_decode(runner, kv, device, num_blocks)
    copy_gb_per_s = measure_copy(device, kv)
    kv.end_probe()
    predicted = replace(
        plan,
        copy_gb_per_s=copy_gb_per_s,
        stream_blocks_per_step=stream_budget(config, spec, costs),
        decode_tokens_per_s=costs.tokens_per_s(num_blocks, spec.num_blocks),
    )
    return predicted, costs


def stream_budget(config: EngineConfig, spec: KVSpec, costs: DecodeCosts) -> int | None:
    """Blocks that may be streamed a step beside resident decodes; None where nothing streams.

    If not set: what takes 0.6 of the time of a step of one short request, so that these decode at
    half their speed at worst (a turn costs more than its blocks do alone).
    """
    if not spec.slot_blocks:
        return None
    if config.stream_mib_per_step is not None:
        return max(1, int(config.stream_mib_per_step * (1 << 20)) // spec.host_block_bytes)
    if not costs.host_block_s:
        return spec.num_host_blocks
    return max(1, int(0.6 * costs.step_s / costs.host_block_s))


def measure_copy(device: Device, kv: HybridKVCacheManager) -> float:
    """GB/s of copies from host blocks into the ring; 0 without a ring."""
    pieces = kv.ring_pieces(NUM_BLOCKS)
    if not pieces:
        return 0.0
    best = float("inf")
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        for dst, src in pieces:
            kv.fetch(dst, src)
        device.compute.wait(device.h2d.record())
        device.synchronize()
        best = min(best, time.perf_counter() - start)
    return sum(src.nbytes for _, src in pieces) / best / 1e9
