"""BlockMap: where the KV blocks of each request lie at this moment.

Imports no torch: a server in another process reads it, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.api.stats import EngineStats

EMPTY, DEVICE, BOTH, MOVING, HOST = "empty", "device", "both", "moving", "host"


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """The blocks of one completion that runs, or that was preempted and keeps them.

    status: "running", "waiting" (preempted) or "paused". num_computed: its tokens that have KV.
    is_streamed: its blocks on the host cross the link in each of its steps. num_guessed,
    num_accepted: tokens that were drafted or guessed for it, and those of them that were right.
    runs: (place, how many) of consecutive blocks in logical order, without those that every window
    has passed. Places: "empty" (no KV yet), "device", "both" (the host has a copy), "moving" (a
    copy to the host is under way), "host".
    """

    number: int
    status: str
    num_prompt_tokens: int
    num_tokens: int
    num_computed: int
    is_streamed: bool
    num_guessed: int
    num_accepted: int
    runs: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class BlockMap:
    """time_s: of time.perf_counter. block_size: tokens of a block; block_bytes: of all layers."""

    time_s: float
    block_size: int
    block_bytes: int
    stats: EngineStats
    requests: tuple[RequestBlocks, ...]
