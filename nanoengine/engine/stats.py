"""EngineStats: where KV lies at this moment, and what crossed the link since start-up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.kv.block_manager import SlotPool

MB = 1e6


@dataclass(frozen=True, slots=True)
class TierUse:
    """KV blocks of one tier: those that unfinished requests hold, cached ones that a later request
    may find, and free ones.
    """

    num_blocks: int
    num_used: int
    num_cached: int
    num_free: int

    def __str__(self) -> str:
        return (
            f"{self.num_used} of {self.num_blocks} blocks in use, {self.num_cached} cached, "
            f"{self.num_free} free"
        )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A moment of an engine; print it to read it.

    tiers: names of device and host. host: None without KV offload. h2d_bytes, d2h_bytes: KV that
    was copied to the device and back. num_stalls: copies that a step had to wait for, num_copies:
    all that a step needed. num_prompt_tokens: of the requests so far; num_cached_tokens: those of
    them that the prefix cache had, num_host_cached_tokens: on the host alone. num_output_tokens:
    generated so far; num_guessed, num_accepted: tokens guessed ahead, and those that were right.
    step_sizes: how many steps computed so many tokens.
    """

    tiers: tuple[str, str]
    device: TierUse
    host: TierUse | None
    num_running: int
    num_waiting: int
    h2d_bytes: int
    d2h_bytes: int
    num_stalls: int
    num_copies: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_host_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_guessed: int
    num_accepted: int
    step_sizes: Mapping[int, int]

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that the prefix cache had, 0 to 1."""
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)

    def __str__(self) -> str:
        lines = [
            f"requests     {self.num_running} running, {self.num_waiting} waiting",
            f"{self.tiers[0]:12} {self.device}",
        ]
        if self.host is not None:
            lines += [
                f"{self.tiers[1]:12} {self.host}",
                f"copies       {self.h2d_bytes / MB:.1f} MB to the device, "
                f"{self.d2h_bytes / MB:.1f} MB back; steps waited for {self.num_stalls} of "
                f"{self.num_copies}",
            ]
        lines.append(
            f"prefix cache {self.num_cached_tokens} of {self.num_prompt_tokens} prompt tokens were "
            f"found ({self.hit_rate:.0%})"
        )
        return "\n".join(lines)


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
