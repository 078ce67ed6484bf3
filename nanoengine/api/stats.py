"""EngineStats: where KV lies at this moment, and what crossed the link since start-up.

Imports no torch: a server in another process reads it, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    all that a step needed. num_prompt_tokens: of the requests so far; num_looked_up_tokens: those
    that were looked up in the prefix cache; num_cached_tokens: those that it had,
    num_host_cached_tokens: on the host alone. A prompt counts once for all of its completions or
    beams. num_output_tokens: generated so far, in all of these; num_guessed, num_accepted: tokens
    guessed ahead, and those that were right. step_sizes: how many steps computed so many tokens.
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
    num_looked_up_tokens: int
    num_cached_tokens: int
    num_host_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_guessed: int
    num_accepted: int
    step_sizes: Mapping[int, int]

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens looked up that the prefix cache had, 0 to 1."""
        return self.num_cached_tokens / max(1, self.num_looked_up_tokens)

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
            f"prefix cache {self.num_cached_tokens} of {self.num_looked_up_tokens} prompt tokens "
            f"were found ({self.hit_rate:.0%})"
        )
        return "\n".join(lines)
