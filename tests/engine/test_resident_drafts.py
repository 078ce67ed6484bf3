"""Drafts of requests that lie on the device: who tries, that the output stays, and what they do not
change: a short request beside them, steps that are begun ahead, steps that are replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from driver import Driver, small_engine
from fixed_drafts import FixedDrafter, scored
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import needs_compiler, use_our_products

from nanoengine import SamplingParams
from nanoengine.engine.draft_length import PayingDrafts
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.kv.draft_plan import DRAFT_SHARE, HOPE, LEAST_GAIN, drafts_from, most_kept
from nanoengine.sequence import ScheduledBatch

MOST, BLOCK = 5, 8
# The tiny Llama drafts from 320 tokens on, Gemma from 424: its windows reach no further back.
LONG = [(7 * i + i * i) % 250 + 4 for i in range(430)]
SHORT = LONG[:20]
PARAMS = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, logprobs=0)
MIXED = [PARAMS, replace(PARAMS, temperature=0.9, seed=5)]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step that may draft does."""
    numbers = cycle([MOST, MOST, 1, 3])
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: next(numbers))


def engine(folder: Path, runs_ahead: bool = False, drafts: bool = True, **more: Any) -> LLMEngine:
    speculative = f"resident:{MOST}" if drafts else None
    more = {"num_gpu_blocks": 130, "speculative": speculative, "debug_kv": not runs_ahead} | more
    return small_engine(folder, runs_ahead, **more)


def guessed(outputs: list[Any]) -> int:
    return sum(output.metrics.num_guessed for output in outputs)


@given(
    st.integers(1, 1 << 40), st.sampled_from([1 << 12, 1 << 17, 3 << 20]), st.integers(1, 1 << 20)
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_who_tries_gains_if_the_first_draft_is_as_good_as_is_hoped(
    weight_bytes: int, block_bytes: int, num_blocks: int
) -> None:
    plain = weight_bytes + num_blocks * block_bytes
    draft = weight_bytes + num_blocks * block_bytes / DRAFT_SHARE
    gain = (1 + HOPE) / (1 + draft / plain)
    assert (num_blocks >= drafts_from(weight_bytes, block_bytes)) == (gain >= LEAST_GAIN)


def test_what_that_is_for_an_8b_model() -> None:
    """Blocks of 256 tokens of 128 KiB: 60,000 tokens in 16 bits, a third of that in four."""
    tokens = [256 * drafts_from(weights, 256 << 17) for weights in (16_060_000_000, 5_000_000_000)]
    assert 58_000 < tokens[0] < 61_000 and 18_000 < tokens[1] < 19_000
    assert drafts_from(1000, 0) == 0, "windows reach all that is read: no length pays"


def test_a_window_is_among_what_is_read() -> None:
    assert most_kept([0.0] * 80, BLOCK, 0) == 10
    assert most_kept([0.0] * 80, BLOCK, 24) == 24
    assert most_kept([0.0] * 3, BLOCK, 0) == 1


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "name", ["llama", "gemma2", pytest.param("gemma3", marks=pytest.mark.breadth)]
)
def test_tokens_are_those_without_drafts(tiny: Callable[[str], Path], name: str) -> None:
    """Two at once, twice: nothing of what was drafted wrong is found by the second run. Freed KV is
    NaN.
    """
    plain = engine(tiny(name), drafts=False)
    expected = scored(Driver(plain).run([LONG, LONG[3:]], MIXED))
    plain.close()
    made = engine(tiny(name))
    for _ in range(2):
        outputs = Driver(made).run([LONG, LONG[3:]], MIXED)
        for (ids, logprobs), (right, as_before) in zip(scored(outputs), expected, strict=True):
            assert ids == right and torch.allclose(logprobs, as_before, atol=1e-4)
        assert guessed(outputs) > 50
    made.close()


