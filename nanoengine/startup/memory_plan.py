"""Plans memory at start-up: budgets, blocks on each tier, the longest request.

Arithmetic only; allocates nothing. plan.py has the record that it makes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from nanoengine.config.attention import AttentionConfig
from nanoengine.config.engine import GIB, EngineConfig
from nanoengine.config.model import ModelConfig
from nanoengine.errors import ConfigError, OutOfMemoryError, counted
from nanoengine.kv.draft_plan import drafts_from
from nanoengine.kv.kv_codec import make_codec
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.startup.activations import activation_bytes
from nanoengine.startup.plan import (
    MemoryPlan,
    OffloadRoom,
    describe_guesses,
    describe_offload,
    fine_gib,
    how_to_hold,
)

DEFAULT_CPU_KV_BYTES = 4 * GIB
DEFAULT_HOST_KV_BYTES = 4 * GIB
# Tokens of a slot: enough that launching a kernel and carrying state over cost little.
CPU_SLOT_TOKENS, GPU_SLOT_TOKENS = 4096, 16384
# An attention call and a fill of their own take 80 us on a CPU, in which 800 KB are copied, and
# about 10 us on a GPU, 500 KB.
LEAST_RUN_BYTES = 256 << 10
SNAPSHOT_BYTES = 2 * GIB
# Of the memory beside weights and a step, the most that recurrent states take.
STATE_SHARE = 0.25


class Memory(Protocol):
    """What is planned with of a Device; forecast.py has it of a machine elsewhere."""

    @property
    def name(self) -> str: ...
    @property
    def computes_later(self) -> bool: ...
    def memory(self) -> tuple[int, int]: ...
    def host_memory(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a loaded model for the plan, as text except dtype and bytes.

    quantization: how weights were quantised; invariance: what the bits of a request depend on;
    is_invariant: on nothing but the request. in_c: recurrent layers and sampling are calls of C.
    draft: the model with KV of its own that guesses for this one; None: there is none.
    """

    source: str
    dtype: torch.dtype
    dtype_reason: str
    weight_bytes: int
    attention: str
    quantization: str = ""
    invariance: str = ""
    is_invariant: bool = False
    in_c: bool = False
    draft: ModelConfig | None = None


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    device: Memory,
    facts: ModelFacts,
    profiled_bytes: int | None,
) -> MemoryPlan:
    """Divide the memory. profiled_bytes: temporary memory of the largest step (None: estimate it).

    Raises OutOfMemoryError or ConfigError for settings that cannot be met.
    """
    tokens, activations = config.max_num_batched_tokens, profiled_bytes
    if activations is None:
        activations = activation_bytes(model, config, facts.dtype.itemsize, facts.in_c)
    spec = _kv_spec(config, model, device, facts, activations)
    if config.num_drafts:
        spec = replace(spec, drafts_from=drafts_from(facts.weight_bytes, spec.draft_bytes))
    room = _offload_room(config, model, device, facts, activations, spec)
    max_model_len, bound, longer = _max_model_len(config, model, spec, room)
    threads = f", {counted(torch.get_num_threads(), 'thread')}" if device.name == "cpu" else ""
    free, total = device.memory()
    has_gpu = device.name != "cpu"
    if spec.num_host_blocks:
        # A step writes only into device blocks.
        tokens = min(tokens, spec.num_blocks * spec.block_size)
    return MemoryPlan(
        model=config.model,
        source=facts.source,
        device=device.name + threads,
        dtype=f"{str(facts.dtype).removeprefix('torch.')} ({facts.dtype_reason})",
        attention=facts.attention,
        weight_bytes=facts.weight_bytes,
        activation_bytes=activations,
        kv=spec,
        offload=describe_offload(spec),
        max_model_len=max_model_len,
        max_model_len_bound=bound,
        max_num_seqs=spec.num_states or config.max_num_seqs,
        max_num_batched_tokens=tokens,
        quantization=facts.quantization,
        invariance=facts.invariance,
        guesses=describe_guesses(config, spec),
        longer=longer,
        room=room,
        device_bytes=total if has_gpu else free + facts.weight_bytes,
        ram_bytes=device.host_memory() if has_gpu else 0,
        reserved_bytes=max(0, total - free - facts.weight_bytes) if has_gpu else 0,
        ranks=config.tensor_parallel_size,
    )


