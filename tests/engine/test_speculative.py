"""Prompt lookup: what it guesses, and that guesses change the number of steps and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import load_reference, reference, reference_logits
from driver import STREAMED, answer, small_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine import SamplingParams
from nanoengine.config.engine import EngineConfig
from nanoengine.engine.draft_length import EngineDrafts, PayingDrafts
from nanoengine.engine.speculative import (
    CAREFUL,
    DOUBTFUL,
    LONGEST,
    MOST_DOUBTFUL,
    SHORTEST,
    Guesses,
    PromptLookup,
    guesses_for,
)
from nanoengine.errors import ConfigError
from nanoengine.outputs import RequestMetrics
from nanoengine.sequence import Request, ScheduledBatch, Sequence, SequenceStatus

BLOCK = 8
OFFLOAD = STREAMED | {"debug_kv": True}
FIRST = ("resident", "preempted", "streamed")
SETTINGS: dict[str, dict[str, Any]] = {
    "resident": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 9, "max_num_seqs": 5},
    "preempted": {"num_gpu_blocks": 13, "decode_reserve_blocks": 0},
    "blocks of two": {"num_gpu_blocks": 256, "kvcache_block_size": 2},
    "streamed": OFFLOAD,
    "in place": OFFLOAD | {"offload_mode": "in_place"},
}


def looked_up(tokens: list[int], most: int) -> list[int]:
    """The same by trying every place."""
    for length in range(LONGEST, SHORTEST - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[len(tokens) - length :]:
                return tokens[start + length : start + length + most]
    return []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 9))
@settings(derandomize=True, max_examples=300, deadline=None)
def test_guesses_are_what_followed_last_time(tokens: list[int], most: int, step: int) -> None:
    """On growing sequences of few symbols, against trying every place."""
    lookup = PromptLookup()
    for stop in [*range(1, len(tokens), step), len(tokens)]:
        assert [*lookup.guess(tokens[:stop], most)] == looked_up(tokens[:stop], most)


def steps_in_doubt(lookup: PromptLookup) -> int:
    """How many steps it sits out."""
    number = 0
    while not lookup.is_trusted:
        lookup.record(0, 0)
        number += 1
    return number


def test_a_lookup_that_was_wrong_is_in_doubt_for_a_while() -> None:
    """For longer if it is wrong again, until it was right."""
    lookup, waits = PromptLookup(), []
    for num_guesses, num_right in ((4, 4), (4, 2), (0, 0), (4, 1), (2, 0), (2, 1), (8, 3)):
        lookup.record(num_guesses, num_right)
        waits.append(steps_in_doubt(lookup))
    assert waits == [0, 0, 0, DOUBTFUL, 2 * DOUBTFUL, 0, DOUBTFUL]
    for _ in range(20):
        lookup.record(2, 0)
        waits.append(steps_in_doubt(lookup))
    assert waits[-1] == MOST_DOUBTFUL


@pytest.mark.parametrize("drafts", [True, False])
def test_few_guesses_take_the_place_of_drafts_until_some_were_right(drafts: bool) -> None:
    """Each wrong one costs its row; where there is nothing else, it costs nobody a draft."""
    request = Request(SamplingParams(max_tokens=50), 0, frozenset(), 60)
    seq = Sequence(
        0, [*range(5, 13), 5, 6], 2, request, RequestMetrics(0.0), SequenceStatus.RUNNING
    )
    seq.num_computed, seq.draft_length = len(seq.token_ids) - 1, PayingDrafts(8, EngineDrafts())
    lengths = []
    for num_right in (0, 1, 2):
        seq.guesser = PromptLookup()
        if num_right:
            seq.guesser.record(2, num_right)
        lengths.append(len(guesses_for(seq, 6, 6, drafts).tokens))
    assert lengths == ([CAREFUL, 6, 6] if drafts else [6, 6, 6])


def repetitive_prompts() -> list[list[int]]:
    return [[((i % period) * 11 + 5) % 256 for i in range(n)] for n, period in PERIODS]


@functools.cache
def expected_ids(path: Path) -> list[list[int]]:
    """Greedy over few symbols, so that a random model's text repeats itself. By a model that no
    other test has.
    """
    expected, model = [], load_reference(path)
    for prompt, length in zip(repetitive_prompts(), LENGTHS, strict=True):
        tokens = list(prompt)
        for _ in range(length):
            row = reference_logits(model, tokens)[-1]
            tokens.append(max(SYMBOLS, key=lambda i: float(row[i])))
        expected.append(tokens[len(prompt) :])
    return expected


SYMBOLS = [5, 16, 27]
STOPS = ["--8", '8"8']  # the symbols are ", - and 8
LENGTHS = [30, 26, 31, 12, 40, 25, 33]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "allowed_token_ids": [5, 16, 27]}
PERIODS = [(3, 1), (17, 3), (24, 5), (31, 8), (1, 1), (40, 40), (20, 2)]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("model", "num_guesses", "settings"),
    [
        pytest.param(*model, each, id=f"{model[0]}-{model[1]}-{name}", marks=marks)
        for name, each in SETTINGS.items()
        for model in (("llama", 1), ("llama", 5), ("qwen3.5", 5))
        for marks in [[pytest.mark.breadth] * (model[0] == "qwen3.5" and name not in FIRST)]
    ],
)
def test_greedy_ids_are_those_of_transformers(
    tiny: Callable[[str], Path], settings: dict[str, Any], model: str, num_guesses: int
) -> None:
    """Twice: what the first run published must hold nothing of what was guessed wrong."""
    path, prompts = tiny(model), repetitive_prompts()
    each = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, allowed_token_ids=SYMBOLS)
        for n in LENGTHS
    ]
    engine = small_engine(path, speculative=f"ngram:{num_guesses}", **settings)
    expected = expected_ids(path)
    for _ in range(2):
        outputs = answer(engine, prompts, each)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        guessed = sum(output.metrics.num_guessed for output in outputs)
        accepted = sum(output.metrics.num_accepted for output in outputs)
        assert 10 < accepted < guessed
    engine.close()


def test_nothing_is_guessed_past_the_last_token(tiny: Callable[[str], Path]) -> None:
    """The last token that a request may have is sampled, never computed."""
    engine = small_engine(tiny("llama"), speculative="ngram:5")
    open_step, seen = engine.kv.open_step, []

    def watched(batch: ScheduledBatch) -> Any:
        for item in batch.items:
            seen.append(bool(item.guesses))
            assert item.start + item.num_tokens < item.seq.request.max_total_tokens
        return open_step(batch)

    engine.kv.open_step = watched  # type: ignore[method-assign]
    each = [SamplingParams(**GREEDY, max_tokens=n) for n in LENGTHS]
    outputs = answer(engine, repetitive_prompts(), each)
    engine.close()
    assert [len(output.outputs[0].token_ids) for output in outputs] == LENGTHS and any(seen)


@pytest.mark.parametrize("model", ["llama", "qwen3.5"])
def test_sampled_tokens_stops_and_scores_stay_the_same(
    tiny: Callable[[str], Path], model: str
) -> None:
    """Drawn by (seed, position), a token is the same whether it was guessed or not."""
    path, prompts = tiny(model), repetitive_prompts()
    plain: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "allowed_token_ids": SYMBOLS}
    each = [
        SamplingParams(**plain, seed=1, top_p=0.9),
        SamplingParams(**plain, seed=2, logprobs=2, prompt_logprobs=1),
        SamplingParams(**plain, seed=3, stop=STOPS),
        SamplingParams(**plain, seed=4, min_tokens=30, stop_token_ids=[16]),
        SamplingParams(**plain, seed=5, repetition_penalty=1.3),
        SamplingParams(**plain, seed=6, n=3),
        SamplingParams(**plain | {"temperature": 0}, logprobs=3, stop_token_ids=[27]),
    ]
    found = []
    for speculative in (None, "ngram:4"):
        engine = small_engine(path, speculative=speculative)
        outputs = answer(engine, prompts, each)
        engine.close()
        found.append([[made.token_ids for made in o.outputs] for o in outputs])
        texts = [[(made.text, made.finish_reason) for made in o.outputs] for o in outputs]
        found[-1].append(texts)
        num_steps = [o.metrics.num_accepted for o in outputs]
    assert found[0] == found[1]
    assert num_steps[4] > 0 and sum(num_steps) > 20
    for output, prompt, params in zip(outputs, prompts, each, strict=True):
        if params.logprobs is not None:
            made = output.outputs[0]
            logits = reference_logits(reference(path), prompt + made.token_ids).log_softmax(-1)
            assert len(made.logprobs) == len(made.token_ids)
            for row, entry, token in zip(
                logits[len(prompt) - 1 :], made.logprobs, made.token_ids, strict=False
            ):
                assert abs(entry[token].logprob - float(row[token])) < 1e-3


def test_a_streamed_request_crosses_the_link_less_often(tiny: Callable[[str], Path]) -> None:
    """Each accepted token saves a pass over what streams."""
    prompts = [[(i % 9) * 11 + 5 for i in range(120)]]
    each = [
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, allowed_token_ids=SYMBOLS)
    ]
    moved = []
    for speculative in (None, "ngram:4"):
        engine = small_engine(tiny("llama"), speculative=speculative, **OFFLOAD)
        (output,) = answer(engine, prompts, each)
        moved.append(output.metrics.h2d_bytes)
        engine.close()
    num_steps = 60 - output.metrics.num_accepted
    assert output.metrics.num_accepted > 20
    assert moved[1] < moved[0] * (num_steps + 20) / 60


@pytest.mark.parametrize(
    ("model", "mode"), [("llama", "stream"), ("llama", "in_place"), ("qwen3.5", "stream")]
)
def test_what_was_guessed_wrong_does_not_count(
    tiny: Callable[[str], Path], model: str, mode: str
) -> None:
    """Blocks hold what was computed and is so, and nothing else goes to the host; although each
    step somebody is preempted.
    """
    path = tiny(model)
    engine = small_engine(path, speculative="ngram:5", **OFFLOAD | {"offload_mode": mode})
    ids = [
        engine.add_request(prompt, SamplingParams(max_tokens=n, **GREEDY))
        for prompt, n in zip(repetitive_prompts(), LENGTHS, strict=True)
    ]
    found = {}
    while engine.has_unfinished_requests:
        found.update({output.request_id: output for output in engine.step()})
        if engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[-1])
        for table in engine.kv.tables.values():
            held = sum(block.num_tokens for block in table.blocks)
            assert held == max(table.seq.num_computed, table.num_shared_tokens)
        engine.kv.check()
    assert [found[i].outputs[0].token_ids for i in ids] == expected_ids(path)
    engine.close()


def test_guesses_take_nobody_s_blocks(tiny: Callable[[str], Path]) -> None:
    """Where only room for the next token is left, nothing is guessed and nobody preempted."""
    engine = small_engine(
        tiny("llama"), num_gpu_blocks=4, decode_reserve_blocks=0, speculative="ngram:8"
    )
    prompts = [[5, 16, 27] * 5, [5, 16, 27] * 5]
    each = [SamplingParams(temperature=0, max_tokens=1 + 2 * BLOCK - 15, ignore_eos=True)] * 2
    outputs = answer(engine, prompts, each)
    assert all(output.metrics.num_preemptions == 0 for output in outputs)
    engine.close()


@pytest.mark.parametrize(
    ("most", "kept"),
    [(4, ((7,), 3, True)), (2, ((7,), 1, True)), (1, ((7,), 0, True)), (0, ((), 0, False))],
)
def test_where_fewer_are_granted_the_last_ones_go(
    most: int, kept: tuple[tuple[int, ...], int, bool]
) -> None:
    """Of a guess by the MTP head and three drafts after it."""
    assert Guesses((7,), 3, has_drafted=True).first(most) == Guesses(*kept)


def test_what_is_no_speculation_is_refused(tiny: Callable[[str], Path]) -> None:
    others = "mtp", "mtp:0", "mtp:1+ngram:2", "resident:2+mtp:2", "ngram:2+resident:2+mtp:2"
    for wrong in ("ngram", "ngram:0", "ngram:65", "eagle:4", "", 4, *others):
        with pytest.raises(ConfigError, match=r'"ngram:K\+draft:K" with K from 1 to 64'):
            small_engine(tiny("llama"), speculative=wrong)


def test_auto_is_lookup_and_drafts_and_off_is_neither() -> None:
    auto = EngineConfig("m", speculative="auto")
    assert (auto.num_guesses, auto.num_drafts) == (8, 8)
    off = EngineConfig("m", speculative="off")
    assert (off.num_guesses, off.num_drafts) == (0, 0)
