"""One line of the log every ten seconds while there is work, in vLLM's words."""

from __future__ import annotations

import asyncio
import logging
import time

from nanoengine.api.stats import EngineStats
from nanoengine.errors import EngineClosedError
from nanoengine.serving.engine import Engine

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


async def report(llm: Engine) -> None:
    """Log what the engine does until it ends or the task is cancelled; nothing while it is idle."""
    try:
        before, then = await llm.stats(), time.monotonic()
        while True:
            await asyncio.sleep(INTERVAL_S)
            stats, now = await llm.stats(), time.monotonic()
            if _progress(stats) != _progress(before) or stats.num_running or stats.num_waiting:
                logger.info("%s", line(before, stats, now - then))
            before, then = stats, now
    except EngineClosedError:
        return


def _progress(stats: EngineStats) -> tuple[int, int]:
    return stats.num_prompt_tokens, stats.num_output_tokens


def line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """What happened between two moments `seconds` apart."""
    num_in = now.num_prompt_tokens - before.num_prompt_tokens
    num_out = now.num_output_tokens - before.num_output_tokens
    num_looked_up = now.num_looked_up_tokens - before.num_looked_up_tokens
    num_cached = now.num_cached_tokens - before.num_cached_tokens
    parts = [
        f"Avg prompt throughput: {num_in / seconds:.1f} tokens/s",
        f"Avg generation throughput: {num_out / seconds:.1f} tokens/s",
        f"Running: {now.num_running} reqs",
        f"Waiting: {now.num_waiting} reqs",
        f"Preemptions: {now.num_preemptions - before.num_preemptions}",
        f"KV cache usage: {now.device.num_used / now.device.num_blocks:.1%}",
        f"Prefix cache hit rate: {num_cached / max(1, num_looked_up):.1%}",
    ]
    if now.host is not None:
        mb = (now.h2d_bytes - before.h2d_bytes) / 1e6, (now.d2h_bytes - before.d2h_bytes) / 1e6
        stalls = now.num_stalls - before.num_stalls
        parts += [
            f"Host KV usage: {now.host.num_used / now.host.num_blocks:.1%}",
            f"Copies: {mb[0] / seconds:.1f} MB/s in, {mb[1] / seconds:.1f} MB/s out, "
            f"{stalls} waited for",
        ]
    return ", ".join(parts)