def streams(config: EngineConfig, device_name: str) -> bool:
    """True if host blocks are copied through the ring, False if they are read in place."""
    if config.offload_mode == "in_place" and device_name != "cpu":
        raise ConfigError('offload_mode="in_place" reads host memory and works on a CPU only')
    reads_in_place = config.offload_mode != "stream" and config.kv_offload_dtype is None
    in_place = device_name == "cpu" and reads_in_place
    return bool(config.enable_cpu_offload) and not in_place


def _kv_layers(
    model: ModelConfig, draft: ModelConfig | None
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...], AttentionConfig]:
    """KVSpec's heads and sources, and the windows, of the model's layers and of the draft model's,
    which come behind.
    """
    heads: list[tuple[int, int]] = []
    sources: list[int] = []
    windows: list[int | None] = []
    for each in filter(None, (model, draft)):
        own, before = each.kv_layers, len(heads)
        heads += [each.shape(layer).kv_heads for layer in own]
        sources += [before + own.index(each.shape(layer).source) for layer in each.attention_layers]
        windows += each.attention.windows or [None] * len(each.attention_layers)
    seen = tuple(windows) if any(windows) else ()
    return tuple(heads), tuple(sources), AttentionConfig(model.head_dim, windows=seen)


def _kv_spec(
    config: EngineConfig, model: ModelConfig, device: Memory, facts: ModelFacts, activations: int
) -> KVSpec:
    dtype = facts.dtype
    if config.kv_offload_dtype == "bf12" and dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f'kv_offload_dtype="bf12" is a way to store bfloat16, but KV is in {name}; take '
            'dtype="bfloat16", or leave kv_offload_dtype out'
        )
    heads, sources, attention = _kv_layers(model, facts.draft)
    spec = KVSpec(
        heads=heads,
        num_blocks=0,
        block_size=config.kvcache_block_size,
        dtype=dtype,
        parts=model.kv_parts,
        window=attention.longest_window or 0,
        step_tokens=config.max_num_batched_tokens,
        windows=attention.windows,
        host_codec=make_codec(config.kv_offload_dtype),
        recurrent=model.recurrent,
        num_states=config.max_num_seqs if model.recurrent else 0,
        keeps_states=model.recurrent is not None and config.num_guesses + config.num_mtp > 0,
        sources=sources,
        drafts_apart=config.num_assisted > 0,
        drafts_stand=config.num_assisted > 0 and facts.draft is None,
    )
    spec = _with_states(spec, device.memory()[0] - activations)
    if streams(config, device.name):
        planned = GPU_SLOT_TOKENS if device.computes_later else CPU_SLOT_TOKENS
        slot_tokens = config.slot_tokens or planned
        spec = replace(
            spec,
            ring_slots=config.ring_slots,
            slot_blocks=max(1, slot_tokens // config.kvcache_block_size),
            least_run_bytes=LEAST_RUN_BYTES,
        )
    _check_asked(config, spec, device, activations)
    spec = replace(spec, num_blocks=_device_blocks(config, model, spec, device, activations))
    on_device = activations + spec.fixed_bytes + spec.num_blocks * spec.block_bytes
    room = _host_room(device, on_device)
    host_bytes = _host_bytes(config, device, room)
    spec = replace(spec, num_snapshots=_num_snapshots(config, spec, device, room - host_bytes))
    if not config.enable_cpu_offload:
        return spec
    num_host_blocks = host_bytes // spec.host_block_bytes
    if not num_host_blocks:
        raise OutOfMemoryError(
            f"{fine_gib(host_bytes)} of host memory are left for KV, but one block of "
            f"{spec.block_size} tokens needs {fine_gib(spec.host_block_bytes)}; raise "
            "kv_offload_gib or lower kvcache_block_size"
        )
    spare = max(1, config.decode_reserve_blocks)
    if spare >= spec.num_blocks + num_host_blocks:
        raise OutOfMemoryError(
            f"decode_reserve_blocks={config.decode_reserve_blocks} leaves none of "
            f"{spec.num_blocks} device and {num_host_blocks} host KV blocks; lower "
            "decode_reserve_blocks"
        )
    return replace(spec, num_host_blocks=num_host_blocks, spare_blocks=spare)


def _with_states(spec: KVSpec, room: int) -> KVSpec:
    """As many recurrent states as STATE_SHARE of the room holds, but one at least."""
    if spec.recurrent is None:
        return spec
    of_none, of_one = (replace(spec, num_states=n).state_bytes for n in (0, 1))
    num_states = (int(room * STATE_SHARE) - of_none) // (of_one - of_none)
    return replace(spec, num_states=max(1, min(spec.num_states, num_states)))


def _num_snapshots(config: EngineConfig, spec: KVSpec, device: Memory, left: int) -> int:
    """Snapshots of recurrent states that SNAPSHOT_BYTES hold, or a sixteenth of the host memory, or
    the `left` bytes of it, if that is less.
    """
    if spec.recurrent is None or not config.enable_prefix_caching:
        return 0
    most = SNAPSHOT_BYTES // config.tensor_parallel_size
    return max(0, min(most, device.host_memory() // 16, left)) // spec.bytes_of_a_state


def _check_asked(config: EngineConfig, spec: KVSpec, device: Memory, activations: int) -> None:
    """Raise OutOfMemoryError with the setting that asks for more memory than there is."""
    free, _ = device.memory()
    check_step_fits(config, activations, free)
    left = free - activations - spec.state_bytes
    if left < 0:
        raise OutOfMemoryError(
            f"the recurrent states of a request and of none take {fine_gib(spec.state_bytes)}, but "
            f"{fine_gib(free - activations)} are left beside weights and activations; lower "
            "max_num_batched_tokens, or take a smaller model"
        )
    if spec.ring_bytes > left:
        raise OutOfMemoryError(
            f"a ring of {spec.ring_slots} slots of {spec.slot_blocks * spec.block_size} tokens "
            f"needs {fine_gib(spec.ring_bytes)}, but {fine_gib(left)} are left beside "
            "activations; lower slot_tokens or ring_slots"
        )
    room = free - activations - spec.fixed_bytes
    setting, asked = _asked_on_device(config, spec)
    if asked > room:
        raise OutOfMemoryError(
            f"{setting}={getattr(config, setting)} asks for {fine_gib(asked)} of KV, but "
            f"{fine_gib(room)} are left beside activations and ring; lower {setting}"
        )
    asked_on_host = _asked_on_host(config)
    room = _host_room(device, activations + spec.fixed_bytes + asked)
    if asked_on_host > room:
        too = f" or {setting}" if asked and device.name == "cpu" else ""
        raise OutOfMemoryError(
            f"kv_offload_gib={config.kv_offload_gib} asks for {fine_gib(asked_on_host)} of host "
            f"memory, but {fine_gib(room)} are available; lower kv_offload_gib{too}"
        )


def check_step_fits(config: EngineConfig, activations: int, free: int) -> None:
    """Raise OutOfMemoryError if the largest step needs more than `free` bytes."""
    if activations > free:
        raise OutOfMemoryError(
            f"a step of max_num_batched_tokens={config.max_num_batched_tokens} and "
            f"max_num_seqs={config.max_num_seqs} needs up to {fine_gib(activations)}, but "
            f"{fine_gib(free)} are available; lower max_num_batched_tokens or max_num_seqs"
        )


def _asked_on_device(config: EngineConfig, spec: KVSpec) -> tuple[str, int]:
    """The setting that fixes the device's KV, and its bytes; 0 bytes if the size is planned."""
    if config.num_gpu_blocks is not None:
        return "num_gpu_blocks", config.num_gpu_blocks * spec.block_bytes
    return "kv_cache_gib", int((config.kv_cache_gib or 0) * GIB)


def _asked_on_host(config: EngineConfig) -> int:
    return int((config.kv_offload_gib or 0) * GIB)


def _host_room(device: Memory, on_device: int) -> int:
    """Available bytes of host memory for KV. on_device: bytes planned on the device, which on a CPU
    is the same memory.
    """
    return max(0, device.host_memory() - (on_device if device.name == "cpu" else 0))


def _host_bytes(config: EngineConfig, device: Memory, room: int) -> int:
    """Of KV on the host, which has `room` for it."""
    if not config.enable_cpu_offload:
        return 0
    if config.kv_offload_gib is not None:
        return _asked_on_host(config)
    quarter, ranks = device.host_memory() // 4, config.tensor_parallel_size
    return min(DEFAULT_HOST_KV_BYTES // ranks, quarter, room)


def _device_blocks(
    config: EngineConfig, model: ModelConfig, spec: KVSpec, device: Memory, activations: int
) -> int:
    if config.num_gpu_blocks is not None:
        return config.num_gpu_blocks
    free, total = device.memory()
    room = free - activations - spec.fixed_bytes
    positions = min(config.max_model_len or model.max_position, model.max_position)
    # Not more than all requests at full length can use.
    most = config.max_num_seqs * -(-positions // spec.block_size) * spec.block_bytes
    setting, ranks = "kv_cache_gib", config.tensor_parallel_size
    if config.kv_cache_gib is not None:
        _, budget = _asked_on_device(config, spec)
    elif device.name == "cpu":
        half = (free - activations - spec.state_bytes) // 2
        beside_host = room - _asked_on_host(config)
        budget = min(DEFAULT_CPU_KV_BYTES // ranks, half, beside_host, most)
    else:
        setting = "gpu_memory_utilization"
        budget = min(room - total + int(total * config.gpu_memory_utilization), most)
    if budget < spec.block_bytes:
        raise OutOfMemoryError(
            f"{fine_gib(max(0, budget))} are left for KV, but one block of {spec.block_size} "
            f"tokens needs {fine_gib(spec.block_bytes)}; raise {setting}, or lower "
            "max_num_batched_tokens, max_num_seqs or kvcache_block_size"
        )
    return budget // spec.block_bytes


def _offload_room(
    config: EngineConfig,
    model: ModelConfig,
    device: Memory,
    facts: ModelFacts,
    activations: int,
    spec: KVSpec,
) -> OffloadRoom | None:
    """What KV offload makes of the memory; `spec` is the KV cache without it, or with it if the
    settings ask for it. None: it does not fit.
    """
    if not config.enable_cpu_offload:
        try:
            config = replace(config, enable_cpu_offload=True)
            spec = _kv_spec(config, model, device, facts, activations)
        except OutOfMemoryError:
            return None
    on_device = activations + spec.fixed_bytes + spec.num_blocks * spec.block_bytes
    return OffloadRoom(spec, _host_room(device, on_device), config.tensor_parallel_size)


def _max_model_len(
    config: EngineConfig, model: ModelConfig, spec: KVSpec, room: OffloadRoom | None
) -> tuple[int, str, str]:
    """The most tokens of a request, what limits them, and how to have more, if that can be."""
    asked, positions = config.max_model_len, model.max_position
    if asked is not None and asked > positions:
        raise ConfigError(
            f"max_model_len={asked} is above the model's {positions} positions; lower it, or set "
            "rope_parameters in config.json to a scaling that the model was trained for"
        )
    if asked is not None and not spec.holds(asked):
        raise OutOfMemoryError(
            f"max_model_len={asked} needs {-(-asked // spec.block_size)} KV blocks of "
            f"{spec.block_size} tokens, but there are {spec.capacity_blocks}; "
            f"{how_to_hold(spec, room, asked)}"
        )
    if asked is not None:
        return asked, "max_model_len", ""
    if not spec.holds(positions):
        longer = f"for all {positions} positions of the model: {how_to_hold(spec, room, positions)}"
        return spec.num_tokens, "what the KV cache holds", longer
    return positions, "the model's positions", ""


def describe_invariance(
    products: bool, attention: bool, int8_kv: bool, are_ranks: bool = False
) -> str:
    """What the bits of a request depend on, as text. products, attention: whether matrix products
    and attention are batch-invariant; int8_kv: whether host KV is rounded. are_ranks: products have
    fewer outputs than those of one process, which may show where they are not batch-invariant.
    """
    parts = {"products": products, "attention": attention}
    others = " and ".join(name for name, is_invariant in parts.items() if not is_invariant)
    if others:
        on_ranks = " and for any number of ranks" if are_ranks and not products else ""
        on_what = "these" if on_ranks else "it"
        return f"equal up to near ties in any batch{on_ranks}: {others} may depend on {on_what}"
    if int8_kv:
        return "equal up to near ties in any batch: it decides which KV is rounded to int8"
    return "the same bits in any batch, in any chunks, on either tier"
