"""Nothing of one request reaches another: neighbours that finish, abort and fail, and storms.

The storms run on tiny pools with shared prefixes, aborts and failing steps. Most use hashes for
keys (shadow.py), so every block that is read is checked by value; the last runs a real model.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference, reference_logits
from driver import Driver, assert_greedy, host_gib
from shadow import VOCAB, Boom, ShadowEngine
from torch import Tensor

from nanoengine import PromptTooLongError, SamplingParams
from nanoengine.context import ForwardContext, KVChunk
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.outputs import RequestMetrics, RequestOutput
from nanoengine.sampling_params import SamplingParams as Params
from nanoengine.sequence import (
    Admission,
    Request,
    ScheduledBatch,
    ScheduledSequence,
    SequenceStatus,
)
from nanoengine.sequence import Sequence as EngineSequence

BLOCK = 4
MODES = ("stream", "in_place")
Tiny = Callable[[str], Path]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def make_driver(path: Path, mode: str, device_blocks: int, host_blocks: int, **more: Any) -> Driver:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "kvcache_block_size": BLOCK,
        "num_gpu_blocks": device_blocks,
        "enable_cpu_offload": True,
        "offload_mode": mode,
        "kv_offload_gib": host_gib(path, host_blocks, BLOCK),
        "ring_slots": 2,
        "slot_tokens": BLOCK,
        "debug_kv": True,
        "debug_copy_delay_ms": 0.1,
        "speculative": "off",
    }
    return Driver(LLMEngine(path, **(settings | more)))


def some_ids(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(256) for _ in range(rng.randrange(low, high))]


class FailingAttention:
    """An attention backend that raises once, at one layer, after some of its chunks were read."""

    can_replay = True

    def __init__(self, inner: Any, layer: int, after_chunks: int) -> None:
        self.inner, self.name = inner, "failing"
        self.layer, self.after_chunks, self.has_failed = layer, after_chunks, False

    def run(
        self, layer: int, q: Tensor, ctx: ForwardContext, sinks: Tensor | None = None
    ) -> Tensor:
        if layer == self.layer and not self.has_failed:
            self.has_failed = True
            for _ in itertools.islice(self._read(layer, ctx), self.after_chunks):
                pass
            raise Boom
        out: Tensor = self.inner.run(layer, q, ctx, sinks)
        return out

    def _read(self, layer: int, ctx: ForwardContext) -> Iterable[KVChunk]:
        return ctx.kv.read(layer)


def fail_once(driver: Driver, layer: int, after_chunks: int) -> None:
    """The next step in which the layer attends raises Boom; the one after it works again."""
    runner = driver.engine.runner
    inner = runner.attention
    runner.attention = FailingAttention(inner, layer, after_chunks)
    with pytest.raises(Boom):
        for _ in range(10):  # amid a prompt the last layer attends to nothing
            driver.engine.step()
    runner.attention = inner
    driver.engine.kv.check()


def rows(driver: Driver, request: int) -> Tensor:
    return torch.stack(driver.logits[request])


@pytest.mark.breadth
@pytest.mark.parametrize("mode", ["stream", pytest.param("in_place", marks=pytest.mark.breadth)])
def test_sixteen_requests_equal_sixteen_fresh_engines(tiny: Tiny, mode: str) -> None:
    """Ids and bits, prefix cache off so that the work is the same."""
    path = tiny("qwen3")
    rng = random.Random(16)
    prompts = [some_ids(rng, 1, 50) for _ in range(16)]
    settings = {"enable_prefix_caching": False, "max_num_batched_tokens": 8, "max_num_seqs": 2}
    old = make_driver(path, mode, 3, 40, **settings)
    for prompt in prompts:
        ours = old.run([prompt], greedy(10))[0]
        fresh = make_driver(path, mode, 3, 40, **settings)
        theirs = fresh.run([prompt], greedy(10))[0]
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert torch.equal(rows(old, ours.request_id), rows(fresh, theirs.request_id))
        fresh.engine.close()
    assert (old.engine.kv.counters.h2d_bytes > 0) == (mode == "stream")
    old.engine.close()


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("prefix_cache", "mode"),
    [
        (True, "stream"),
        (False, "in_place"),
        pytest.param(False, "stream", marks=pytest.mark.breadth),
        pytest.param(True, "in_place", marks=pytest.mark.breadth),
    ],
)
def test_sixteen_requests_among_aborted_and_failed_ones(
    tiny: Tiny, mode: str, prefix_cache: bool
) -> None:
    """Between two of them a neighbour is aborted half way, or a step fails amid its copies."""
    path = tiny("llama")
    rng = random.Random(17)
    driver = make_driver(
        path,
        mode,
        3,
        40,
        enable_prefix_caching=prefix_cache,
        max_num_batched_tokens=12,
        max_num_seqs=4,
    )
    for number in range(16):
        prompt = some_ids(rng, 1, 50)
        neighbour = driver.engine.add_request(prompt[:20] + some_ids(rng, 20, 40), greedy(20))
        for _ in range(rng.randrange(8)):
            driver.step()
        if number % 2:
            fail_once(driver, rng.randrange(3), rng.randrange(3))
        driver.engine.abort(neighbour)
        driver.engine.kv.check()
        output = driver.run([prompt], greedy(10))[0]
        assert_greedy(path, [prompt], [output], 10)
        logits = reference_logits(reference(path), prompt + output.outputs[0].token_ids)
        ours = rows(driver, output.request_id)
        torch.testing.assert_close(ours, logits[len(prompt) - 1 : -1], atol=1e-4, rtol=0)
    assert_nothing_is_held(driver)
    driver.engine.close()


@pytest.mark.some(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_failed_step_can_be_run_again(tiny: Tiny, mode: str, layer: int) -> None:
    """Nothing was counted, nothing lost: the same requests go on and their answers are right."""
    path = tiny("llama")
    rng = random.Random(layer)
    prompts = [some_ids(rng, 20, 40) for _ in range(4)]
    driver = make_driver(path, mode, 4, 60, max_num_batched_tokens=16, max_num_seqs=4)
    ids = [driver.engine.add_request(prompt, greedy(14)) for prompt in prompts]
    outputs: dict[int, RequestOutput] = {}
    for after_chunks in (0, 1, 2, 3, 0, 2, 1):
        for _ in range(3):
            outputs |= {output.request_id: output for output in driver.step()}
        fail_once(driver, layer, after_chunks)
    outputs |= driver.drain()
    assert_greedy(path, prompts, [outputs[i] for i in ids], 14)
    assert_nothing_is_held(driver)
    driver.engine.close()


@pytest.mark.parametrize("mode", MODES)
def test_blocks_of_an_aborted_request_are_reused_while_copies_were_under_way(
    tiny: Tiny, mode: str
) -> None:
    """A step fails with fills queued; the abort frees the host blocks they read, and newcomers
    store into those at once.
    """
    path = tiny("llama")
    rng = random.Random(5)
    driver = make_driver(
        path, mode, 2, 12, enable_prefix_caching=False, max_num_seqs=2, decode_reserve_blocks=0
    )
    for _ in range(6):
        victim = driver.engine.add_request(some_ids(rng, 40, 41), greedy(8))
        while not driver.logits.get(victim):
            driver.step()
        fail_once(driver, 1, 0)
        driver.engine.abort(victim)
        driver.engine.kv.check()
        assert_nothing_is_held(driver)
        prompt = some_ids(rng, 40, 41)
        assert_greedy(path, [prompt], driver.run([prompt], greedy(8)), 8)
    driver.engine.close()


def assert_nothing_is_held(driver: Driver) -> None:
    manager = driver.engine.kv.blocks
    assert manager.num_available == manager.capacity
    driver.engine.kv.reset_prefix_cache()
    driver.engine.kv.check()
    assert manager.device.num_free == manager.device.num_slots
    assert manager.host.num_free == manager.host.num_slots


def test_freed_slots_are_poisoned(tiny: Tiny) -> None:
    """The debug switch: what nobody holds is NaN on both tiers and in the ring."""
    path = tiny("llama")
    driver = make_driver(path, "stream", 3, 20, enable_prefix_caching=False)
    driver.run([some_ids(random.Random(1), 40, 41)], greedy(4))
    driver.engine.device.synchronize()
    kv = driver.engine.kv
    for pool in (
        *kv.memory.pool,
        *kv.memory.offload.host.segments,
        *kv.memory.offload.ring.of_layer(0),
    ):
        assert pool.isnan().all()
    driver.engine.close()


# -- storms


def seeds(shown: int, number: int, *chosen: int) -> list[Any]:
    """So many, of which the first `shown` and the `chosen` ones run by default."""
    slow = {*range(shown, number)} - {*chosen}
    marks = [[pytest.mark.slow] if seed in slow else [] for seed in range(number)]
    return [pytest.param(seed, marks=marks[seed]) for seed in range(number)]


def shadow_engine(rng: random.Random) -> ShadowEngine:
    """Any small shape of pools, ring, chunks and limits."""
    streams = rng.random() < 0.6
    reserve = rng.choice([0, 0, 1, 2])
    num_seqs = rng.choice([1, 2, 4, 8])
    settings = {
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": max(num_seqs, rng.choice([8, 13, 24, 50])),
        "decode_reserve_blocks": reserve,
        "max_num_partial_prefills": rng.choice([1, 2, 4]),
        "max_long_partial_prefills": rng.choice([1, 2, 4]),
        "long_prefill_token_threshold": rng.choice([3, 7, 1000]),
    }
    return ShadowEngine(
        device_blocks=rng.choice([1, 2, 3, 4, 6]),
        host_blocks=rng.choice([2, 3, 5, 8, 13]),
        ring_slots=rng.choice([2, 3, 4]) if streams else 0,
        slot_blocks=rng.choice([1, 2, 3]) if streams else 0,
        block_size=rng.choice([1, 2, 3, 4]),
        spare_blocks=max(1, reserve),
        prefix_caching=rng.random() < 0.7,
        settings=settings,
    )


def new_prompt(rng: random.Random, room: int, earlier: list[list[int]]) -> list[int]:
    """A random prompt; often it begins like an earlier one."""
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, max(2, room)))]
    if earlier and rng.random() < 0.3:
        base = rng.choice(earlier)
        prompt = (base[: rng.randrange(1, len(base) + 1)] + prompt)[: max(1, room - 1)]
    return prompt


@pytest.mark.some(5)
@pytest.mark.parametrize("seed", seeds(14, 60, 28))
def test_storm(seed: int) -> None:
    """Adds, aborts, failing steps and cache resets in random order, then everything finishes."""
    rng = random.Random(seed)
    engine = shadow_engine(rng)
    room, earlier = engine.kv.spec.num_tokens, []
    try:
        for _ in range(rng.choice([20, 60, 100])):
            storm_action(rng, engine, room, earlier)
            held = [*engine.scheduler.running, *engine.scheduler.waiting]
            if held and rng.random() < 0.07:
                engine.abort(rng.choice(held).seq_id)
        engine.drain()
    finally:
        engine.close()


def storm_action(
    rng: random.Random, engine: ShadowEngine, room: int, earlier: list[list[int]]
) -> None:
    kind = rng.random()
    if kind < 0.35:
        prompt = new_prompt(rng, int(room * rng.choice([0.3, 0.6, 1.1])), earlier)
        try:
            engine.add(prompt, rng.randrange(1, max(2, room // 3)))
            earlier.append(prompt)
        except PromptTooLongError:
            assert len(prompt) + max(2, room // 3) > room
    elif kind < 0.45 and engine.scheduler.has_work:
        with contextlib.suppress(Boom):  # nothing was counted: the next step does it again
            engine.step(fail_at=(rng.randrange(3), rng.randrange(4)))
    elif kind < 0.47:
        engine.kv.reset_prefix_cache()
        engine.kv.check()
    else:
        engine.step()


@pytest.mark.some(9)
@pytest.mark.parametrize("seed", seeds(25, 100, 67))
def test_any_scheduler_would_do(seed: int) -> None:
    """The KV manager under a scheduler that picks sequences, chunks and victims at random."""
    rng = random.Random(seed)
    streams = rng.random() < 0.6
    engine = ShadowEngine(
        device_blocks=rng.choice([2, 3, 4, 5, 6, 8]),
        host_blocks=rng.choice([2, 3, 5, 8, 13]),
        ring_slots=rng.choice([2, 3]) if streams else 0,
        slot_blocks=rng.choice([1, 2]) if streams else 0,
        block_size=rng.choice([1, 2, 3]),
        spare_blocks=rng.choice([1, 1, 2]),
        prefix_caching=rng.random() < 0.5,
    )
    seqs: list[EngineSequence] = []
    try:
        for number in range(rng.choice([30, 80])):
            items = random_batch(rng, engine, seqs)
            if rng.random() < 0.4:
                most = max(2, engine.kv.spec.num_tokens // 2)
                seqs.append(
                    sequence(number, [rng.randrange(2) for _ in range(rng.randrange(1, most))])
                )
            if items:
                fail_at = (rng.randrange(3), rng.randrange(3)) if rng.random() < 0.2 else None
                run_batch(engine, items, fail_at)
            engine.kv.check()
    finally:
        engine.close()


def sequence(seq_id: int, prompt: list[int]) -> EngineSequence:
    params = Params(max_tokens=99)
    request = Request(params, 0, frozenset(), len(prompt) + 99)
    return EngineSequence(seq_id, prompt, len(prompt), request, RequestMetrics(0.0))


def random_batch(
    rng: random.Random, engine: ShadowEngine, seqs: list[EngineSequence]
) -> list[ScheduledSequence]:
    """Some of the running sequences, in any order, some preempted or ended on the way."""
    kv, items = engine.kv, []
    kv.reset_budget()
    running = [seq for seq in seqs if seq.status is SequenceStatus.RUNNING]
    for seq in rng.sample(running, len(running)):
        if seq.num_tokens >= kv.spec.num_tokens or rng.random() < 0.03:
            kv.deallocate(seq)
            seqs.remove(seq)
        elif rng.random() < 0.7:
            wanted = min(seq.num_remaining, rng.choice([1, 1, 2, 99]))
            granted = kv.reserve(seq, wanted)
            if granted is None and rng.random() < 0.5:
                kv.preempt(seq)
                seq.status = SequenceStatus.WAITING
            elif granted:
                items.append(ScheduledSequence(seq, granted))
    for seq in seqs:
        waits = seq.status is SequenceStatus.WAITING and rng.random() < 0.5
        if waits and kv.admit(seq) is Admission.ADMITTED:
            seq.status = SequenceStatus.RUNNING
            if granted := kv.reserve(seq, seq.num_remaining):
                items.append(ScheduledSequence(seq, granted))
    return rng.sample(items, len(items))


def run_batch(
    engine: ShadowEngine, items: list[ScheduledSequence], fail_at: tuple[int, int] | None
) -> None:
    try:
        _, sampled, _ = engine.run(ScheduledBatch(tuple(items)), fail_at)
    except Boom:
        return
    tokens = iter(sampled)
    for item in items:
        samples = item.samples
        engine.kv.commit(item.seq, item.num_tokens)
        if samples:
            item.seq.token_ids.append(next(tokens))


def test_loads_and_new_blocks_share_the_last_slots() -> None:
    """Both tiers all but full: two tails want to come back and a third sequence wants a new block.

    Granting all three would need a slot more than there is.
    """
    engine = ShadowEngine(4, 4, block_size=2, spare_blocks=1, prefix_caching=False)
    first, second, third = (sequence(i, [1]) for i in range(3))
    for seq in (first, second, third):
        assert engine.kv.admit(seq) is Admission.ADMITTED
        assert step_alone(engine, seq) == 1
    first.token_ids += [1] * 6
    assert step_alone(engine, first) == 7  # takes the whole device: both tails go to the host
    engine.kv.reset_budget()
    granted = [engine.kv.reserve(seq, 1) for seq in (second, third, first)]
    assert granted == [1, 1, 0]
    run_batch(engine, [ScheduledSequence(second, 1), ScheduledSequence(third, 1)], None)
    engine.kv.check()
    assert step_alone(engine, first) == 1
    engine.close()


def test_a_failed_step_takes_back_its_loads() -> None:
    """It failed while the tail's later layers were not even queued: they must be brought again."""
    engine = ShadowEngine(4, 20, 2, 1, block_size=2, prefix_caching=False)
    long, short = sequence(0, [1] * 16), sequence(1, [2])
    for seq in (short, long):
        assert engine.kv.admit(seq) is Admission.ADMITTED
        while seq.is_prefill and seq.num_remaining:
            step_alone(engine, seq)
    tail = engine.kv.tables[1].blocks[0]
    assert tail.device_slot is None and tail.num_tokens == 1
    for fail_at in ((0, 0), (1, 0), (0, 1), None):
        engine.kv.reset_budget()
        assert [engine.kv.reserve(seq, 1) for seq in (short, long)] == [1, 1]
        items = [ScheduledSequence(seq, 1) for seq in (short, long)]
        run_batch(engine, items, fail_at)
        engine.kv.check()
    assert tail.num_tokens == 2
    engine.close()


