"""Sliding windows: every backend against float64, and the law that neither chunks nor
what lies before the window move a bit; which layers have one; and KV that every layer has left.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver, assert_greedy, assert_logits_are_transformers, host_gib
from marks import BUILDS, needs_compiler, smaller
from paged_batches import Batch, context_of, make_batch, relative_error, split, whole
from torch import Tensor

from nanoengine import PromptTooLongError, SamplingParams
from nanoengine.attention.cpu_attention import CpuAttention
from nanoengine.attention.torch_attention import TorchAttention
from nanoengine.config.attention import ATTENTION_LIMITS, AttentionConfig
from nanoengine.context import AttentionBackend, KVChunk
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import UnsupportedModelError
from nanoengine.kernels.cpu_kernels import CpuKernels
from nanoengine.kv.block_manager import Block
from nanoengine.kv.block_table import BlockTable
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.kv.offload import TransferRun
from nanoengine.kv.step_plan import StepTransfers
from nanoengine.loading.layer_kinds import layer_windows
from nanoengine.loading.model_config import read_model_config

CPU = torch.device("cpu")
# Prompts whole and on top of earlier keys, decodes of one to four queries, one key, no key.
Q_LENS = [1, 7, 70, 1, 3, 5, 1, 1]
KV_LENS = [300, 300, 70, 65, 600, 5, 1, 0]
# Smaller than a block, past a tile and past a segment by one, longer than the context.
WINDOWS = [1, 5, 16, 65, 257, 1000]
ISAS = {**BUILDS, **smaller("avx2", "generic")}


def run(backend: AttentionBackend, batch: Batch, chunks: list[KVChunk], layer: int = 0) -> Tensor:
    ctx = context_of(batch, chunks)
    for before in range(layer):
        backend.run(before, batch.q, ctx)
    return backend.run(layer, batch.q, ctx)


def first_blocks(batch: Batch, window: int) -> list[int]:
    """Of each sequence, the first block that its first query sees."""
    lengths = zip(batch.q_lens, batch.kv_lens, strict=True)
    return [max(0, kv - q + 1 - window) // batch.block_size for q, kv in lengths]


def make_plain(config: AttentionConfig) -> AttentionBackend:
    return TorchAttention(config)


def make_triton(config: AttentionConfig) -> AttentionBackend:
    pytest.importorskip("triton", reason="Triton is not installed")
    from nanoengine.attention.triton_attention import TritonAttention

    return TritonAttention(config, torch.float32, CPU)


@pytest.fixture(params=["C", "torch", "triton"])
def make(
    request: pytest.FixtureRequest, build_folder: Path
) -> Callable[[AttentionConfig], AttentionBackend]:
    if request.param == "C":
        kernels = CpuKernels.load(build_folder)
        return lambda config: CpuAttention(config, kernels)
    return make_plain if request.param == "torch" else make_triton


pytestmark = [pytest.mark.usefixtures("two_threads"), needs_compiler]


def some_batch(block_size: int = 16, **settings: Any) -> Batch:
    """The last sequence, which only pads, has no keys; its result is 0."""
    settings = {"dtype": torch.float32, "head_dim": 24, "kv_heads": 1} | settings
    return make_batch(Q_LENS, KV_LENS, block_size=block_size, **settings)


def assert_right(got: Tensor, batch: Batch, limit: float, *what: Any) -> None:
    assert relative_error(got[:-1], batch.reference(*what)[:-1]) < limit


@pytest.mark.some(1)
@pytest.mark.parametrize("window", [5, 256, pytest.param(1000, marks=pytest.mark.breadth)])
def test_backends_against_float64(
    make: Callable[[AttentionConfig], AttentionBackend], window: int
) -> None:
    """The second layer of two that differ; and again in pieces, without the blocks that the
    first query does not see: the same bits.
    """
    batch = some_batch()
    got = run(make(AttentionConfig(24, windows=(3, window))), batch, whole(batch), layer=1)
    assert_right(got, batch, 5e-6, window)
    parts = split(batch, window, first_blocks(batch, window))
    first = make(AttentionConfig(24, windows=(window,)))
    assert torch.equal(run(first, batch, parts)[:-1], got[:-1])
    assert torch.equal(run(first, batch, split(batch, window + 1))[:-1], got[:-1])


def test_a_scale_of_its_own(make: Callable[[AttentionConfig], AttentionBackend]) -> None:
    batch = some_batch()
    got = run(make(AttentionConfig(24, scale=0.5)), batch, whole(batch))
    scaled = replace(batch, q=batch.q * (0.5 * 24**0.5))
    assert_right(got, scaled, 5e-6)


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 3e-6), (torch.bfloat16, 8e-3)], ids=str)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "block_size, head_dim",
    [(5, 40), (300, 32), pytest.param(300, 40, marks=pytest.mark.breadth)],
)
def test_the_c_kernel(
    build_folder: Path, isa: str, dtype: torch.dtype, limit: float, block_size: int, head_dim: int
) -> None:
    """In every instruction set and mode: what lies in blocks before the window is not read."""
    kernels = CpuKernels.load(build_folder, ISAS[isa])
    for window in WINDOWS:
        batch = some_batch(block_size, dtype=dtype, head_dim=head_dim, seed=window)
        config = AttentionConfig(head_dim, windows=(window,))
        got = run(CpuAttention(config, kernels), batch, whole(batch))
        assert_right(got, batch, limit, window)
        for table, first in zip(batch.tables, first_blocks(batch, window), strict=True):
            for pool in (batch.k_pool, batch.v_pool):
                pool[table[:first]] = torch.nan
        for chunks in (whole(batch), split(batch, window)):
            assert torch.equal(run(CpuAttention(config, kernels), batch, chunks), got)


def test_a_prompt_in_pieces_moves_no_bit_of_the_c_kernel(build_folder: Path) -> None:
    """Pieces of prompt length: a tile that a neighbour needs changes nothing for a row."""
    kernels = CpuKernels.load(build_folder)
    for window in (7, 64, 100):
        backend = CpuAttention(AttentionConfig(24, windows=(window,)), kernels)
        batch = make_batch([400], [400], dtype=torch.float32, head_dim=24)
        got = run(backend, batch, whole(batch))
        done = 0
        for size in (130, 5, 65, 200):
            rows = slice(done, done + size)
            done += size
            tables = [batch.tables[0][: -(-done // 16)]]
            piece = replace(batch, q=batch.q[rows], q_lens=[size], kv_lens=[done], tables=tables)
            assert torch.equal(run(backend, piece, split(piece, done)), got[rows])


def test_flash_kernels_leave_them_to_others() -> None:
    config, need = AttentionConfig(64, windows=(None, 9)), "this model has a sliding window"
    for name in ("flash-attn", "varlen", "sdpa"):
        assert need in ATTENTION_LIMITS[name].unmet("bfloat16", 256, config)


def test_the_scale_of_a_model_that_names_one(tiny: Callable[[str], Path]) -> None:
    config = replace(read_model_config(tiny("llama")), query_pre_attn_scalar=64.0)
    assert config.attention.score_scale == 0.125
    assert config.attention.longest_window is None
    assert read_model_config(tiny("llama")).attention.score_scale == 0.25
    assert read_model_config(tiny("mistral-window")).attention.longest_window == 21
    assert read_model_config(tiny("qwen3-window")).attention.longest_window is None


# -- which layers have a window


def qwen3(**settings: Any) -> tuple[int | None, ...]:
    return layer_windows("Qwen3ForCausalLM", settings, 3, "config.json")


def mistral(**settings: Any) -> tuple[int | None, ...]:
    return layer_windows("MistralForCausalLM", settings, 2, "config.json")


def test_windows_are_read_as_transformers_does() -> None:
    """Left out, a window is 4096 keys, and Qwen's begins at layer 28."""
    assert mistral() == (4096, 4096)
    assert mistral(sliding_window=None) == ()
    assert mistral(sliding_window=7) == (7, 7)
    assert qwen3(sliding_window=7) == ()
    assert qwen3(sliding_window=7, use_sliding_window=False, max_window_layers=0) == ()
    on = {"use_sliding_window": True}
    assert qwen3(**on) == ()
    assert qwen3(**on, max_window_layers=2) == (None, None, 4096)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert qwen3(**on, layer_types=kinds, sliding_window=9) == (9, None, 9)


