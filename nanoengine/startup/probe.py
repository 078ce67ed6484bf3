"""Measures the cost of a decode step when an engine with offload starts.

Runs steps of the engine's own model runner over random KV at three sizes: hardly any KV, some
blocks on the device, some on the host. The differences give the cost of a block on each tier, and
with it the speed that the plan predicts.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from nanoengine.config.engine import EngineConfig
from nanoengine.devices.device import Device
from nanoengine.devices.waiting import WaitingShare
from nanoengine.kv.kv_cache import HybridKVCacheManager
from nanoengine.kv.kv_codec import encoded
from nanoengine.kv.kv_memory import KVMemory
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.outputs import RequestMetrics
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Admission, Request, ScheduledBatch, ScheduledSequence, Sequence
from nanoengine.startup.plan import MemoryPlan

NUM_BLOCKS = 32
MAX_BYTES = 3 << 28  # with one more block this fits the first segment of the host pool
NUM_ROUNDS = 3
NUM_WARMUPS = 2
NUM_STEPS = 8
BUDGET_S = 1.0  # after that much time no more steps are measured
# Where a thread waits so long for a processor, a step may take seconds: none is begun.
TRY_S, MAX_WAITING = 0.1, 0.5
# MiB a step beside resident decodes, where nothing is measured: 3 ms of a link of 12 GB/s.
UNMEASURED_MIB_PER_STEP = 32.0
PROBE_ID = -1
GREEDY = SamplingParams(temperature=0)
logger = logging.getLogger(__name__)


class Runner(Protocol):
    """The engine's ModelRunner, as far as start-up knows it."""

    def run(self, batch: ScheduledBatch) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class DecodeCosts:
    """Seconds of a decode step of one request: the step itself, and each block on each tier.

    is_overlapped: host blocks are copied while the device computes, and the longer time counts.
    """

    step_s: float
    device_block_s: float
    host_block_s: float
    is_overlapped: bool = False

    def tokens_per_s(self, num_blocks: int, device_blocks: int) -> float:
        """Predicted tokens per second of one request with `num_blocks` blocks of context."""
        on_device = min(num_blocks, device_blocks)
        on_host = num_blocks - on_device
        computing = self.step_s + on_device * self.device_block_s
        streaming = on_host * self.host_block_s
        return 1 / (max(computing, streaming) if self.is_overlapped else computing + streaming)


