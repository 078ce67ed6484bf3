"""KV on two tiers gives what a resident run gives: ids equal to transformers', bits to each other.

Streamed runs have the checking device, NaN in all undelivered memory and random copy delays on.
"""

from __future__ import annotations

import itertools
import mmap
import random
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import (
    Driver,
    assert_greedy,
    assert_logits_are_transformers,
    expected,
    host_gib,
    token_ids,
)
from tiny_models import TINY
from torch import Tensor

from nanoengine import PromptTooLongError, SamplingParams
from nanoengine.attention.torch_attention import TorchAttention
from nanoengine.config.model import RecurrentConfig
from nanoengine.devices.cpu import CpuDevice
from nanoengine.devices.stream_check import CheckedDevice
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.kv.kv_memory import KVMemory
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.kv.offload import OffloadEngine, TransferRun
from nanoengine.kv.step_plan import Load, StepTransfers, Store, store_runs
from nanoengine.startup import parts

BLOCK = 8
VOCAB = 256
STREAM = {
    "enable_cpu_offload": True,
    "offload_mode": "stream",
    "debug_kv": True,
    "slot_tokens": 2 * BLOCK,
    "ring_slots": 2,
    "stream_mib_per_step": 1e6,  # nobody sits a step out: batches are equal in all layouts
}
IN_PLACE = {"enable_cpu_offload": True, "offload_mode": "in_place", "debug_kv": True}

STATM = Path("/proc/self/statm")
Tiny = Callable[[str], Path]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def resident_pages() -> int:
    return int(STATM.read_text().split()[1])


