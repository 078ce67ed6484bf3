"""Drafts chosen among some tokens: which they are, when, and that no output depends on it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from driver import Driver, small_engine
from fixed_drafts import scored
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import needs_compiler, use_our_products
from torch import Tensor

from nanoengine import SamplingParams
from nanoengine.devices.select import make_device
from nanoengine.engine import draft_vocabulary
from nanoengine.engine.draft_length import PayingDrafts
from nanoengine.engine.draft_vocabulary import (
    FREQUENT_RUNS,
    LEAST_TIMES,
    NUM_RUNS,
    RECENT_TOKENS,
    DraftVocabulary,
    has_large_head,
    likely_runs,
)
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.loading.model_config import read_model_config

PROMPT = [(7 * i + i * i) % 60 + 4 for i in range(430)]  # of the first run alone
PARAMS = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, logprobs=0)


def text(token_ids: list[int], **params: Any) -> Any:
    """What a request is, as far as it is asked for here."""
    request = mock.Mock(params=SamplingParams(**params))
    return mock.Mock(token_ids=token_ids, grammar=None, request=request)


@given(st.lists(st.integers(0, 3 * RECENT_TOKENS), min_size=1, max_size=4), st.integers(0, 99))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_runs_are_the_frequent_ones_and_the_newest(lengths: list[int], seed: int) -> None:
    luck = random.Random(seed)
    most = luck.choice([10_000, 250_000])
    texts = [[luck.randrange(most) for _ in range(length)] for length in lengths]
    runs = likely_runs([text(tokens) for tokens in texts])
    assert runs == sorted(set(runs)) and len(runs) <= NUM_RUNS
    assert set(range(FREQUENT_RUNS)) <= set(runs)
    for tokens in texts:  # each has its share, and of that the newest
        newest = dict.fromkeys(token // 64 for token in reversed(tokens[-RECENT_TOKENS:]))
        share = (NUM_RUNS - FREQUENT_RUNS) // len(texts)
        assert set([*newest][:share]) <= set(runs)


def test_all_tokens_where_few_are_read_or_any_may_be_right() -> None:
    device, large = make_device("cpu", None, False, 0.0), LEAST_TIMES * NUM_RUNS
    one = text([5, 70_000])
    made = DraftVocabulary(large, device).runs([one, one])
    assert made is not None and made.tolist() == [*range(FREQUENT_RUNS), 70_000 // 64]
    assert DraftVocabulary(large - 1, device).runs([one]) is None
    assert DraftVocabulary(0, device).runs([one]) is None, "a head that gives all or nothing"
    vocabulary = DraftVocabulary(large, device)
    assert vocabulary.runs([text([5]) for _ in range(5)]) is None
    assert vocabulary.runs([one, text([5], allowed_token_ids=[9])]) is None
    forced = text([5])
    forced.grammar = object()
    assert vocabulary.runs([forced]) is None
    assert vocabulary.runs([]) is None


@pytest.mark.parametrize("hidden, layers, is_large", [(640, 18, True), (4096, 36, False)])
def test_a_head_is_large_beside_its_model(
    tiny: Callable[[str], Path], hidden: int, layers: int, is_large: bool
) -> None:
    """A vocabulary of 262,144, of the width and depth of Gemma 3 270M and of an 8B model."""
    config = replace(
        read_model_config(tiny("llama")),
        vocab_size=262_144,
        hidden_size=hidden,
        num_layers=layers,
        intermediate_size=4 * hidden,
        tie_word_embeddings=True,
    )
    assert has_large_head(config) == is_large


@pytest.fixture
def small_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model drafts in every step, among the run of its newest token, one of 4."""
    use_our_products(monkeypatch)
    for name, value in {"NUM_RUNS": 1, "FREQUENT_RUNS": 0, "LEAST_SHARE": 0.0}.items():
        monkeypatch.setattr(draft_vocabulary, name, value)
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: 3)


def drafted(made: LLMEngine) -> list[Tensor]:
    """The drafts of all steps from now on."""
    draft, seen = made.runner.drafter.draft, []

    def watched(*args: Any) -> Any:
        drafts = draft(*args)
        seen.append(drafts.tokens)
        return drafts

    made.runner.drafter.draft = watched
    return seen


def engine(folder: Path, speculative: str | None, **settings: Any) -> LLMEngine:
    settings |= {"num_gpu_blocks": 130, "speculative": speculative, "debug_kv": True}
    return small_engine(folder, False, **settings)


@needs_compiler
@pytest.mark.usefixtures("small_vocabulary")
@pytest.mark.parametrize("by", ["resident:3", "draft:3"])
def test_drafts_are_of_the_runs_and_outputs_of_all_tokens(
    tiny: Callable[[str], Path], by: str
) -> None:
    settings = {"draft_model": str(tiny("llama-tied"))} if by == "draft:3" else {}
    params = [PARAMS, replace(PARAMS, temperature=0.9, seed=5)]
    for one in params:
        plain = engine(tiny("llama"), None)
        expected = scored(Driver(plain).run([PROMPT], one))
        plain.close()
        made = engine(tiny("llama"), by, **settings)
        seen = drafted(made)
        (output,) = Driver(made).run([PROMPT], one)
        (ids, logprobs), (right, as_before) = scored([output])[0], expected[0]
        assert ids == right and torch.equal(logprobs, as_before)
        drafts = torch.cat(seen)
        newest = {token // 64 for token in PROMPT[-1:] + right}
        assert len(drafts) > 20 and {token // 64 for token in drafts.tolist()} <= newest
        assert max(right) > 63, "the text leaves the runs"
        made.close()
