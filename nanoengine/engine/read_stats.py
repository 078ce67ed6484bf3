"""Reads the statistics of an engine."""

from __future__ import annotations

from dataclasses import asdict

from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.stats import EngineStats, TierUse
from nanoengine.kv.block_manager import SlotPool


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
        num_cached_tokens=hits.num_cached,
        step_sizes=dict(engine.outputs.step_sizes),
        **asdict(engine.outputs.totals()),
    )


def _use(pool: SlotPool, num_cached: int) -> TierUse:
    used = pool.num_slots - pool.num_free - num_cached
    return TierUse(pool.num_slots, used, num_cached, pool.num_free)
