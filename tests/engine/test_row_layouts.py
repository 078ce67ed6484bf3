"""The logits of a request are the same bits in every layout of the work: beside others, in chunks,
after prefix hits and preemption, on two tiers, with guesses, with more threads.

Products are our own, in bfloat16 where need be on an emulated CPU.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver, host_gib, small_engine
from marks import EMULATED, OURS, emulate, needs_compiler
from plain_products import use_plain_products
from torch import Tensor

from nanoengine import LLM, SamplingParams
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.scheduler import Scheduler
from nanoengine.outputs import RequestOutput
from nanoengine.sequence import ScheduledBatch

pytestmark = [needs_compiler, pytest.mark.usefixtures("threads_as_before")]

MODELS = ("llama", "qwen3", "mistral-window", "qwen3-window", "gemma2", "gemma3", "gemma3-softcap")
MODELS += ("qwen3-moe", "gpt-oss", "qwen3.5", "qwen3.5-moe", "gemma4", "gemma4-shared")
MODELS += ("apertus", "cohere2", "glm4-moe-lite", "kimi-linear", "lfm2", "nemotron-h-moe")
SYMBOLS = [5, 16, 27]  # few, so that a random model's text repeats itself and guesses come true
NUM_OUT = 14
TAILS = (1, 2, 4, 5, 16, 17)
Tiny = Callable[[str], Path]
Rows = dict[int, Tensor]  # by the position of the token that was chosen from it
STREAM = {"enable_cpu_offload": True, "slot_tokens": 16, "stream_mib_per_step": 1e6}
LLAMA_FIRST = ["llama", pytest.param("qwen3", marks=pytest.mark.breadth)]


ARITHMETICS = ["float32", "bfloat16", *EMULATED]


@pytest.fixture(autouse=True, params=ARITHMETICS)
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where bfloat16 goes through PyTorch's products here, whose bits depend on the rows of a call,
    plain ones take their place, and our own are tried on a machine that is done in C.
    """
    if request.param in EMULATED:
        emulate(monkeypatch, request.param)
    else:
        use_plain_products(monkeypatch)
    return str(request.param)


def stored_as(arithmetic: str) -> str:
    """The dtype of an arithmetic."""
    return "float32" if arithmetic == "float32" else "bfloat16"


class Recorder:
    """Runs requests, and keeps the logits that each token was chosen from."""

    def __init__(self, engine: LLMEngine) -> None:
        self.driver = Driver(engine)
        self.rows: dict[int, Rows] = {}
        sampler = engine.runner.sampler
        sample = sampler.sample

        def recording(
            logits: Tensor, seqs: Sequence[Any], positions: Sequence[int], *ahead: Any
        ) -> Tensor:
            for row, seq, position in zip(logits, seqs, positions, strict=True):
                # What follows a wrong guess is written again, when it is computed again.
                self.rows.setdefault(seq.seq_id, {})[position] = row.float().clone()
            return sample(logits, seqs, positions, *ahead)

        sampler.sample = recording

    def run(self, prompts: Sequence[list[int]]) -> list[RequestOutput]:
        params = SamplingParams(
            temperature=0, max_tokens=NUM_OUT, ignore_eos=True, allowed_token_ids=SYMBOLS
        )
        return self.driver.run(prompts, params)