@pytest.mark.parametrize(
    ("read", "settings"),
    [
        (qwen3, {"layer_types": ["sliding_attention"] * 3}),
        (qwen3, {"use_sliding_window": True, "layer_types": ["sliding_attention"]}),
        (qwen3, {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 3}),
        (qwen3, {"use_sliding_window": True, "layer_types": 5}),
        (qwen3, {"use_sliding_window": True, "sliding_window": 0}),
        (qwen3, {"use_sliding_window": True, "max_window_layers": "1"}),
        (mistral, {"layer_types": ["full_attention", "sliding_attention"]}),
        (mistral, {"sliding_window": "all"}),
    ],
)
def test_other_windows_are_refused(read: Callable[..., Any], settings: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"config\.json: .*sliding_window"):
        read(**settings)


# -- KV that every layer has left


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def some_ids(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def make_driver(path: Path, **settings: Any) -> Driver:
    """Freed and undelivered KV is NaN; a window of 21 lies in 4 blocks of 8 at most."""
    defaults: dict[str, Any] = {
        "kvcache_block_size": 8,
        "dtype": "float32",
        "device": "cpu",
        "debug_kv": True,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 6,
        "decode_reserve_blocks": 0,
        "speculative": "off",
    }
    if settings.get("enable_cpu_offload"):
        defaults["kv_offload_gib"] = host_gib(path, 4, 8)
        defaults |= {"slot_tokens": 16, "ring_slots": 2, "stream_mib_per_step": 1e6}
    return Driver(LLMEngine(path, **(defaults | settings)))


TIERS: dict[str, dict[str, Any]] = {
    "resident": {"num_gpu_blocks": 6},
    "in place": {"num_gpu_blocks": 3, "enable_cpu_offload": True, "offload_mode": "in_place"},
    "stream": {"num_gpu_blocks": 3, "enable_cpu_offload": True, "offload_mode": "stream"},
}


@pytest.mark.parametrize("tier", TIERS)
def test_a_request_longer_than_the_kv(tiny: Callable[[str], Path], tier: str) -> None:
    """Beside others, whose KV comes and goes."""
    path = tiny("mistral-window")
    driver = make_driver(path, **TIERS[tier])
    assert driver.engine.plan.max_model_len == 512 > 130 > 2 * driver.engine.kv.spec.num_tokens
    prompts = [some_ids(1, 130), some_ids(2, 5), some_ids(3, 30)]
    outputs = driver.run(prompts, greedy(5))
    assert_greedy(path, prompts, outputs, 5)
    assert_logits_are_transformers(driver, path, outputs)
    driver.engine.close()


def test_preempted_beyond_the_window(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers outgrow the pool; who lost a block, having left others, begins anew."""
    path, left, keep_first = tiny("mistral-window"), [], BlockTable.keep_first

    def recorded(table: BlockTable, num_kept: int) -> list[Block]:
        left.append(table.num_released)
        return keep_first(table, num_kept)

    monkeypatch.setattr(BlockTable, "keep_first", recorded)
    for prefix_cache in (True, False):
        driver = make_driver(path, num_gpu_blocks=7, enable_prefix_caching=prefix_cache)
        prompts = [some_ids(seed, length) for seed, length in enumerate((5, 6, 40))]
        outputs = driver.run(prompts, greedy(24))
        assert_greedy(path, prompts, outputs, 24)
        driver.engine.close()
    assert any(left)


def test_prefixes_are_found_and_only_their_end_is_held(tiny: Callable[[str], Path]) -> None:
    path = tiny("mistral-window")
    driver = make_driver(path, num_gpu_blocks=30)
    prompt = some_ids(4, 96)
    driver.run([prompt], greedy(1))
    long = [*prompt, *some_ids(5, 3)]
    driver.engine.add_request(long, greedy(2))
    driver.step()
    (table,) = driver.engine.kv.tables.values()
    assert len(table.held) == 4  # of 21 keys and the new ones
    driver.drain()
    follow_ups = [[*prompt, i, 2 * i] for i in range(2)]
    outputs = driver.run([*follow_ups, prompt], greedy(4))
    assert [output.num_cached_tokens for output in outputs] == [96] * 2 + [95]
    assert_greedy(path, [*follow_ups, prompt], outputs, 4)
    driver.engine.close()


def test_a_prompt_that_is_asked_again_and_again_stays_in_the_cache(
    tiny: Callable[[str], Path],
) -> None:
    """Between others: the blocks that its windows have passed are as new as its last ones."""
    driver = make_driver(tiny("mistral-window"), num_gpu_blocks=30)
    prompt, found = some_ids(4, 96), []
    for seed in range(10):
        (output,) = driver.run([prompt], greedy(1))
        found.append(output.num_cached_tokens)
        driver.run([some_ids(10 + seed, 40)], greedy(1))
    assert found == [0] + [95] * 9
    driver.engine.close()


def test_the_beginning_of_a_prompt_is_forgotten_last(tiny: Callable[[str], Path]) -> None:
    """Of 17 blocks it has 12, and the next request takes the last two of these."""
    driver = make_driver(tiny("mistral-window"), num_gpu_blocks=17)
    prompt = some_ids(4, 96)
    driver.run([prompt], greedy(1))
    driver.run([some_ids(5, 56)], greedy(1))
    (output,) = driver.run([prompt], greedy(1))
    assert output.num_cached_tokens == 80
    driver.engine.close()


def test_the_beginning_of_a_prompt_in_use_is_newer_than_other_prompts(
    tiny: Callable[[str], Path],
) -> None:
    """Already while the request that found it runs: others make room for a third one."""
    driver = make_driver(tiny("mistral-window"), num_gpu_blocks=22)
    prompt = some_ids(4, 96)
    driver.run([prompt], greedy(1))
    driver.run([some_ids(5, 56)], greedy(1))
    driver.engine.add_request([*prompt, 7], greedy(8))
    driver.step()
    driver.run([some_ids(6, 56)], greedy(1))
    (output,) = driver.run([prompt], greedy(1))
    assert output.num_cached_tokens == 95
    driver.engine.close()


def test_mixed_layers_keep_everything(tiny: Callable[[str], Path]) -> None:
    driver = make_driver(tiny("qwen3-window"), num_gpu_blocks=6)
    with pytest.raises(PromptTooLongError, match="48"):
        driver.engine.add_request(some_ids(1, 60), greedy(2))
    driver.engine.close()


def test_windowed_layers_do_not_stream(tiny: Callable[[str], Path]) -> None:
    """Of three layers one sees all keys: what streams is for it, as the windows of the others lie
    on the device; in place nothing changes. The same bits resident, in place and streamed.
    """
    path = tiny("qwen3-window")
    prompts = [some_ids(6, 150), some_ids(7, 11)]
    found: list[list[Tensor]] = []
    for tier, settings in TIERS.items():
        blocks = {"num_gpu_blocks": 40 if tier == "resident" else 8}
        settings = settings | blocks | {"slot_tokens": 8}
        if tier != "resident":
            settings["kv_offload_gib"] = host_gib(path, 30, 8)
        driver = make_driver(path, **settings)
        outputs = driver.run(prompts, greedy(6))
        assert_greedy(path, prompts, outputs, 6)
        found.append([torch.stack(driver.logits[output.request_id]) for output in outputs])
        moved, audit = driver.engine.kv.counters.h2d_bytes, driver.audit
        if tier == "stream":
            assert moved == audit.h2d_bytes - audit.spared_bytes
            assert 3 * moved < 1.2 * audit.h2d_bytes
        driver.engine.close()
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


@pytest.mark.parametrize("model, tail", [("qwen3-window", 3), ("mistral-window", 4)])
def test_windowed_layers_never_stream(tiny: Callable[[str], Path], model: str, tail: int) -> None:
    """Three long requests and a short one over a device that holds two or three windows: whoever
    takes part in a step, has waited or shares a prefix, layers with a window find all of it on the
    device.
    """
    path = tiny(model)
    settings = TIERS["stream"] | {"num_gpu_blocks": 10, "slot_tokens": 8}
    settings |= {"kv_offload_gib": host_gib(path, 80, 8), "stream_mib_per_step": 0.001}
    driver = make_driver(path, **settings)
    windows, fills = driver.engine.kv.spec.windows, set()
    assert driver.engine.kv.spec.kept_blocks == tail
    prompts = [some_ids(6, 150), some_ids(7, 120), some_ids(8, 11), some_ids(6, 150)[:100]]
    start = driver.engine.kv.memory.start

    def recorded(transfers: StepTransfers) -> TransferRun:
        numbers = range(len(transfers.fills))
        of_layers = transfers.fills_of or [tuple(numbers)] * len(windows)
        fills.update((layer, windows[layer]) for layer, read in enumerate(of_layers) for _ in read)
        return start(transfers)

    driver.engine.kv.memory.start = recorded
    outputs = driver.run(prompts, greedy(12))
    assert_greedy(path, prompts, outputs, 12)
    assert fills == {(layer, None) for layer, window in enumerate(windows) if window is None}
    driver.engine.close()


def test_tails() -> None:
    """As far as the device holds them; without a window or a ring, the block that is written."""
    spec = KVSpec(((1, 1),) * 3, 6, 8, torch.float32, slot_blocks=1, windows=(None, 21, 9))
    of_a_layer = spec.block_bytes // 3
    assert (spec.kept_blocks, spec.streamed_bytes) == (4, of_a_layer)
    assert [spec.first_kept(done) for done in (0, 20, 27, 28, 36)] == [0, 0, 0, 1, 2]
    for other in (
        replace(spec, num_blocks=4),
        replace(spec, slot_blocks=0),
        replace(spec, windows=()),
        replace(spec, windows=(None, None, None)),
    ):
        assert (other.kept_blocks, other.streamed_bytes) == (1, 3 * of_a_layer)
        assert [other.first_kept(done) for done in (0, 7, 8, 36)] == [0, 0, 1, 4]


def test_a_window_needs_room_for_itself() -> None:
    """21 keys lie in 4 blocks of 8 where they begin with the last key of one."""
    spec = KVSpec(((1, 1),), 4, 8, torch.float32, window=21, step_tokens=16)
    assert spec.holds(1000) and spec.max_held_blocks == 4
    assert not KVSpec(((1, 1),), 3, 8, torch.float32, window=21).holds(1000)
    assert KVSpec(((1, 1),), 9, 8, torch.float32, window=21, step_tokens=16).max_held_blocks == 6
    assert [spec.first_needed(done) for done in (0, 27, 28, 36)] == [0, 0, 1, 2]
