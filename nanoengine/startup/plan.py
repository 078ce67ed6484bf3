"""MemoryPlan: what start-up decided, as a record that prints and draws itself.

It holds every figure that limits a request, with the setting that raises it. Decides nothing:
memory_plan.py makes it, probe.py adds the speeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nanoengine.config.engine import GIB, EngineConfig, in_gib
from nanoengine.errors import counted
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.startup.bars import Bar, Part, bars_html

# How a host block is stored -> what a line of the plan says of it.
HOW_STORED = {
    "int8": " in int8 (lossy)",
    "bf12": " (12 bits a number come back, exactly)",
}
GIB_STEPS = 100  # budgets are rounded up to a hundredth of a GiB


@dataclass(frozen=True, slots=True)
class OffloadRoom:
    """What KV offload makes of a rank's memory. host_bytes: RAM for its KV."""

    kv: KVSpec
    host_bytes: int
    ranks: int = 1

    def gib_for(self, num_tokens: int) -> float:
        """The kv_offload_gib with which a request of `num_tokens` tokens fits."""
        return gib_up(self.kv.host_bytes_for(num_tokens) * self.ranks)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What start-up decided, and what was allocated.

    longer: how a request gets all of the model's positions; "" if it has them. room: None: KV
    offload cannot be had. is_slowed: other programs used the processor while the speed was
    measured, or kept it from being measured. device_bytes, ram_bytes: all of a GPU's memory, and
    the RAM that is there for KV; of a CPU the memory that weights and KV share, and 0.
    reserved_bytes: of the GPU, taken by others. ranks: processes that compute together; weights,
    KV and bytes are those of each. link_gb_per_s: of the copies of each, measured at once.
    """

    model: str
    source: str
    device: str
    dtype: str
    attention: str
    weight_bytes: int
    activation_bytes: int
    kv: KVSpec
    offload: str
    max_model_len: int
    max_model_len_bound: str
    max_num_seqs: int
    max_num_batched_tokens: int
    link_gb_per_s: tuple[float, ...] = ()
    stream_blocks_per_step: int | None = None
    decode_tokens_per_s: float = 0.0
    is_slowed: bool = False
    quantization: str = ""
    invariance: str = ""
    guesses: str = ""
    longer: str = ""
    room: OffloadRoom | None = None
    device_bytes: int = 0
    ram_bytes: int = 0
    reserved_bytes: int = 0
    ranks: int = 1

    @property
    def copy_gb_per_s(self) -> float:
        """GB/s of copies from host memory, of all ranks together; 0: not measured, or no copies."""
        return sum(self.link_gb_per_s)

    @property
    def has_gpu(self) -> bool:
        """Whether the device has memory of its own."""
        return not self.device.startswith("cpu")

    @property
    def tiers(self) -> tuple[str, str]:
        """Where KV lies, in words: the KV of the device, and what is offloaded."""
        return "KV on GPU" if self.has_gpu else "KV in RAM", "KV offload"

    def how_to_hold(self, num_tokens: int) -> str:
        """Settings that make room for a request of `num_tokens` tokens, as text."""
        return how_to_hold(self.kv, self.room, num_tokens)

    def bars(self) -> list[Bar]:
        """What takes which memory."""
        host = self.host_parts(self.tiers[1])
        reserved = Part("x", "reserved", "CUDA and other programs", self.reserved_bytes)
        parts = (*self.device_parts(self.tiers[0]), reserved)
        if not self.has_gpu:
            return [Bar("RAM", self.device_bytes, (*parts, *host))]
        return [Bar("GPU", self.device_bytes, parts), Bar("RAM", self.ram_bytes, host)]

    def device_parts(self, kv_label: str) -> tuple[Part, ...]:
        """What the engine takes of the device. kv_label: what the bar calls the KV there."""
        kv = self.kv
        return (
            Part("W", "weights", "weights", self.weight_bytes),
            Part("S", "step", "a step", self.activation_bytes),
            Part("K", "kv", kv_label, kv.num_blocks * kv.block_bytes),
            Part("R", "ring", "buffer", kv.ring_bytes),
            Part("H", "states", "recurrent states", kv.state_bytes),
        )

    def host_parts(self, kv_label: str) -> tuple[Part, ...]:
        """What the engine takes of the RAM beside a device. kv_label: as of `device_parts`."""
        kv = self.kv
        return (
            Part("K", "kv", kv_label, kv.num_host_blocks * kv.host_block_bytes),
            Part("N", "snapshots", "snapshots of states", kv.num_snapshots * kv.bytes_of_a_state),
        )

    def _repr_html_(self) -> str:
        """Shown by notebooks."""
        return bars_html(self.bars(), str(self))

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        kv = self.kv
        on_device, offloaded = self.tiers
        lines = [
            f"model        {self.model} ({self.source})",
            f"device       {self.device}, {self.dtype}; attention: {self.attention}",
            *([f"ranks        {self._ranks()}"] if self.ranks > 1 else []),
            f"weights      {fine_gib(self.weight_bytes)}; a step takes up to "
            f"{fine_gib(self.activation_bytes)} more",
            *([f"quantised    {self.quantization}"] if self.quantization else []),
            f"invariance   {self.invariance}",
            *([f"guesses      {self.guesses}"] if self.guesses else []),
            f"{on_device:12} {_tier(kv.num_blocks, kv.block_size, kv.block_bytes)}",
        ]
        if kv.recurrent is not None:
            lines.append(f"recurrent    {_states(kv)}")
        if kv.num_host_blocks:
            stored = HOW_STORED[kv.host_codec.name] if kv.host_codec else ""
            tier = _tier(kv.num_host_blocks, kv.block_size, kv.host_block_bytes)
            lines.append(f"{offloaded:12} {tier}{stored}, in RAM; {self.offload}")
        if self.decode_tokens_per_s or self.is_slowed:
            lines.append(f"speed        {self._speed()}")
        if self.stream_blocks_per_step is not None:
            mib = self.stream_blocks_per_step * kv.load_bytes / (1 << 20)
            lines.append(
                f"sharing      beside requests whose KV is all on the device, {mib:.0f} MiB "
                f"({counted(self.stream_blocks_per_step, 'block')}) of offloaded KV are copied per "
                "step"
            )
        lines.append(
            f"requests     up to {self.max_num_seqs} at once, {self.max_num_batched_tokens} "
            f"tokens a step; one may have {self.max_model_len} tokens ({self.max_model_len_bound})"
        )
        return "\n".join([*lines, *([f"longer       {self.longer}"] if self.longer else [])])

    def _ranks(self) -> str:
        gpus = ", each on a GPU of its own from this one on" if self.has_gpu else ""
        return f"{self.ranks} processes{gpus}; figures are of each"

    def _speed(self) -> str:
        """The predicted speed, and what is known of it."""
        if not self.decode_tokens_per_s:
            return "not measured, as other programs use the processor"
        copies = f"; {describe_copies(self.link_gb_per_s)}" if self.copy_gb_per_s else ""
        what = f"one request of {self.max_model_len} tokens decodes at"
        if not self.is_slowed:
            return f"{what} about {self.decode_tokens_per_s:.1f} tok/s{copies}"
        return (
            f"{what} {self.decode_tokens_per_s:.1f} tok/s or more{copies}; measured while other "
            "programs used the processor"
        )


def describe_copies(link_gb_per_s: Sequence[float]) -> str:
    """How fast copies from host memory are. link_gb_per_s: of each rank, all at once."""
    copies = f"copies at {sum(link_gb_per_s):.1f} GB/s"
    if len(link_gb_per_s) == 1:
        return copies
    return f"{copies} together, the slowest at {min(link_gb_per_s):.1f}"


def how_to_hold(spec: KVSpec, room: OffloadRoom | None, num_tokens: int) -> str:
    """Settings that make room for a request of `num_tokens` tokens in the KV cache, as text."""
    more = "raise kv_cache_gib or num_gpu_blocks"
    if room is None:
        return more
    gib = room.gib_for(num_tokens)
    if gib * GIB > (host_bytes := room.host_bytes * room.ranks):
        free = f"of RAM, and {host_bytes / GIB:.2f} are free"
        return f"{more} (KV offload would take {gib} GiB {free})"
    if spec.num_host_blocks:
        return f"set kv_offload_gib={gib}"
    return (
        f"set enable_cpu_offload=True and kv_offload_gib={gib}: what does not fit then takes "
        f"{gib} GiB of RAM; or {more}"
    )


def describe_guesses(config: EngineConfig, spec: KVSpec) -> str:
    """Who guesses tokens and how many a step, as text; "" if nobody does."""
    kinds = []
    if config.num_guesses:
        kinds.append(f"up to {config.num_guesses} by lookup")
    if config.num_drafts:
        who = ["whose KV is streamed"] * (spec.slot_blocks > 0)
        if spec.drafts_from:
            who.append(f"of at least {spec.drafts_from * spec.block_size} tokens on the device")
        kinds.append(
            f"up to {counted(config.num_drafts, 'draft')}, where they pay, of requests "
            f"{' or '.join(who)}"
        )
    if config.num_mtp:
        kinds.append(f"up to {config.num_mtp} by the MTP head, where they pay")
    if config.num_assisted:
        kinds.append(f"up to {config.num_assisted} by {config.draft_model}, where they pay")
    off = "" if config.asks_for_guesses or not kinds else ' (speculative="off" for none)'
    return "; ".join(kinds) + off


def describe_offload(spec: KVSpec) -> str:
    """How attention reads KV of the host tier, as text."""
    if not spec.slot_blocks:
        return "attention reads it where it lies"
    return (
        f"a step copies what it reads through a buffer of {fine_gib(spec.ring_bytes)} "
        f"({spec.ring_slots} parts of {spec.slot_blocks * spec.block_size} tokens of a layer)"
    )


def _tier(num_blocks: int, block_size: int, block_bytes: int) -> str:
    return (
        f"{fine_gib(num_blocks * block_bytes)} = {counted(num_blocks, 'block')} x {block_size} "
        f"tokens = {num_blocks * block_size} tokens at {block_bytes // block_size} bytes"
    )


def _states(kv: KVSpec) -> str:
    """What recurrent layers take, and what they do without."""
    assert kv.recurrent is not None
    each = f"{kv.bytes_of_a_state / (1 << 20):.1f} MiB"
    kept = f", {each} more beside guesses" if kv.keeps_states else ""
    snapshots = fine_gib(kv.num_snapshots * kv.bytes_of_a_state)
    return (
        f"{len(kv.recurrent.layers)} layers have a state, {kv.num_layers} KV; states take {each} "
        f"for each request at once{kept}; {counted(kv.num_snapshots, 'snapshot')}, {snapshots} of "
        "RAM, for cached prefixes and preempted requests; no resident drafts"
    )


def gib_up(num_bytes: int) -> float:
    """Bytes in GiB as a setting that is enough."""
    return math.ceil(num_bytes / GIB * GIB_STEPS) / GIB_STEPS


def fine_gib(num_bytes: int) -> str:
    """An amount of memory, to the MiB: a small model's KV is a few of these."""
    return in_gib(num_bytes, 3)