def measure_decode(
    runner: Runner, kv: HybridKVCacheManager, device: Device, max_blocks: int, waiting: WaitingShare
) -> DecodeCosts | None:
    """Time decode steps and free their KV. max_blocks: the most blocks of one request.

    After BUDGET_S it measures no more rounds, and in the first one a single step of each size; if
    other programs use the processor it gives up then, and returns None. The first step is none of
    these: it may compile or load what the later ones run.
    """
    most = max(1, min(NUM_BLOCKS, MAX_BYTES // kv.spec.block_bytes, max_blocks - 1))
    resident = min(most, kv.spec.num_blocks - 1)
    streamed = max(1, min(most, kv.spec.num_host_blocks - 1))
    sizes = [(1, False), (1 + resident, False), (1 + streamed, True)]
    times: list[list[float]] = [[], [], []]
    time_steps(runner, kv, device, [(1 + streamed) * kv.spec.block_size], True, deadline=0.0)
    deadline = time.perf_counter() + BUDGET_S
    for _ in range(NUM_ROUNDS):  # sizes alternate, so that a slow moment hits all of them
        for seconds, (num_blocks, on_host) in zip(times, sizes, strict=True):
            if not seconds and time.perf_counter() > deadline and waiting.is_long():
                return None
            lengths = [num_blocks * kv.spec.block_size]
            seconds += time_steps(runner, kv, device, lengths, on_host, deadline)
        if time.perf_counter() > deadline:
            break
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
    deadline: float = math.inf,
) -> list[float]:
    """Seconds of decode steps of one batch over random KV of `lengths` tokens, which is freed
    afterwards. Empty if the KV does not fit. deadline: of time.perf_counter(); after it no further
    step is begun, but one is timed.
    """
    seqs = [probe_sequence(PROBE_ID - i, num_tokens) for i, num_tokens in enumerate(lengths)]
    kv.reset_budget()
    try:
        if any(kv.admit(seq) is not Admission.ADMITTED for seq in seqs):
            return []
        for seq in seqs:
            fill_random(kv, seq, on_host)
        batch = ScheduledBatch(tuple(ScheduledSequence(seq, 1) for seq in seqs))
        # With one device slot free, host blocks stay where they are.
        with kv.blocks.device.all_taken_but(1) if on_host else nullcontext():
            times = [_step(runner, device, batch)]
            while len(times) < NUM_WARMUPS + NUM_STEPS and time.perf_counter() < deadline:
                times.append(_step(runner, device, batch))
            return times[min(NUM_WARMUPS, len(times) - 1) :]
    finally:
        for seq in seqs:
            kv.deallocate(seq)
        kv.reset_counters()


def probe_sequence(
    seq_id: int, num_tokens: int, params: SamplingParams = GREEDY, num_prompt: int | None = None
) -> Sequence:
    """A sequence of `num_tokens` equal tokens, all of them of the prompt or the first
    `num_prompt`; it may generate without end.
    """
    return Sequence(
        seq_id=seq_id,
        token_ids=[0] * num_tokens,
        num_prompt_tokens=num_tokens if num_prompt is None else num_prompt,
        request=Request(params, seed=0, stop_token_ids=frozenset(), max_total_tokens=1 << 30),
        metrics=RequestMetrics(time.perf_counter()),
    )


def _step(runner: Runner, device: Device, batch: ScheduledBatch) -> float:
    start = time.perf_counter()
    runner.run(batch)
    device.synchronize()
    return time.perf_counter() - start


def fill_random(kv: HybridKVCacheManager, seq: Sequence, on_host: bool) -> None:
    """Give an admitted sequence random KV for all its tokens but the last, on one tier."""
    pool, offload, size = kv.memory.pool, kv.memory.offload, kv.spec.block_size
    values = [torch.randn(p.shape[1:], dtype=torch.float32, device=p.device) for p in pool]
    if on_host and offload is not None and offload.codec is not None:
        values = [encoded(offload.codec, each.cpu().to(kv.spec.dtype)) for each in values]
    table = kv.tables[seq.seq_id]
    table.commit(seq.num_tokens - 1)
    table.start_at(-(-seq.num_tokens // size) - len(table.blocks))
    for index, block in enumerate(table.held, table.num_released):
        block.num_tokens = max(0, min(size, seq.num_computed - index * size))
        if not block.num_tokens:
            break
        slot = (kv.blocks.host if on_host else kv.blocks.device).allocate()
        assert slot is not None, "no free slot for random KV"
        for layer, of_layer in enumerate(values):
            if on_host and offload is not None:
                offload.host.block(layer, slot).copy_(of_layer)
            else:
                pool[layer][slot].copy_(of_layer)
        if on_host:
            block.host_slot, block.host_len = slot, block.num_tokens
        else:
            block.device_slot = slot


def predict_speed(
    plan: MemoryPlan,
    config: EngineConfig,
    runner: Runner,
    kv: HybridKVCacheManager,
    device: Device,
    link_speeds: Callable[[KVMemory], list[float]],
) -> tuple[MemoryPlan, DecodeCosts | None]:
    """The plan with what was measured of decode steps, and their costs; None if nothing was, as
    other programs use the processor or nobody wants it.

    link_speeds: GB/s of each rank's copies from host blocks into its ring, all at once.
    """
    spec, costs = plan.kv, None
    if config.measure_speed:
        logger.info(
            "measuring decode steps for about %.0f s (measure_speed=False leaves it out)", BUDGET_S
        )
        num_blocks = min(spec.max_held_blocks, -(-plan.max_model_len // spec.block_size))
        if kv.memory.offload is not None:
            kv.memory.offload.host.segment(0, 0)  # the thread that allocates it is no other program
        waiting = WaitingShare()
        if not is_taken(waiting):
            costs = measure_decode(runner, kv, device, num_blocks, waiting)
        if costs is None:
            plan = replace(plan, is_slowed=True)
        else:
            plan = replace(
                plan,
                link_gb_per_s=tuple(link_speeds(kv.memory)),
                decode_tokens_per_s=costs.tokens_per_s(num_blocks, spec.num_blocks),
                is_slowed=waiting.is_long(),
            )
    kv.memory.allocate_rest()  # any earlier, this would disturb the timing
    kv.memory.poison_all()
    return replace(plan, stream_blocks_per_step=stream_budget(config, spec, costs)), costs


def is_taken(waiting: WaitingShare) -> bool:
    """Whether other programs use so much of the processor that steps should not be measured."""
    factor = torch.ones(256, 256)
    end = time.perf_counter() + TRY_S
    while time.perf_counter() < end:
        factor @ factor
    return waiting.now() > MAX_WAITING


def stream_budget(config: EngineConfig, spec: KVSpec, costs: DecodeCosts | None) -> int | None:
    """Blocks that may be streamed per step beside resident decodes; None if nothing streams.

    Default: the blocks that take 0.6 of the time of a step of one short request, so that short
    requests decode at half their speed at worst (a streamed step costs more than its blocks alone).
    Without costs: UNMEASURED_MIB_PER_STEP.
    """
    if not spec.slot_blocks:
        return None
    mib = config.stream_mib_per_step
    if mib is None and costs is not None:
        if not costs.host_block_s:
            return spec.num_host_blocks
        return max(1, int(0.6 * costs.step_s / costs.host_block_s))
    num_bytes = (UNMEASURED_MIB_PER_STEP if mib is None else mib) * (1 << 20)
    return max(1, int(num_bytes) // spec.load_bytes)


def measure_copy(memory: KVMemory) -> float:
    """GB/s of copies from host blocks into the ring; 0 without a ring."""
    offload, device = memory.offload, memory.device
    if offload is None or not offload.slot_blocks:
        return 0.0
    copies = _ring_copies(offload.ring.of_layer(0), offload.host.segment(0, 0))
    best = float("inf")
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        for dst, src in copies:
            offload.fetch(dst, src)
        device.compute.wait(device.h2d.record())
        device.synchronize()
        best = min(best, time.perf_counter() - start)
    num_tokens = sum(len(src) for _, src in copies) * memory.block_size
    return num_tokens * offload.loaded_bytes[0] / best / 1e9


def _ring_copies(ring: tuple[Tensor, ...], host: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pairs of (part of a ring slot, host blocks) to copy; host: a layer of a host segment."""
    num_blocks = min(NUM_BLOCKS, len(host))
    width = min(len(ring[0]), num_blocks)
    host[:num_blocks] = 0  # memory never written reads faster than real KV
    starts = range(0, num_blocks - width + 1, width)
    return [(ring[i % len(ring)][:width], host[at : at + width]) for i, at in enumerate(starts)]