def step_alone(engine: ShadowEngine, seq: EngineSequence) -> int | None:
    engine.kv.reset_budget()
    granted = engine.kv.reserve(seq, seq.num_remaining)
    if granted:
        run_batch(engine, [ScheduledSequence(seq, granted)], None)
    engine.kv.check()
    return granted


@pytest.mark.some(2)
@pytest.mark.parametrize("seed", seeds(5, 20))
def test_the_oldest_always_goes_on(seed: int) -> None:
    """Under any pressure the request at the head is computed at least every other step."""
    rng = random.Random(1000 + seed)
    engine = shadow_engine(rng)
    room = engine.kv.spec.num_tokens
    for _ in range(12):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, max(2, room * 2 // 3)))]
        engine.add(prompt, max(1, min(room - len(prompt), room // 3)))
    stuck, before = 0, (-1, -1)
    while engine.scheduler.has_work:
        engine.step()
        running = engine.scheduler.running
        now = (running[0].seq_id, running[0].num_computed) if running else (-1, -1)
        stuck = stuck + 1 if running and now == before else 0
        assert stuck < 2, "the oldest request stands still"
        before = now
    engine.drain()
    engine.close()


@pytest.mark.some(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [1, 2])
def test_storm_with_a_model(tiny: Tiny, mode: str, seed: int) -> None:
    """Tiny pools on both tiers, shared prefixes, aborts, failures: survivors equal transformers."""
    path = tiny("llama")
    rng = random.Random(seed)
    driver = make_driver(
        path, mode, 4, 11, max_num_batched_tokens=10, max_num_seqs=5, decode_reserve_blocks=0
    )
    base = some_ids(rng, 20, 21)
    asked: dict[int, tuple[list[int], int]] = {}
    outputs: dict[int, RequestOutput] = {}
    for _ in range(60):
        if rng.random() < 0.4:
            prompt = base[: rng.randrange(21)] + some_ids(rng, 1, 20)
            num_out = rng.randrange(1, 14)
            asked[driver.engine.add_request(prompt, greedy(num_out))] = prompt, num_out
        if rng.random() < 0.1 and driver.engine.has_unfinished_requests:
            fail_once(driver, rng.randrange(3), rng.randrange(2))
        if rng.random() < 0.1 and asked:
            victim = rng.choice(list(asked))
            driver.engine.abort(victim)
            if victim not in outputs:
                del asked[victim]
        outputs |= {output.request_id: output for output in driver.step()}
    outputs |= driver.drain()
    assert len(asked) > 10
    for request, (prompt, num_out) in asked.items():
        assert_greedy(path, [prompt], [outputs[request]], num_out)
    assert sum(output.metrics.num_preemptions for output in outputs.values()) > 0
    assert_nothing_is_held(driver)
    driver.engine.close()


def test_whoever_waits_first_gets_on_though_younger_ones_are_preempted_behind_it() -> None:
    """A request that passed others in the queue is not the last in line when blocks run out."""
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "decode_reserve_blocks": 0}
    engine = ShadowEngine(5, 3, 2, 1, block_size=1, settings=settings)
    engine.add([0], 1)
    for _ in range(5):
        engine.add([0], 5)  # these wait for the prefix of the first
    engine.add([1], 5)  # and this one passes them
    for _ in range(4):
        engine.step()
    while engine.scheduler.running:
        engine.scheduler.preempt(engine.scheduler.running[-1])
    engine.drain()
    engine.close()