@needs_compiler
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "drafter",
    [
        "oracle",
        *(pytest.param(name, marks=pytest.mark.breadth) for name in ("resident", "random", "none")),
    ],
)
def test_bits_depend_on_no_drafter(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    use_our_products(monkeypatch)
    plain = engine(tiny("llama"), drafts=False, dtype="bfloat16")
    ((right, as_before),) = scored(Driver(plain).run([LONG], PARAMS))
    plain.close()
    made, whole = engine(tiny("llama"), dtype="bfloat16", debug_kv=False), LONG + right
    drafters = {
        "oracle": FixedDrafter(lambda seq, at: whole[at]),
        "random": FixedDrafter(lambda seq, at: at * 101 % 256),
        "none": FixedDrafter(lambda seq, at: 0),
    }
    made.runner.drafter = drafters.get(drafter, made.runner.drafter)
    outputs = Driver(made).run([LONG], PARAMS)
    ((ids, logprobs),) = scored(outputs)
    assert ids == right and torch.equal(logprobs, as_before)
    metrics = outputs[0].metrics
    assert metrics.num_guessed > 15
    assert (metrics.num_accepted == metrics.num_guessed) == (drafter == "oracle")
    made.close()


@pytest.mark.usefixtures("always")
def test_nobody_drafts_beside_a_short_request(tiny: Callable[[str], Path]) -> None:
    """The drafts would be part of its steps."""
    made = engine(tiny("llama"))
    launch, seen = made.runner.launch, set()

    def watched(batch: ScheduledBatch, *rest: Any) -> Any:
        decodes = [s for s in made.scheduler.running if not s.is_prefill]
        seen.add((any(s.num_tokens < len(LONG) for s in decodes), batch.num_drafts > 0))
        return launch(batch, *rest)

    made.runner.launch = watched
    short = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    Driver(made).run([LONG, SHORT], [PARAMS, short])
    assert (True, False) in seen and (False, True) in seen and (True, True) not in seen
    made.close()


def test_steps_are_begun_ahead_until_one_drafts(tiny: Callable[[str], Path]) -> None:
    """Those of a short request as without drafts. Those of a long one while it does not draft; and
    none ahead of drafts, as how far these come is not known before.
    """
    steps: dict[tuple[bool, int], list[tuple[bool, bool]]] = {}
    texts: dict[int, list[list[int]]] = {}
    for drafts in (False, True):
        made = engine(tiny("llama"), True, drafts)
        for prompt in (SHORT, LONG):
            noted = steps.setdefault((drafts, len(prompt)), [])
            with watched_ahead(made, noted):
                (output,) = Driver(made).run([prompt], PARAMS)
            texts.setdefault(len(prompt), []).append(output.outputs[0].token_ids)
        made.close()
    assert all(with_drafts == without for without, with_drafts in texts.values())
    assert steps[True, len(SHORT)] == steps[False, len(SHORT)]
    # The first step that is timed follows the prompt; behind it steps that draft nothing are begun
    # ahead, until two of them were between two others.
    ahead, alone, drafting = (False, True), (False, False), (True, False)
    assert steps[True, len(LONG)][:7] == [alone, *4 * [ahead], alone, drafting]
    assert (True, True) not in steps[True, len(LONG)]


@contextmanager
def watched_ahead(made: LLMEngine, noted: list[tuple[bool, bool]]) -> Iterator[None]:
    """Note of each step whether it drafts, and whether another one is begun ahead."""
    real = made.scheduler.schedule_ahead

    def schedule_ahead(batch: ScheduledBatch) -> ScheduledBatch | None:
        ahead: ScheduledBatch | None = real(batch)
        noted.append((batch.num_drafts > 0, ahead is not None))
        return ahead

    with mock.patch.object(made.scheduler, "schedule_ahead", schedule_ahead):
        yield


@pytest.mark.usefixtures("always")
def test_attention_is_asked_for_its_mass_where_drafts_are_checked(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other steps can be replayed, and are laid out as without drafts."""
    numbers = cycle([0, 0, MOST])
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: next(numbers))
    made = engine(tiny("llama"), debug_kv=False)
    open_step, seen = made.kv.open_step, set()

    def opened(batch: ScheduledBatch) -> Any:
        step = open_step(batch)
        if batch.is_decode:
            replays = step.kv.replay_key() is not None and step.block_mass is None
            seen.add((batch.num_drafts > 0, replays))
        return step

    made.kv.open_step = opened
    made.add_request(LONG, PARAMS)
    heats = []
    while made.has_unfinished_requests:
        made.step()
        heats += [sum(b.heat for b in table.blocks) for table in made.kv.tables.values()]
    assert seen == {(False, True), (True, False)}
    assert 0.5 < max(heats) < 1.01
    made.close()