@functools.cache
def plain_recorder(path: Path, arithmetic: str, block_size: int) -> Recorder:
    """Requests one after the other, in one chunk each, resident, on one thread."""
    return Recorder(
        small_engine(
            path,
            dtype=stored_as(arithmetic),
            kvcache_block_size=block_size,
            num_gpu_blocks=-(-400 // block_size) + 1,
            max_num_seqs=1,
            enable_prefix_caching=False,
            num_threads=1,
        )
    )


@functools.cache
def plain(path: Path, arithmetic: str, block_size: int, prompt: tuple[int, ...]) -> Rows:
    recorder = plain_recorder(path, arithmetic, block_size)
    (output,) = recorder.run([list(prompt)])
    return recorder.rows[output.request_id]


def assert_plain(
    recorder: Recorder,
    outputs: Sequence[RequestOutput],
    path: Path,
    arithmetic: str,
    block_size: int,
) -> None:
    """All logits are those of the plainest layout, bit for bit."""
    for output in outputs:
        prompt = output.prompt_token_ids
        want = plain(path, arithmetic, block_size, tuple(prompt))
        got = recorder.rows[output.request_id]
        for position in range(len(prompt), len(prompt) + NUM_OUT):
            same = torch.equal(got[position].view(torch.int32), want[position].view(torch.int32))
            assert same, f"{len(prompt)} tokens: other logits at {position}"


def text(rng: random.Random, length: int) -> list[int]:
    """Some of it periodic."""
    period = rng.choice((1, 2, 5, 8, 1000))
    once = [rng.choice(SYMBOLS) for _ in range(period)]
    return [once[i % period] for i in range(length)]


def some_prompts(rng: random.Random, block_size: int) -> list[list[int]]:
    """A long one, then some that share its beginning and leave a tail of each size, then mates."""
    shared = text(rng, 2 * max(block_size, 48))
    tails = [shared[: len(shared) // block_size * block_size] + text(rng, n) for n in TAILS]
    mates = [text(rng, rng.choice((1, 3, 17, 40, 90))) for _ in range(3)]
    return [shared, *rng.sample(tails, 3), *mates]


def longest(block_size: int) -> int:
    """Tokens of the longest request of some_prompts, with its output."""
    return 2 * max(block_size, 48) + max(TAILS) + NUM_OUT


def layout(rng: random.Random, kind: str, path: Path, block_size: int) -> dict[str, Any]:
    """Settings drawn at random; those of `kind` are sure to be there."""
    blocks = 900 // block_size + 8
    settings: dict[str, Any] = {
        "kvcache_block_size": block_size,
        "num_gpu_blocks": blocks,
        "num_threads": rng.choice((1, 2)),
        "runs_ahead": rng.random() < 0.3,
        "max_num_batched_tokens": rng.choice((8, 17, 20, 33, 50, 100, 2048)),
        "max_num_seqs": rng.choice((2, 4, 8)),
        "speculative": rng.choice((None, None, "ngram:1", "ngram:4", "ngram:16")),
    }
    if kind == "guesses":
        settings["speculative"] = rng.choice(("ngram:1", "ngram:4", "ngram:16"))
    if kind == "chunks":
        settings["max_num_batched_tokens"] = rng.choice((8, 17, 20, 33))
    if kind == "preemption":
        settings |= {"decode_reserve_blocks": 0, "max_num_seqs": 8, "max_num_batched_tokens": 2048}
        settings["num_gpu_blocks"] = longest(block_size) // block_size + 3
    if kind in ("stream", "in_place"):
        settings["num_gpu_blocks"] = longest(block_size) // block_size - 1
        settings |= STREAM | {"ring_slots": rng.choice((2, 3, 4)), "offload_mode": kind}
        settings["kv_offload_gib"] = host_gib(path, blocks, block_size)
        settings["slot_tokens"] = rng.choice((1, 2, 3)) * block_size
    settings["max_num_seqs"] = min(settings["max_num_seqs"], settings["max_num_batched_tokens"])
    return settings


KINDS = ("chunks", "hits", "preemption", "stream", "in_place", "guesses")
CASES = [(name, kind) for name in MODELS for kind in KINDS]


def is_slow(place: int, arithmetic: str) -> bool:
    """By default every model once, in one kind and one arithmetic, each of which has its turns."""
    model, kind = divmod(place, len(KINDS))
    ways = ARITHMETICS
    if MODELS[model] in ("qwen3-moe", "gpt-oss", "qwen3.5-moe"):
        ways = ARITHMETICS[:2]  # products of many experts take long on an emulated CPU
    return (model + kind) % len(KINDS) > 0 or arithmetic != ways[model % len(ways)]


DRAWN = [
    pytest.param(*case, arithmetic, marks=[pytest.mark.slow] if is_slow(i, arithmetic) else [])
    for i, case in enumerate(CASES)
    for arithmetic in ARITHMETICS
]


def preempt_now_and_then(scheduler: Scheduler, rng: random.Random) -> None:
    """Also where blocks do not run out, as with a window in every layer."""
    schedule = scheduler.schedule

    def preempting() -> ScheduledBatch:
        if len(scheduler.running) > 1 and rng.random() < 0.2:
            scheduler.preempt(scheduler.running[-1])
        return schedule()

    scheduler.schedule = preempting  # type: ignore[method-assign]


def happened(kind: str, engine: LLMEngine, outputs: Sequence[RequestOutput]) -> int:
    """How often what the layout is about was there."""
    if kind == "hits":
        return sum(output.num_cached_tokens for output in outputs)
    if kind == "preemption":
        return sum(output.metrics.num_preemptions for output in outputs)
    if kind in ("stream", "in_place"):
        return engine.kv.counters.d2h_bytes
    if kind == "guesses":
        return sum(output.metrics.num_guessed for output in outputs)
    return 1


@pytest.mark.some(2)
@pytest.mark.parametrize("name, kind, arithmetic", DRAWN, indirect=["arithmetic"])
def test_a_layout_drawn_at_random_moves_no_bit(
    tiny: Tiny, name: str, kind: str, arithmetic: str
) -> None:
    path, rng = tiny(name), random.Random(f"{name} {kind} {arithmetic}")
    block_size = rng.choice((8, 16) if kind == "preemption" else (8, 16, 24, 64))
    settings = layout(rng, kind, path, block_size)
    engine = small_engine(path, dtype=stored_as(arithmetic), **settings)
    if kind == "preemption":
        preempt_now_and_then(engine.scheduler, rng)
    recorder, prompts = Recorder(engine), some_prompts(rng, block_size)
    outputs = recorder.run(prompts[:1]) + recorder.run(prompts)
    assert happened(kind, engine, outputs) > 0
    assert_plain(recorder, outputs, path, arithmetic, block_size)
    engine.close()


@pytest.mark.parametrize("name", LLAMA_FIRST)
def test_a_chunk_of_one_token_moves_no_bit(tiny: Tiny, name: str, arithmetic: str) -> None:
    """The last of a prompt: it takes another path through the kernel than a long one."""
    path, prompt = tiny(name), text(random.Random(1), 341)
    engine = small_engine(
        path,
        dtype=stored_as(arithmetic),
        kvcache_block_size=300,
        num_gpu_blocks=4,
        max_num_batched_tokens=68,
    )
    recorder = Recorder(engine)
    outputs = recorder.run([prompt])
    assert [rows for ((_, rows), *_) in recorder.driver.audit.schedule[:6]] == [68] * 5 + [1]
    assert_plain(recorder, outputs, path, arithmetic, 300)
    engine.close()


@pytest.mark.parametrize("name", LLAMA_FIRST)
def test_a_hit_that_leaves_one_token_moves_no_bit(tiny: Tiny, name: str, arithmetic: str) -> None:
    path, prompt = tiny(name), text(random.Random(2), 96)
    engine = small_engine(
        path, dtype=stored_as(arithmetic), kvcache_block_size=32, num_gpu_blocks=16
    )
    recorder = Recorder(engine)
    outputs = [recorder.run([prompt])[0] for _ in range(2)]
    assert outputs[1].num_cached_tokens == 95
    assert_plain(recorder, outputs, path, arithmetic, 32)
    engine.close()


def test_a_state_resumed_at_any_block_moves_no_bit(tiny: Tiny, arithmetic: str) -> None:
    """From its snapshot, once a shorter prompt has left one there."""
    path, prompt = tiny("qwen3.5"), text(random.Random(5), 45)
    engine = small_engine(path, dtype=stored_as(arithmetic), num_gpu_blocks=32)
    recorder = Recorder(engine)
    for num_blocks in range(1, 6):
        recorder.run([prompt[: 8 * num_blocks + 1]])
        (output,) = recorder.run([prompt])
        assert output.num_cached_tokens == 8 * num_blocks
        assert_plain(recorder, [output], path, arithmetic, 8)
        engine.kv.reset_prefix_cache()
    engine.close()


@pytest.mark.parametrize("name", LLAMA_FIRST)
def test_guesses_right_and_wrong_move_no_bit(tiny: Tiny, name: str, arithmetic: str) -> None:
    """And what they leave in the prefix cache serves the next turn."""
    path, rng = tiny(name), random.Random(3)
    prompts = [text(rng, 70) for _ in range(4)]
    engine = small_engine(
        path, dtype=stored_as(arithmetic), num_gpu_blocks=128, speculative="ngram:4"
    )
    recorder = Recorder(engine)
    outputs = recorder.run(prompts)
    metrics = [output.metrics for output in outputs]
    accepted, guessed = (
        sum(getattr(m, f"num_{w}") for m in metrics) for w in ("accepted", "guessed")
    )
    assert 0 < accepted < guessed
    turns = [o.prompt_token_ids + o.outputs[0].token_ids + [5, 16] for o in outputs]
    outputs += recorder.run(turns)
    assert sum(output.num_cached_tokens for output in outputs[4:]) >= 4 * 72
    assert_plain(recorder, outputs, path, arithmetic, 8)
    engine.close()


@pytest.mark.slow
def test_ten_thousand_requests_are_each_as_alone(tiny: Tiny, arithmetic: str) -> None:
    """In two engines that live long: mates that come and go, hits and guesses; in one preemption,
    in the other chunks and KV on the host. All log probabilities of 3,000 different requests, which
    come again.
    """
    path, rng = tiny("llama"), random.Random(4)
    roots = [text(rng, 64) for _ in range(30)]
    asked = [
        (tuple(rng.choice(roots)[: rng.choice((0, 16, 40, 64))] + text(rng, n)), n % 9 + 1)
        for n in rng.choices(range(1, 60), k=3000)
    ]
    alone = plain_recorder(path, arithmetic, 16).driver.engine
    want = {ask: log_probs(finish(alone, [ask])[0]) for ask in asked}
    settings = {"kvcache_block_size": 16, "decode_reserve_blocks": 0, "speculative": "ngram:3"}
    small = {"num_gpu_blocks": 12, "max_num_seqs": 8, "max_num_batched_tokens": 2048}
    tiers = {"num_gpu_blocks": 10, "max_num_seqs": 6, "max_num_batched_tokens": 50, **STREAM}
    tiers |= {"offload_mode": "stream", "kv_offload_gib": host_gib(path, 60, 16)}
    engines = [
        small_engine(path, dtype=stored_as(arithmetic), **settings, **more)
        for more in (small, tiers)
    ]
    num_different, num_preempted = 0, 0
    for number in range(400):
        wave = rng.choices(asked, k=25)
        for ask, output in zip(wave, finish(engines[number % 2], wave), strict=True):
            num_different += log_probs(output) != want[ask]
            num_preempted += output.metrics.num_preemptions
    assert num_different == 0
    assert num_preempted > 100 and engines[1].kv.counters.d2h_bytes > 0
    for engine in engines:
        engine.close()


def finish(engine: LLMEngine, asked: Sequence[tuple[tuple[int, ...], int]]) -> list[RequestOutput]:
    """Greedy, with the log probabilities of all the symbols, in the order asked."""
    ids = []
    for prompt, num_out in asked:
        params = SamplingParams(
            temperature=0,
            max_tokens=num_out,
            ignore_eos=True,
            logprobs=3,
            allowed_token_ids=SYMBOLS,
        )
        ids.append(engine.add_request(list(prompt), params))
    done: dict[int, RequestOutput] = {}
    while engine.has_unfinished_requests:
        done |= {output.request_id: output for output in engine.step()}
    return [done[i] for i in ids]


def log_probs(output: RequestOutput) -> list[dict[int, float]]:
    """By token, at each position, as they are."""
    rows = output.outputs[0].logprobs
    assert rows is not None
    return [{token: entry.logprob for token, entry in row.items()} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["chunks of 100", "a hit that leaves one token", "guesses"])
@pytest.mark.parametrize("arithmetic", OURS, indirect=True)
def test_smollm2_gives_the_same_log_probabilities(layout: str) -> None:
    """20 of them at each of 24 positions after 701 tokens."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=20)
    settings: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_gib": 0.2, "device": "cpu"}
    with LLM("smollm2-135m", **settings) as llm:
        assert "the same bits in any batch" in str(llm.plan)
        story = llm.tokenizer.encode("The old mill stood by the river, and the river ran on. " * 60)
        prompt = story[: 768 if layout.startswith("a hit") else 701]
        want = log_probs(llm.generate([prompt], params, use_tqdm=False)[0])
        if layout.startswith("a hit"):
            again = llm.generate([prompt], params, use_tqdm=False)[0]
            assert again.num_cached_tokens == 767
            assert log_probs(again) == want
            return
    changed: dict[str, Any] = {"max_num_batched_tokens": 100}
    if layout == "guesses":
        changed = {"speculative": "ngram:4"}
    with LLM("smollm2-135m", **settings | changed) as llm:
        output = llm.generate([prompt], params, use_tqdm=False)[0]
        assert layout != "guesses" or output.metrics.num_guessed > 0
        assert log_probs(output) == want
