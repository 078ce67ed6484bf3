"""Both tiers for everyone: prefix hits on either, copies that fail, one pass for many, fairness.

Streamed runs have the checking device, NaN in all undelivered memory and random copy delays on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver import Driver, assert_all_free, assert_greedy, fail_copies, host_gib

from nanoengine import InvalidPromptError, SamplingParams
from nanoengine.api.llm import LLM
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import TransferError

BLOCK = 4
MODES = ("stream", "in_place")
Tiny = Callable[[str], Path]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def some_ids(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def make_driver(
    path: Path, mode: str = "stream", device: int = 6, host: int = 60, **more: Any
) -> Driver:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "kvcache_block_size": BLOCK,
        "num_gpu_blocks": device,
        "enable_cpu_offload": True,
        "offload_mode": mode,
        "kv_offload_gib": host_gib(path, host, BLOCK),
        "ring_slots": 2,
        "slot_tokens": BLOCK,
        "debug_kv": True,
        "debug_copy_delay_ms": 0.05,
        "speculative": "off",
    }
    return Driver(LLMEngine(path, **(settings | more)))


def computed(driver: Driver) -> int:
    """Tokens that all steps so far computed."""
    return sum(count for step in driver.audit.schedule for _, count in step)


# -- prefix reuse


@pytest.mark.parametrize("mode", MODES)
def test_hits_are_told_apart_by_tier_and_nothing_is_computed_twice(tiny: Tiny, mode: str) -> None:
    path, prompt = tiny("llama"), some_ids(1, 10 * BLOCK)
    driver = make_driver(path, mode)
    driver.run([prompt], greedy(2))
    before = computed(driver)
    (again,) = driver.run([prompt], greedy(2))
    assert_greedy(path, [prompt], [again], 2)
    assert computed(driver) - before == 2  # the last prompt token and one that was generated
    assert again.num_cached_tokens == 10 * BLOCK - 1
    # 6 device blocks held the last ones and are all that can be hit there.
    assert 4 * BLOCK <= again.num_host_cached_tokens < again.num_cached_tokens
    driver.engine.close()


def test_resident_hits_are_no_host_hits(tiny: Tiny) -> None:
    driver = make_driver(tiny("llama"), device=40)
    driver.run([some_ids(1, 20)], greedy(2))
    (again,) = driver.run([some_ids(1, 20)], greedy(2))
    assert (again.num_cached_tokens, again.num_host_cached_tokens) == (19, 0)
    driver.engine.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [256, 7])
def test_a_prefix_that_is_being_computed_is_waited_for(tiny: Tiny, mode: str, chunk: int) -> None:
    """Six equal beginnings queued at once: their full blocks are computed by the first alone."""
    path, shared = tiny("llama"), some_ids(2, 8 * BLOCK)
    prompts = [shared + some_ids(10 + i, 3) for i in range(5)] + [shared]
    driver = make_driver(path, mode, device=16, max_num_batched_tokens=chunk, max_num_seqs=7)
    outputs = driver.run(prompts, greedy(5))
    assert_greedy(path, prompts, outputs, 5)
    assert outputs[0].num_cached_tokens == 0
    assert all(output.num_cached_tokens >= 8 * BLOCK - 1 for output in outputs[1:])
    assert computed(driver) == len(shared) + 5 * 3 + 1 + 6 * 4
    assert_all_free(driver.engine)
    driver.engine.close()


class CountedTables(dict[int, Any]):
    """Counts how many tables loops look at."""

    num_looks = 0

    def values(self) -> Any:
        self.num_looks += len(self)
        return super().values()

    def items(self) -> Any:
        self.num_looks += len(self)
        return super().items()


def test_those_who_wait_for_a_prefix_do_not_look_at_each_other(tiny: Tiny) -> None:
    engine = LLMEngine(tiny("llama"), device="cpu", num_gpu_blocks=20, kvcache_block_size=BLOCK)
    engine.kv.tables = tables = CountedTables()
    prompt = some_ids(1, 5 * BLOCK)
    for i in range(100):
        engine.add_request([*prompt, i], greedy(1))
    engine.step()
    assert len(tables) == 99 and tables.num_looks <= 10 * 99
    engine.close()


def test_an_aborted_owner_leaves_its_followers_to_themselves(tiny: Tiny) -> None:
    path, prompt = tiny("llama"), some_ids(3, 10 * BLOCK)
    driver = make_driver(path, max_num_batched_tokens=9, max_num_seqs=4, device=20)
    first, second = (driver.engine.add_request(prompt, greedy(3)) for _ in range(2))
    driver.step()
    driver.step()
    assert {request for step in driver.audit.schedule for request, _ in step} == {first}
    driver.engine.abort(first)
    outputs = driver.drain()
    assert_greedy(path, [prompt], [outputs[second]], 3)
    assert 0 < outputs[second].num_cached_tokens < 10 * BLOCK  # what the first had computed
    assert_all_free(driver.engine)
    driver.engine.close()


def test_salts_keep_equal_prompts_apart(tiny: Tiny, tmp_path: Path) -> None:
    prompt = {"prompt_token_ids": some_ids(4, 12)}
    with LLM(tiny("llama"), kvcache_block_size=BLOCK, dtype="float32") as llm:
        cached = [
            llm.generate(prompt | extra, greedy(2), use_tqdm=False)[0].num_cached_tokens
            for extra in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {})
        ]
        assert cached == [0, 0, 0, 11, 11]
        for salt in ("", 7):
            with pytest.raises(InvalidPromptError, match="cache_salt must be a non-empty string"):
                llm.generate(prompt | {"cache_salt": salt}, greedy(2), use_tqdm=False)
        llm.reset_prefix_cache()
        assert llm.generate(prompt, greedy(2), use_tqdm=False)[0].num_cached_tokens == 0


# -- one pass for many


@pytest.mark.parametrize("num_requests", [1, 8])
def test_a_shared_prefix_crosses_the_link_once_for_all(tiny: Tiny, num_requests: int) -> None:
    """The bytes of a decode step of 8 requests are those of one, but for their own ends."""
    path, document = tiny("llama"), some_ids(5, 40 * BLOCK)
    prompts = [document + some_ids(50 + i, 2) for i in range(num_requests)]
    driver = make_driver(path, device=12, host=80, stream_mib_per_step=1e6)
    for prompt in prompts:
        driver.engine.add_request(prompt, greedy(40))
    while any(
        seq.is_prefill
        for seq in [*driver.engine.scheduler.running, *driver.engine.scheduler.waiting]
    ):
        driver.step()
    kv = driver.engine.kv
    before, num_steps = kv.counters.h2d_bytes, 4
    for _ in range(num_steps):
        driver.step()
    assert len(driver.audit.schedule[-1]) == num_requests
    per_step = (kv.counters.h2d_bytes - before) / num_steps / kv.spec.block_bytes
    assert 40 - 12 <= per_step <= 40 + 1  # and now and then the end of a request
    driver.engine.close()


# -- copies that fail


@pytest.mark.some(4)
@pytest.mark.parametrize("number", [0, 1, 5, 11, 30])
@pytest.mark.parametrize("stream", ["h2d", "d2h"])
def test_a_failed_copy_fails_its_request_only(tiny: Tiny, stream: str, number: int) -> None:
    path = tiny("llama")
    driver = make_driver(path, device=8, max_num_batched_tokens=16, max_num_seqs=4)
    prompts = [some_ids(60 + i, 24 + i) for i in range(4)]
    fail_copies(getattr(driver.engine.device, stream), {number})
    outputs = driver.run(prompts, greedy(10))
    failed = [output for output in outputs if output.error]
    assert len(failed) == 1
    assert isinstance(failed[0].error, TransferError) and "broadcast" in str(failed[0].error)
    assert failed[0].outputs[0].finish_reason == "error"
    for prompt, output in zip(prompts, outputs, strict=True):
        if not output.error:
            assert_greedy(path, [prompt], [output], 10)
    # Nothing of the broken content can be found: the failed prompt is right when it comes again.
    index = outputs.index(failed[0])
    (again,) = driver.run([prompts[index]], greedy(10))
    assert_greedy(path, [prompts[index]], [again], 10)
    assert_all_free(driver.engine)
    driver.engine.close()


def test_a_failed_store_of_a_cached_block_is_a_miss_later(tiny: Tiny) -> None:
    """Nobody holds the block any more, so nobody fails; but it must not be found."""
    path = tiny("llama")
    driver = make_driver(path, device=6, host=20)
    prompt = some_ids(7, 5 * BLOCK)
    driver.run([prompt], greedy(1))
    fail_copies(driver.engine.device.d2h, {0})
    (other,) = driver.run([some_ids(8, 5 * BLOCK)], greedy(1))  # pushes the cached blocks out
    assert other.error is None
    driver.engine.device.synchronize()
    (again,) = driver.run([prompt], greedy(3))
    assert again.error is None or "broadcast" in str(again.error)
    (again,) = driver.run([prompt], greedy(3))
    assert_greedy(path, [prompt], [again], 3)
    assert_all_free(driver.engine)
    driver.engine.close()


def test_a_shared_block_that_is_lost_fails_all_who_hold_it(tiny: Tiny) -> None:
    path, shared = tiny("llama"), some_ids(9, 12 * BLOCK)
    prompts = [shared + some_ids(90 + i, 3) for i in range(3)] + [some_ids(99, 9)]
    driver = make_driver(path, device=8, host=60)
    for prompt in prompts:
        driver.engine.add_request(prompt, greedy(30))
    while len(driver.engine.scheduler.running) < 4:
        driver.step()
    fail_copies(driver.engine.device.h2d, {2})
    outputs = driver.drain()
    reasons = [outputs[i].outputs[0].finish_reason for i in range(4)]
    assert reasons == ["error"] * 3 + ["length"]
    assert_greedy(path, [prompts[3]], [outputs[3]], 30)
    assert_all_free(driver.engine)
    driver.engine.close()


# -- fairness


def test_a_long_prefill_lets_a_short_request_in_at_once(tiny: Tiny) -> None:
    """Its first token comes within two steps of arriving, whenever it arrives."""
    path = tiny("llama")
    driver = make_driver(path, device=6, host=150, max_num_batched_tokens=16, max_num_seqs=4)
    long = driver.engine.add_request(some_ids(1, 400), greedy(2))
    waits = []
    for arrival in range(3):
        for _ in range(3 + arrival):
            driver.step()
        assert driver.engine.scheduler.running[0].is_prefill
        short = driver.engine.add_request(some_ids(2 + arrival, 7), greedy(1))
        steps = 1
        while not any(output.request_id == short for output in driver.step()):
            steps += 1
        waits.append(steps)
    assert max(waits) <= 2
    assert long in driver.drain()
    driver.engine.close()


@pytest.mark.breadth
@pytest.mark.parametrize("budget", [10, pytest.param(40, marks=pytest.mark.breadth)])
def test_streamed_requests_rest_beside_resident_ones_and_nobody_starves(
    tiny: Tiny, budget: int
) -> None:
    """Bytes keep to the budget on average; all answers are right; nobody waits for ever."""
    path = tiny("llama")
    block_bytes = make_driver(path).engine.kv.spec.block_bytes
    mib = budget * block_bytes / (1 << 20)
    driver = make_driver(path, device=30, host=400, stream_mib_per_step=mib)
    prompts = [some_ids(20, 200), some_ids(21, 280), some_ids(22, 6)]
    numbers = [48, 48, 90]
    ids = list(map(driver.engine.add_request, prompts, map(greedy, numbers)))
    scheduler, kv = driver.engine.scheduler, driver.engine.kv
    while scheduler.waiting or any(seq.is_prefill for seq in scheduler.running):
        driver.step()
    begin, before, num_steps = len(driver.audit.schedule), kv.counters.h2d_bytes, 44
    outputs = {}
    for _ in range(num_steps):
        outputs |= {output.request_id: output for output in driver.step()}
    steps = [{request for request, _ in step} for step in driver.audit.schedule[begin:]]
    assert all(ids[2] in step for step in steps), "the resident one is in every step"
    turns = [sum(request in step for step in steps) for request in ids[:2]]
    assert min(turns) >= 3 and max(turns) - min(turns) <= 1
    moved = (kv.counters.h2d_bytes - before) / block_bytes
    assert num_steps * budget * 0.4 <= moved <= num_steps * budget + 90  # a turn may be under way
    outputs |= driver.drain()
    for request, prompt, n in zip(ids, prompts, numbers, strict=True):
        assert_greedy(path, [prompt], [outputs[request]], n)
    driver.engine.close()


# -- stop


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_closing_in_the_middle_of_transfers_frees_everything(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, is_cut_off: bool
) -> None:
    """Stores of the last step are under way, and fills, too, where the step was cut off."""
    for name in ("NUM_ROUNDS", "NUM_WARMUPS", "NUM_STEPS"):
        monkeypatch.setattr(f"nanoengine.startup.probe.{name}", 1)
    path = tiny("llama")
    driver = make_driver(path, debug_copy_delay_ms=5.0)
    for seed in range(3):
        driver.engine.add_request(some_ids(seed, 40), greedy(20))
    for _ in range(3):
        driver.step()
    kv, device = driver.engine.kv, driver.engine.device
    workers = [device.h2d.inner, device.d2h.inner]
    if is_cut_off:
        step = kv.open_step(driver.engine.scheduler.schedule())
        assert step.kv.run._filled, "nothing is under way"
    driver.engine.close()
    assert not any(worker.is_alive for worker in workers)
    offload = kv.memory.offload
    assert not offload.host.segments
    assert not kv.memory.pool and not len(offload.ring)
    driver.engine.close()
    again = make_driver(path)
    assert_greedy(path, [some_ids(0, 9)], again.run([some_ids(0, 9)], greedy(3)), 3)
    again.engine.close()


# -- a failed request amid a batch


def test_the_token_of_a_failed_request_goes_to_nobody(tiny: Tiny) -> None:
    """The one that fails samples before its neighbour, in the same step."""
    path, prompts = tiny("llama"), [some_ids(70, 60), some_ids(71, 9)]
    driver = make_driver(path, device=8, stream_mib_per_step=1e6)
    long, short = (driver.engine.add_request(prompt, greedy(12)) for prompt in prompts)
    scheduler = driver.engine.scheduler
    while scheduler.waiting or any(seq.is_prefill for seq in scheduler.running):
        driver.step()
    begin = len(driver.audit.schedule)
    fail_copies(driver.engine.device.h2d, {0})
    outputs = driver.drain()
    assert outputs[long].outputs[0].finish_reason == "error"
    assert_greedy(path, [prompts[1]], [outputs[short]], 12)
    assert driver.audit.schedule[begin] == ((long, 1), (short, 1))
    driver.engine.close()
