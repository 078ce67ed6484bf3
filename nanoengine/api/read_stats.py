"""Reads the statistics of an engine, and where its blocks lie."""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import groupby

from nanoengine.api.block_map import BOTH, DEVICE, EMPTY, HOST, MOVING, BlockMap, RequestBlocks
from nanoengine.api.stats import EngineStats, TierUse
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.kv.block_manager import Block, SlotPool
from nanoengine.kv.block_table import BlockTable
from nanoengine.kv.kv_cache import HybridKVCacheManager


def engine_stats(engine: LLMEngine) -> EngineStats:
    """The statistics of this moment."""
    kv, scheduler = engine.kv, engine.scheduler
    blocks, counters, hits = kv.blocks, kv.counters, kv.prefix_hits
    on_device = sum(block.device_slot is not None for block in blocks.cached)
    on_host = sum(block.host_slot is not None for block in blocks.cached)
    return EngineStats(
        tiers=engine.plan.tiers,
        device=_use(blocks.device, on_device),
        host=_use(blocks.host, on_host) if blocks.host.num_slots else None,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        h2d_bytes=counters.h2d_bytes,
        d2h_bytes=counters.d2h_bytes,
        num_stalls=counters.num_stalls,
        num_copies=counters.num_stalls + counters.num_prefetch_hits,
        num_prompt_tokens=hits.num_tokens,
        num_looked_up_tokens=hits.num_looked_up,
        num_cached_tokens=hits.num_cached,
        step_sizes=dict(engine.outputs.step_sizes),
        **asdict(engine.outputs.totals(table.seq for table in kv.tables.values())),
    )


def _use(pool: SlotPool, num_cached: int) -> TierUse:
    used = pool.num_slots - pool.num_free - num_cached
    return TierUse(pool.num_slots, used, num_cached, pool.num_free)


def block_map(engine: LLMEngine) -> BlockMap:
    """Where the blocks of each request lie at this moment."""
    kv = engine.kv
    return BlockMap(
        time.perf_counter(),
        kv.spec.block_size,
        kv.spec.block_bytes,
        engine_stats(engine),
        tuple(_blocks_of(kv, table) for table in kv.tables.values()),
    )


def _blocks_of(kv: HybridKVCacheManager, table: BlockTable) -> RequestBlocks:
    seq = table.seq
    runs = groupby(_place(kv, block) for block in table.held)
    return RequestBlocks(
        number=seq.seq_id,
        status=seq.status.value,
        num_prompt_tokens=seq.num_prompt_tokens,
        num_tokens=seq.num_tokens,
        num_computed=seq.num_computed,
        is_streamed=kv.is_streamed(seq),
        num_guessed=seq.metrics.num_guessed,
        num_accepted=seq.metrics.num_accepted,
        runs=tuple((place, len(list(blocks))) for place, blocks in runs),
    )


def _place(kv: HybridKVCacheManager, block: Block) -> str:
    if not block.num_tokens:
        return EMPTY
    if block.device_slot is None:
        return HOST
    if block.host_slot is None:
        return DEVICE
    offload = kv.memory.offload
    if offload is not None and not offload.stored.are_done((), (block.host_slot,)):
        return MOVING
    return BOTH if block.is_on_host else DEVICE