def some_ids(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def make_driver(path: Path, host_blocks: int = 0, **settings: Any) -> Driver:
    """An engine in fp32 with blocks of 8 and no guesses unless told otherwise; host_blocks turn
    offload on.
    """
    defaults: dict[str, Any] = {"kvcache_block_size": BLOCK, "dtype": "float32", "device": "cpu"}
    defaults |= {"speculative": "off"}
    settings = defaults | settings
    if settings.get("enable_cpu_offload"):
        blocks = host_blocks or 200
        settings["kv_offload_gib"] = host_gib(path, blocks, settings["kvcache_block_size"])
    return Driver(LLMEngine(path, **settings))


def assert_bytes_add_up(driver: Driver, host_pressure: bool = False) -> None:
    counters, audit = driver.engine.kv.counters, driver.audit
    most = audit.h2d_bytes + audit.between_bytes
    assert audit.h2d_bytes - audit.spared_bytes <= counters.h2d_bytes <= most
    assert counters.d2h_bytes == audit.d2h_bytes or (
        host_pressure and counters.d2h_bytes > audit.d2h_bytes
    )
    assert driver.engine.kv.peak_streamed == audit.peak_streamed


# -- the identity matrix (design 8.1)

AXES: dict[str, tuple[Any, ...]] = {
    "mode": ("resident", "in_place", "stream 2", "stream 3", "stream 4"),
    "prefill": ("whole", "chunked"),
    "prefix_cache": (True, False),
    "batch": ("one", "many", "many, preempted"),
    # Layers, heads, windows and caps are all that tiers know of a model.
    "name": ("llama", "qwen3-window", "gemma2", "gemma3", "gemma4-shared"),
}
BREADTH = AXES | {"name": ("qwen3", "mistral-window")}
Case = tuple[Any, ...]


def pairwise_cases(axes: dict[str, tuple[Any, ...]]) -> list[Case]:
    """Few rows of the product in which every two values of two axes still meet (greedy cover)."""
    product = list(itertools.product(*axes.values()))
    missing = {pair for case in product for pair in _pairs(case)}
    chosen: list[Case] = []
    while missing:
        best = max(product, key=lambda case: len(missing & _pairs(case)))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(case: Case) -> set[tuple[tuple[int, Any], ...]]:
    return set(itertools.combinations(enumerate(case), 2))


def matrix_prompts() -> list[list[int]]:
    """Lengths around the block, a long one, and beginnings shared in whole and in part."""
    prompts = [some_ids(n, n) for n in (1, 15, 16, 17, 40, 70)]
    return [*prompts, prompts[4][:24], [*prompts[4], 5]]


def matrix_settings(mode: str, prefill: str, prefix_cache: bool, batch: str) -> dict[str, Any]:
    preempted = batch == "many, preempted"
    offload: dict[str, Any] = {"num_gpu_blocks": 14 if preempted else 120}
    if mode != "resident":
        offload = {"num_gpu_blocks": 6, "host_blocks": 9 if preempted else 120}
        offload |= IN_PLACE if mode == "in_place" else STREAM
    if mode.startswith("stream"):
        offload |= {"ring_slots": int(mode[-1]), "debug_copy_delay_ms": 0.1}
    return offload | {
        "max_num_batched_tokens": 11 if prefill == "chunked" else 256,
        "max_num_seqs": 1 if batch == "one" else 8,
        "enable_prefix_caching": prefix_cache,
        "decode_reserve_blocks": 0,
    }


def check_case(tiny: Tiny, case: Case) -> None:
    """All prompts at once, then all again (prefix hits, by then on either tier)."""
    mode, prefill, prefix_cache, batch, name = case
    path = tiny(name)
    driver = make_driver(path, **matrix_settings(mode, prefill, prefix_cache, batch))
    prompts = matrix_prompts()
    preemptions = cached = 0
    num_out = 24 if batch == "many, preempted" else 10
    for _ in range(2):
        outputs = driver.run(prompts, greedy(num_out))
        assert_greedy(path, prompts, outputs, num_out)
        preemptions += sum(output.metrics.num_preemptions for output in outputs)
        cached += sum(output.num_cached_tokens for output in outputs)
    may_need_less = driver.engine.kv.spec.window  # KV that its windows have left is given back
    run_fewer = driver.engine.kv.spec.kept_blocks > 1  # as many as the device holds windows of
    assert may_need_less or run_fewer or (preemptions > 0) == (batch == "many, preempted")
    # A hit needs the block with a snapshot, too: few outlive requests that are preempted.
    may_lose_hits = driver.engine.kv.spec.recurrent is not None and preemptions > 0
    assert may_lose_hits or (cached > 0) == prefix_cache
    assert_bytes_add_up(driver, host_pressure=True)
    counters, peak = driver.engine.kv.counters, driver.engine.kv.peak_streamed
    assert may_need_less or (counters.h2d_bytes > 0) == mode.startswith("stream")
    assert may_need_less or (peak > 0) == (mode != "resident")
    driver.engine.close()


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "case",
    [
        *pairwise_cases(AXES),
        *(pytest.param(case, marks=pytest.mark.breadth) for case in pairwise_cases(BREADTH)),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_identity_matrix(tiny: Tiny, case: Case) -> None:
    check_case(tiny, case)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("mode", AXES["mode"])
def test_identity_matrix_in_full(tiny: Tiny, mode: str, name: str) -> None:
    for rest in itertools.product(*list(AXES.values())[1:-1]):
        check_case(tiny, (mode, *rest, name))


def test_the_pairwise_cases_hold_every_pair() -> None:
    product = itertools.product(*AXES.values())
    chosen = {pair for case in pairwise_cases(AXES) for pair in _pairs(case)}
    assert chosen == {pair for case in product for pair in _pairs(case)}


# -- the same bits

LAYOUTS: dict[str, dict[str, Any]] = {
    "resident": {"num_gpu_blocks": 100},
    "in place": IN_PLACE | {"num_gpu_blocks": 7},
    "stream, ring 2": STREAM | {"num_gpu_blocks": 7, "debug_copy_delay_ms": 0.2},
    "stream, ring 4": STREAM | {"num_gpu_blocks": 9, "ring_slots": 4, "slot_tokens": BLOCK},
}


@pytest.mark.some(1)
@pytest.mark.parametrize("backend", ["C kernel", "torch"])
def test_logits_are_bitwise_equal(
    tiny: Tiny, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the same schedule: mixed batches, chunks across blocks, a shared prefix."""
    if backend == "torch":
        monkeypatch.setattr(
            parts, "make_attention", lambda *args: (TorchAttention(args[-1].config), "")
        )
    path = tiny("qwen3")
    long = some_ids(1, 90)
    prompts = [long, some_ids(2, 33), [*long[:50], *some_ids(3, 5)]]
    runs: dict[str, tuple[list[Any], list[list[int]], list[Tensor]]] = {}
    for layout, settings in LAYOUTS.items():
        driver = make_driver(path, max_num_batched_tokens=20, max_num_seqs=3, **settings)
        outputs = driver.run(prompts, greedy(20))
        logits = [torch.stack(driver.logits[output.request_id]) for output in outputs]
        runs[layout] = driver.audit.schedule, token_ids(outputs), logits
        streamed = driver.engine.kv.counters.h2d_bytes
        assert (streamed > 10 * driver.engine.kv.spec.block_bytes) == layout.startswith("stream")
        assert (driver.engine.kv.peak_streamed > 1) == (layout != "resident")
        assert_bytes_add_up(driver)
        driver.engine.close()
    schedule, ids, logits = runs["resident"]
    assert ids == [expected(path, p, 20, i) for p, i in zip(prompts, ids, strict=True)]
    assert max(map(len, schedule)) == 3
    for layout in LAYOUTS:
        assert runs[layout][0] == schedule, "the work was cut up differently: nothing to compare"
        for ours, resident in zip(runs[layout][2], logits, strict=True):
            assert torch.equal(ours, resident), layout


@pytest.mark.parametrize("layout", ["in place", "stream, ring 2"])
def test_the_plain_backend_equals_transformers(
    tiny: Tiny, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        parts, "make_attention", lambda *args: (TorchAttention(args[-1].config), "")
    )
    path = tiny("llama")
    driver = make_driver(path, max_num_batched_tokens=30, max_num_seqs=4, **LAYOUTS[layout])
    assert driver.engine.plan.attention == "torch"
    prompts = matrix_prompts()
    outputs = driver.run(prompts, greedy(10))
    assert_greedy(path, prompts, outputs, 10)
    assert_logits_are_transformers(driver, path, outputs)
    driver.engine.close()


# -- block boundaries, tails, prefix hits


@pytest.mark.some(2)
@pytest.mark.parametrize("mode", ["stream", "in_place"])
@pytest.mark.parametrize("block", [3, 4])
def test_decode_crosses_boundaries_from_every_tail_phase(tiny: Tiny, mode: str, block: int) -> None:
    """Prompts of k x block - 1, k x block, k x block + 1 and all between; three boundaries each.

    Two device blocks: everything but the tail is read from the host, and in a batch even tails
    leave the device between two chunks of a prompt.
    """
    path = tiny("llama")
    settings = (STREAM if mode == "stream" else IN_PLACE) | {"kvcache_block_size": block}
    lengths = range(4 * block - 1, 5 * block + 2)
    prompts = [some_ids(100 + n, n) for n in lengths]
    num_out = 3 * block + 1
    for batch in ({"num_gpu_blocks": 2}, {"num_gpu_blocks": 5, "max_num_batched_tokens": 7}):
        driver = make_driver(
            path, **(settings | {"max_num_seqs": 4, "enable_prefix_caching": False} | batch)
        )
        outputs = driver.run(prompts, greedy(num_out))
        assert_greedy(path, prompts, outputs, num_out)
        assert driver.audit.peak_streamed == (1 if batch["num_gpu_blocks"] == 2 else 4)
        assert_bytes_add_up(driver)
        driver.engine.close()


@pytest.mark.some(1)
@pytest.mark.parametrize("device_blocks", [1, 2, 3])
def test_a_long_answer_in_a_tiny_device_pool(tiny: Tiny, device_blocks: int) -> None:
    """From 5 tokens to 165, then the same conversation goes on."""
    path = tiny("llama")
    driver = make_driver(path, num_gpu_blocks=device_blocks, **STREAM)
    prompt = some_ids(9, 5)
    answer = driver.run([prompt], greedy(160))[0].outputs[0].token_ids
    assert answer == expected(path, prompt, 160, answer)
    follow_up = [*prompt, *answer, 7]
    output = driver.run([follow_up], greedy(10))[0]
    assert_greedy(path, [follow_up], [output], 10)
    assert output.num_cached_tokens == 164 // BLOCK * BLOCK
    assert_bytes_add_up(driver)
    driver.engine.close()


@pytest.mark.parametrize("mode", ["stream", "in_place"])
def test_full_prefix_hits_whose_blocks_lie_on_the_host(tiny: Tiny, mode: str) -> None:
    """One token is computed, nothing is written, and everything is read from the other tier."""
    path = tiny("llama")
    settings = STREAM if mode == "stream" else IN_PLACE
    driver = make_driver(path, num_gpu_blocks=2, **settings)
    prompt = some_ids(5, 6 * BLOCK)
    driver.run([prompt], greedy(1))
    driver.run([some_ids(6, 3 * BLOCK)], greedy(1))  # takes the device slots
    before = driver.engine.kv.counters.h2d_bytes
    on_host = [b for b in driver.engine.kv.blocks.cached if b.device_slot is None]
    assert len(on_host) >= 6
    output = driver.run([prompt], greedy(12))[0]
    assert output.num_cached_tokens == len(prompt) - 1
    assert_greedy(path, [prompt], [output], 12)
    assert driver.audit.schedule[-12] == ((output.request_id, 1),)
    moved = driver.engine.kv.counters.h2d_bytes - before
    assert (moved >= 12 * 4 * driver.engine.kv.spec.block_bytes) == (mode == "stream")
    assert_bytes_add_up(driver)
    driver.engine.close()


def test_many_share_a_prefix_that_has_left_the_device(tiny: Tiny) -> None:
    """One crossing a step serves them all, and own tails stay apart."""
    path = tiny("llama")
    driver = make_driver(path, num_gpu_blocks=6, max_num_seqs=4, **STREAM)
    prefix = some_ids(8, 10 * BLOCK)
    driver.run([prefix, some_ids(4, 50)], greedy(1))
    prompts = [[*prefix, i, i + 1, i * 3] for i in range(4)]
    before = driver.engine.kv.counters.h2d_bytes
    outputs = driver.run(prompts, greedy(10))
    assert_greedy(path, prompts, outputs, 10)
    assert all(output.num_cached_tokens == len(prefix) for output in outputs)
    assert driver.audit.peak_streamed == 4
    # Four sequences of twelve blocks, but each step brings ten blocks and own ones at most.
    moved = driver.engine.kv.counters.h2d_bytes - before
    assert moved <= 12 * (10 + 2 * 4) * driver.engine.kv.spec.block_bytes
    assert_bytes_add_up(driver)
    driver.engine.close()


# -- what moves


def test_nothing_streams_while_the_running_set_fits(tiny: Tiny) -> None:
    """Request after request, far more KV than the device holds, but never at the same time."""
    path = tiny("llama")
    driver = make_driver(
        path, num_gpu_blocks=12, max_num_seqs=2, enable_prefix_caching=False, **STREAM
    )
    prompts = [some_ids(n, 30) for n in range(8)]
    outputs = driver.run(prompts, greedy(10))
    assert_greedy(path, prompts, outputs, 10)
    counters = driver.engine.kv.counters
    assert (counters.h2d_bytes, counters.d2h_bytes, driver.engine.kv.peak_streamed) == (0, 0, 0)
    driver.engine.close()


def test_prefix_hits_return_to_a_device_with_room(tiny: Tiny) -> None:
    """A hit on the host is loaded once, not streamed every step."""
    path = tiny("llama")
    driver = make_driver(path, num_gpu_blocks=12, max_num_seqs=1, **STREAM)
    first = some_ids(1, 6 * BLOCK)
    driver.run([first, some_ids(2, 80)], greedy(2))
    before = driver.engine.kv.counters.h2d_bytes
    output = driver.run([first], greedy(15))[0]
    assert_greedy(path, [first], [output], 15)
    moved = driver.engine.kv.counters.h2d_bytes - before
    assert 0 < moved <= 6 * driver.engine.kv.spec.block_bytes
    assert_bytes_add_up(driver)
    driver.engine.close()


def test_every_token_goes_to_the_host_once(tiny: Tiny) -> None:
    """Without host pressure d2h is write-through: no block is stored twice."""
    path = tiny("llama")
    driver = make_driver(path, num_gpu_blocks=4, enable_prefix_caching=False, **STREAM)
    prompts = [some_ids(n, 60 + n) for n in range(3)]
    driver.run(prompts, greedy(10))
    spec, counters = driver.engine.kv.spec, driver.engine.kv.counters
    tokens = sum(len(prompt) + 10 - 1 for prompt in prompts)
    on_device = spec.num_blocks * spec.block_size
    token_bytes = spec.block_bytes // spec.block_size
    assert (tokens - on_device * 3) * token_bytes <= counters.d2h_bytes <= tokens * token_bytes
    assert_bytes_add_up(driver)
    driver.engine.close()


def test_partial_tails_leave_the_device_and_come_back(tiny: Tiny) -> None:
    """Three prompts in chunks of three tokens: when two of them cross a boundary at once, the third
    has no block to write to, its tail goes to the host, and only valid tokens cross the link.
    """
    path = tiny("llama")
    driver = make_driver(
        path,
        num_gpu_blocks=4,
        max_num_seqs=3,
        max_num_batched_tokens=12,
        max_num_partial_prefills=3,
        max_long_partial_prefills=3,
        long_prefill_token_threshold=3,
        enable_prefix_caching=False,
        debug_copy_delay_ms=0.1,
        **STREAM,
    )
    prompts = [some_ids(n, 70) for n in range(3)]
    outputs = driver.run(prompts, greedy(10))
    assert_greedy(path, prompts, outputs, 10)
    assert driver.engine.kv.counters.h2d_bytes % driver.engine.kv.spec.block_bytes
    assert_bytes_add_up(driver)
    driver.engine.close()


@pytest.mark.parametrize(
    "settings",
    [{}, {"heads": ((2, 3), (1, 4)), "sources": (0, 1, 1, 0)}, {"parts": 1}],
    ids=["equal layers", "layers of two shapes, two that read the others'", "K that is V, too"],
)
def test_bytes_survive_a_round_trip(settings: dict[str, Any]) -> None:
    """Out to the host, poisoned on the device, back in through a load and through the ring."""
    device = CheckedDevice(CpuDevice(2, copy_workers=True))
    spec = replace(KVSpec(((1, 3),) * 2, 4, 4, torch.float32, 6, 2, 2), **settings)
    memory = KVMemory(spec, device, debug=True)
    pool, engine = memory.pool, memory.offload
    assert engine is not None
    assert sum(layer.nbytes for layer in pool) == spec.num_blocks * spec.block_bytes
    assert len(engine.ring) * engine.ring.whole(0).nbytes == spec.ring_bytes
    content = [torch.randn(layer.shape) for layer in pool]
    for layer in range(2):
        memory.before_write(layer, (0, 1, 2, 3))
        pool[layer].copy_(content[layer])
    stores = (Store(0, 4, 0, 4), Store(1, 5, 0, 4), Store(2, 0, 0, 3))
    assert TransferRun(engine, StepTransfers(stores=stores)).finish()
    for slot in range(4):
        memory.poison(slot, None)
    transfers = StepTransfers(loads=(Load(0, 3, 3),), fills=((4, 5), (5,)))
    run = TransferRun(engine, transfers)
    for layer, source in enumerate(spec.layer_sources):
        if layer < 2:
            run.await_loads(layer)
        memory.before_read(source, (3,))
        assert torch.equal(pool[source][3, :, :3], content[source][2, :, :3])
        assert pool[source][3, :, 3:].isnan().all()
        for index, slots in enumerate([(0, 1), (1,)]):
            ring = run.fill(layer, index)
            for at, slot in enumerate(slots):
                assert torch.equal(ring[at], content[source][slot])
            assert ring[len(slots) :].isnan().all()
            run.drained(layer, index)
    assert run.finish()
    token_bytes = sum(spec.parts * heads * dim * 4 for heads, dim in spec.heads)
    assert spec.block_bytes == 4 * token_bytes
    assert engine.counters.d2h_bytes == (4 + 4 + 3) * token_bytes
    assert engine.counters.h2d_bytes == 3 * token_bytes + 3 * sum(spec.read_bytes)
    memory.close()


@pytest.mark.skipif(not STATM.exists(), reason="this system does not tell a process's memory")
def test_states_that_nobody_uses_take_no_memory() -> None:
    recurrent = RecurrentConfig((0, 1), 1, 64, 64, 64, 4)
    spec = KVSpec(((1, 3),) * 2, 4, 4, torch.float32, 0, recurrent=recurrent, num_states=127)
    assert spec.state_bytes > 256 << 20
    before = resident_pages()
    memory = KVMemory(spec, CpuDevice(1))
    memory.copy_state(0, 1)
    assert (resident_pages() - before) * mmap.PAGESIZE < 16 << 20
    memory.close()


def test_reads_of_the_host_wait_for_the_store_that_wrote_it() -> None:
    """Loads, fills and reads in place, each right after a store of which nobody else waited."""
    device = CheckedDevice(CpuDevice(2, copy_workers=True, max_delay_s=0.002))
    pool = torch.empty(2, 4, 2, 4, 1, 3)
    spec = KVSpec(((1, 3),) * 2, 4, 4, torch.float32, 3, 2, 1)
    engine = OffloadEngine(device, pool, spec, debug=True)
    content = torch.randn(pool.shape)
    pool.copy_(content)
    for slot in range(3):
        assert TransferRun(engine, StepTransfers(stores=(Store(slot, slot, 0, 4),))).finish()
        run = TransferRun(
            engine,
            [
                StepTransfers(loads=(Load(0, 3, 4),)),
                StepTransfers(fills=((1,),)),
                StepTransfers(),
            ][slot],
        )
        for layer in range(2):
            if slot == 0:
                run.await_loads(layer)
                assert torch.equal(pool[layer][3], content[layer, 0])
            elif slot == 1:
                assert torch.equal(run.fill(layer, 0)[0], content[layer, 1])
                run.drained(layer, 0)
            else:
                assert torch.equal(run.read_host(layer, 0, (2,))[2], content[layer, 2])
        assert run.finish()
    device.close_streams()
    engine.close()


def test_whole_blocks_that_follow_one_another_are_one_copy() -> None:
    """On both sides: not where part of a block is stored, nor where one side goes on elsewhere."""
    whole = [Store(3, 7, 0, 4), Store(4, 8, 0, 4), Store(0, 10, 0, 4), Store(9, 11, 0, 4)]
    part = Store(5, 9, 1, 4)
    runs = store_runs([whole[3], part, whole[0], whole[2], whole[1]], block_size=4)
    assert runs == [whole[:2], [part], [whole[2]], [whole[3]]]
    assert store_runs([part, Store(6, 10, 0, 4)], block_size=4) == [[part], [Store(6, 10, 0, 4)]]


def test_copies_are_counted_as_found_ready_or_waited_for(tiny: Tiny) -> None:
    driver = make_driver(tiny("llama"), num_gpu_blocks=2, **STREAM)
    driver.run([some_ids(1, 60)], greedy(4))
    counters = driver.engine.kv.counters
    waits = counters.num_stalls + counters.num_prefetch_hits
    assert waits >= 4 * 3 * 3  # steps x layers x fills
    assert driver.engine.device.num_checked > waits
    driver.engine.close()


# -- admission and pressure


@pytest.fixture
def small(tiny: Tiny) -> Iterator[Driver]:
    """4 device and 9 host blocks, 2 of them reserve: 11 blocks = 88 tokens."""
    driver = make_driver(tiny("llama"), 9, num_gpu_blocks=4, **STREAM)
    yield driver
    driver.engine.close()


def test_refused_only_what_could_not_finish_alone(tiny: Tiny, small: Driver) -> None:
    assert small.engine.plan.max_model_len == 88
    with pytest.raises(PromptTooLongError, match="88"):
        small.engine.add_request(some_ids(1, 88), greedy(1))
    with pytest.raises(PromptTooLongError) as refused:
        small.engine.add_request(some_ids(1, 60), greedy(29))
    numbers = re.findall(r"\d+", str(refused.value))
    assert numbers == ["60", "29", "89", "88", "4", "9", "2", "8", *("0", "01")]
    assert "set kv_offload_gib=0.01" in str(refused.value)
    prompt = some_ids(1, 60)
    output = small.run([prompt], greedy(28))[0]
    assert_greedy(tiny("llama"), [prompt], [output], 28)
    assert small.engine.kv.blocks.num_available == 11


def test_what_does_not_fit_now_is_queued(tiny: Tiny, small: Driver) -> None:
    """Ten requests of which two fit: all are answered, in order of arrival."""
    prompts = [some_ids(n, 40) for n in range(10)]
    outputs = small.run(prompts, greedy(8))
    assert_greedy(tiny("llama"), prompts, outputs, 8)
    started = [output.metrics.first_scheduled_time for output in outputs]
    assert started == sorted(started)


@pytest.mark.parametrize("mode", ["stream", "in_place"])
@pytest.mark.parametrize("device_blocks", [1, 2])
@pytest.mark.parametrize("host_blocks", [3, 12])
def test_the_smallest_pools_serve_what_fits(
    tiny: Tiny, device_blocks: int, host_blocks: int, mode: str
) -> None:
    path = tiny("llama")
    settings = STREAM if mode == "stream" else IN_PLACE
    driver = make_driver(
        path, host_blocks, num_gpu_blocks=device_blocks, decode_reserve_blocks=0, **settings
    )
    room = (device_blocks + host_blocks - 1) * BLOCK
    assert driver.engine.kv.spec.num_tokens == room
    prompts = [some_ids(n, n) for n in (1, 8, 9, room - 10)]
    outputs = driver.run(prompts, greedy(10))
    assert_greedy(path, prompts, outputs, 10)
    driver.engine.close()


def test_more_sequences_than_device_blocks(tiny: Tiny) -> None:
    """Four blocks, twelve requests that would all like to run."""
    path = tiny("llama")
    driver = make_driver(path, num_gpu_blocks=4, max_num_seqs=12, **STREAM)
    prompts = [some_ids(n, 20 + n) for n in range(12)]
    outputs = driver.run(prompts, greedy(12))
    assert_greedy(path, prompts, outputs, 12)
    assert sum(output.metrics.num_preemptions for output in outputs) == 0
    assert 2 <= max(map(len, driver.audit.schedule)) <= 4
    driver.engine.close()


def test_host_pressure_preempts_the_youngest_and_the_oldest_goes_on(tiny: Tiny) -> None:
    path = tiny("llama")
    driver = make_driver(
        path, 12, num_gpu_blocks=6, decode_reserve_blocks=0, max_num_seqs=4, **STREAM
    )
    prompts = [some_ids(n, 30) for n in range(4)]
    params = greedy(60)
    ids = [driver.engine.add_request(prompt, params) for prompt in prompts]
    outputs = driver.drain()
    assert_greedy(path, prompts, [outputs[i] for i in ids], 60)
    preemptions = [outputs[i].metrics.num_preemptions for i in ids]
    assert preemptions[0] == 0 and preemptions[-1] > 0
    finished = [outputs[i].metrics.finished_time for i in ids]
    assert finished[0] == min(finished)
    # Once its prompt is done the oldest has a token in every step until it ends.
    turns = [ids[0] in dict(step) for step in driver.audit.schedule]
    assert all(turns[: 60 + turns.index(True)])
    driver.engine.close()


# -- a chunk larger than the device, closing


def test_a_chunk_is_cut_to_what_the_device_holds(tiny: Tiny) -> None:
    path = tiny("llama")
    driver = make_driver(path, num_gpu_blocks=3, max_num_batched_tokens=512, **STREAM)
    prompt = some_ids(3, 100)
    assert driver.engine.plan.max_num_batched_tokens == 3 * BLOCK
    assert_greedy(path, [prompt], driver.run([prompt], greedy(5)), 5)
    assert max(dict(step)[0] for step in driver.audit.schedule) == 3 * BLOCK
    driver.engine.close()


def test_closing_ends_the_copy_threads_and_a_second_engine_works(tiny: Tiny) -> None:
    path, prompt = tiny("llama"), some_ids(2, 50)
    before = set(threading.enumerate())
    for _ in range(2):
        driver = make_driver(path, num_gpu_blocks=2, **STREAM)
        workers = set(threading.enumerate()) - before
        names = {thread.name for thread in workers}
        assert {"nanoengine-h2d", "nanoengine-d2h"} <= names  # that of the host pool may have ended
        driver.engine.add_request(prompt, greedy(50))
        driver.step()
        driver.engine.close()  # with a request half way
        assert not any(thread.is_alive() for thread in workers)
    driver = make_driver(path, num_gpu_blocks=2, **STREAM)
    assert_greedy(path, [prompt], driver.run([prompt], greedy(5)), 5)
    driver.engine.close()


def test_in_place_has_no_ring_and_no_threads(tiny: Tiny) -> None:
    before = set(threading.enumerate())
    driver = make_driver(tiny("llama"), num_gpu_blocks=2, **IN_PLACE)
    driver.run([some_ids(1, 60)], greedy(4))
    assert not set(threading.enumerate()) - before
    assert driver.engine.plan.kv.ring_bytes == 0 and driver.audit.peak_streamed == 1
    driver.engine.close()
