"""Drafts over the KV on the device: the output depends neither on who drafts nor on where KV lies,
drafts move nothing, and nothing of them stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import STREAMED, Driver, small_engine
from fixed_drafts import FixedDrafter, scored
from marks import needs_compiler, use_our_products
from torch import Tensor

from nanoengine import SamplingParams
from nanoengine.engine.draft_length import PayingDrafts
from nanoengine.engine.drafter import Drafts
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.speculative import CAREFUL
from nanoengine.kv.open_step import DraftStep
from nanoengine.kv.step_plan import DEVICE
from nanoengine.outputs import RequestOutput
from nanoengine.sequence import ScheduledBatch

MOST = 5
PROMPTS = [[(7 * i + 3 * j) % 250 + 4 for i in range(n)] for j, n in enumerate((120, 60, 9))]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "logprobs": 2}
PARAMS = [
    SamplingParams(max_tokens=30, **GREEDY),
    SamplingParams(max_tokens=24, **GREEDY | {"temperature": 0.9, "seed": 5}),
    SamplingParams(max_tokens=50, **GREEDY),
]
SETTINGS = STREAMED | {"debug_kv": True, "measure_speed": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    "few blocks": {},
    "many blocks": {"num_gpu_blocks": 14, "ring_slots": 2, "max_num_seqs": 1},
    "blocks of two": {"num_gpu_blocks": 24, "kvcache_block_size": 2, "slot_tokens": 2},
    "one at a time": {"max_num_seqs": 1},
    "chunked": {"max_num_batched_tokens": 9, "max_num_seqs": 3},
    "no prefix cache": {"enable_prefix_caching": False},
}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every streamed step drafts, whether it pays or not."""
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: MOST)


def run(engine: LLMEngine) -> list[RequestOutput]:
    return Driver(engine).run(PROMPTS, PARAMS)


def without_drafts(path: Path, **settings: Any) -> list[tuple[list[int], Tensor]]:
    engine = small_engine(path, **SETTINGS | settings)
    outputs = run(engine)
    engine.close()
    return scored(outputs)


@pytest.mark.some(1)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", "few blocks"),
        ("llama", "chunked"),
        ("gemma3", "few blocks"),
        *(
            pytest.param("llama", layout, marks=pytest.mark.breadth)
            for layout in LAYOUTS
            if layout not in ("few blocks", "chunked")
        ),
        pytest.param("qwen3", "few blocks", marks=pytest.mark.breadth),
        pytest.param("gemma4-shared", "few blocks", marks=pytest.mark.breadth),
    ],
)
def test_tokens_are_those_without_drafts(
    tiny: Callable[[str], Path], name: str, layout: str
) -> None:
    """Twice: what the first run published must hold nothing of what was drafted wrong."""
    expected = without_drafts(tiny(name))
    engine = small_engine(tiny(name), speculative=f"resident:{MOST}", **SETTINGS | LAYOUTS[layout])
    for _ in range(2):
        outputs = run(engine)
        for (ids, logprobs), (right, as_before) in zip(scored(outputs), expected, strict=True):
            assert ids == right and torch.allclose(logprobs, as_before, atol=1e-4)
    assert sum(output.metrics.num_guessed for output in outputs) > 10
    engine.close()


@needs_compiler
@pytest.mark.parametrize(
    ("drafter", "dtype"),
    [
        *((drafter, "bfloat16") for drafter in ("resident", "oracle", "none")),
        ("random", "float32"),
        pytest.param("random", "bfloat16", marks=pytest.mark.breadth),
        *(
            pytest.param(drafter, "float32", marks=pytest.mark.breadth)
            for drafter in ("resident", "oracle", "none")
        ),
    ],
)
def test_bits_depend_on_no_drafter(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, drafter: str, dtype: str
) -> None:
    """Nor on how many tokens are drafted: log probabilities too. In float32 products are PyTorch's
    where nobody can guess; with this setting they are our own.
    """
    use_our_products(monkeypatch)
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: 0)
    speculative = None if dtype == "bfloat16" else f"resident:{MOST}"
    expected = without_drafts(tiny("llama"), dtype=dtype, speculative=speculative)
    numbers = cycle([MOST, MOST, 1, 3])
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: next(numbers))
    engine = small_engine(tiny("llama"), speculative=f"resident:{MOST}", dtype=dtype, **SETTINGS)
    whole = [prompt + ids for prompt, (ids, _) in zip(PROMPTS, expected, strict=True)]
    if drafter == "random":
        engine.runner.drafter = FixedDrafter(lambda seq, at: (seq * 37 + at * 101) % 256)
    elif drafter == "oracle":
        engine.runner.drafter = FixedDrafter(lambda seq, at: whole[seq][at])
    elif drafter == "none":
        engine.runner.drafter = FixedDrafter(lambda seq, at: 0)
    outputs = run(engine)
    for (ids, logprobs), (right, as_before) in zip(scored(outputs), expected, strict=True):
        assert ids == right and torch.equal(logprobs, as_before)
    guessed = sum(output.metrics.num_guessed for output in outputs)
    accepted = sum(output.metrics.num_accepted for output in outputs)
    assert guessed > 50
    if drafter == "oracle":
        assert accepted == guessed
    if drafter == "none":
        assert accepted < guessed / 10
    engine.close()


@needs_compiler
@pytest.mark.parametrize(
    "chosen",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float32"},
        pytest.param({"dtype": "float32", "quantization": "int8"}, marks=pytest.mark.breadth),
    ],
    ids=["bfloat16", "float32", "int8 weights"],
)
def test_who_streams_drafts_by_default_where_no_bit_depends_on_it(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str]
) -> None:
    """With the same memory, and never with more guesses than its logits are planned for."""
    use_our_products(monkeypatch)
    found = {}
    for speculative in (None, "off"):
        settings = SETTINGS | {"speculative": speculative} | chosen
        engine = small_engine(tiny("llama"), max_num_seqs=16, **settings)
        seen = watch_guesses(engine)
        outputs = run(engine)
        guessed = sum(output.metrics.num_guessed for output in outputs)
        found[speculative] = scored(outputs), guessed, max(seen), engine.plan
        engine.close()
    (drafted, guessed, most, plan), (plain, nothing, none, as_before) = found.values()
    for (ids, logprobs), (right, without) in zip(drafted, plain, strict=True):
        assert ids == right and torch.equal(logprobs, without)
    assert guessed > 0 and 0 < most <= 32 and nothing == none == 0
    assert "up to 8 drafts" in str(plan) and 'speculative="off"' in str(plan)
    assert "guesses" not in str(as_before)
    assert replace(plan.kv, drafts_from=0) == as_before.kv
    assert plan.activation_bytes == as_before.activation_bytes


def watch_guesses(engine: LLMEngine) -> list[int]:
    """How many guesses each step from now on checks."""
    launch, seen = engine.runner.launch, []

    def watched(batch: ScheduledBatch, *rest: Any) -> Any:
        seen.append(sum(len(item.guesses) + item.num_drafts for item in batch.items))
        return launch(batch, *rest)

    engine.runner.launch = watched
    return seen


@needs_compiler
@pytest.mark.parametrize(
    "settings",
    [
        {"kv_offload_dtype": "int8"},
        {"offload_mode": "in_place", "stream_mib_per_step": None},
        {"attention_backend": "torch"},
    ],
    ids=["int8 KV", "in place", "another attention"],
)
def test_nobody_drafts_by_default_elsewhere(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Bits depend on guesses, or nothing streams."""
    use_our_products(monkeypatch)
    settings = SETTINGS | {"dtype": "bfloat16", "speculative": None} | settings
    engine = small_engine(tiny("llama"), **settings)
    assert not engine.plan.guesses and not engine.plan.kv.drafts_from
    engine.add_request(PROMPTS[0], PARAMS[0])
    (seq,) = engine.scheduler.waiting
    assert seq.draft_length is None
    engine.close()


@pytest.mark.usefixtures("always")
def test_drafts_read_the_device_alone_and_leave_nothing(tiny: Callable[[str], Path]) -> None:
    """What no draft may read is NaN: freed KV, and what is left of wrong drafts after each step."""
    engine = small_engine(tiny("llama"), speculative=f"resident:{MOST}", **SETTINGS)
    driver, kv = Driver(engine), engine.kv
    drafted, moved = [], []

    def watched(batch: ScheduledBatch, steps: Iterable[DraftStep]) -> Drafts:
        before = kv.counters.h2d_bytes
        computed = [item.seq.num_computed for item in batch.items]
        made = draft(batch, steps)
        moved.append(kv.counters.h2d_bytes - before)
        assert computed == [item.seq.num_computed for item in batch.items]
        return made

    def opened(batch: ScheduledBatch) -> Any:
        step = open_step(batch)
        steps = step.draft_steps

        def each() -> Iterable[DraftStep]:
            for one in steps():
                drafted.append(one)
                plan = one.kv.plan
                assert plan.transfers.is_none and one.kv.run is None
                assert {part.tier for part in plan.reads} == {DEVICE}
                yield one

        step.draft_steps = each
        return step

    draft, engine.runner.drafter.draft = engine.runner.drafter.draft, watched
    open_step, kv.open_step = kv.open_step, opened
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine.add_request(prompt, params)
    while engine.has_unfinished_requests:
        driver.step()
        for table in kv.tables.values():
            held = sum(block.num_tokens for block in table.blocks)
            assert held == max(table.seq.num_computed, table.num_shared_tokens)
            poison_after(engine, table)
    assert len(drafted) > 50 and not any(moved)
    for rows in driver.logits.values():
        assert all(row.isfinite().all() for row in rows)
    engine.close()


def poison_after(engine: LLMEngine, table: Any) -> None:
    """NaN in the slots after a sequence's computed tokens."""
    size, pool = engine.kv.spec.block_size, engine.kv.memory.pool
    for index, block in enumerate(table.blocks):
        first = max(0, table.seq.num_computed - index * size)
        if block.device_slot is not None and first < size:
            for of_layer in pool:
                of_layer[block.device_slot, :, first:] = torch.nan


@pytest.mark.usefixtures("always")
def test_a_right_draft_saves_a_pass_over_the_link(tiny: Callable[[str], Path]) -> None:
    expected = without_drafts(tiny("llama"))
    whole = [prompt + ids for prompt, (ids, _) in zip(PROMPTS, expected, strict=True)]
    moved = []
    for settings in ({}, {"speculative": f"resident:{MOST}"}):
        engine = small_engine(tiny("llama"), **SETTINGS, **settings)
        engine.runner.drafter = FixedDrafter(lambda seq, at: whole[seq][at])
        (output,) = Driver(engine).run(PROMPTS[:1], PARAMS[:1])
        moved.append(output.metrics.h2d_bytes)
        engine.close()
    assert moved[1] < 1.6 * moved[0] / (1 + MOST)


@pytest.mark.usefixtures("always")
def test_a_short_one_that_does_not_stream_does_not_draft(tiny: Callable[[str], Path]) -> None:
    engine = small_engine(tiny("llama"), speculative=f"resident:{MOST}")
    assert all(output.metrics.num_guessed == 0 for output in run(engine))
    engine.close()


@pytest.mark.some(1)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("drafter", ["oracle", "resident"])
def test_penalties_and_bad_words_know_the_guesses_before(
    tiny: Callable[[str], Path], drafter: str
) -> None:
    """An oracle is always right, and the tokens are those of one a step."""
    plain: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    each = [
        SamplingParams(**plain, repetition_penalty=1.4),
        SamplingParams(**plain, frequency_penalty=0.8, presence_penalty=0.5),
        SamplingParams(**plain, bad_words=["ab", "a", "e"], repetition_penalty=0.7),
    ]
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[0][3:]]
    engine = small_engine(tiny("llama"), **SETTINGS)
    expected = [output.outputs[0].token_ids for output in Driver(engine).run(prompts, each)]
    engine.close()
    engine = small_engine(tiny("llama"), speculative=f"resident:{MOST}", **SETTINGS)
    if drafter == "oracle":
        whole = [prompt + ids for prompt, ids in zip(prompts, expected, strict=True)]
        engine.runner.drafter = FixedDrafter(lambda seq, at: whole[seq][at])
    outputs = Driver(engine).run(prompts, each)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    for metrics in (output.metrics for output in outputs):
        assert metrics.num_guessed > 12
        assert drafter != "oracle" or metrics.num_accepted == metrics.num_guessed
    engine.close()


@pytest.mark.usefixtures("always")
def test_lookup_comes_first(tiny: Callable[[str], Path]) -> None:
    """Where it finds nothing, or guessed wrong lately, the step drafts."""
    engine = small_engine(tiny("llama"), speculative="ngram:3+resident:5", **SETTINGS)
    seen = set()
    launch = engine.runner.launch

    def watched(batch: ScheduledBatch, *rest: Any) -> Any:
        seen.update((len(item.guesses), item.num_drafts) for item in batch.items)
        return launch(batch, *rest)

    engine.runner.launch = watched
    prompt = [5, 16, 27] * 40
    Driver(engine).run([prompt, PROMPTS[0]], [PARAMS[0], PARAMS[0]])
    assert {(CAREFUL, 0), (0, 5)} <= seen and not any(a and b for a, b in seen)
    engine.close()


@pytest.mark.usefixtures("always")
def test_nobody_drafts_beside_a_resident_decode(tiny: Callable[[str], Path]) -> None:
    """The drafts would be part of its steps."""
    settings = SETTINGS | {"num_gpu_blocks": 14, "stream_mib_per_step": 0.1}
    engine = small_engine(tiny("llama"), speculative=f"resident:{MOST}", **settings)
    seen = []
    launch = engine.runner.launch

    def watched(batch: ScheduledBatch, *rest: Any) -> Any:
        costs = {s.seq_id: engine.kv.is_streamed(s) for s in engine.scheduler.running}
        decoding = [s for s in engine.scheduler.running if not s.is_prefill]
        beside = any(not costs[s.seq_id] for s in decoding)
        seen.append((beside, batch.num_drafts > 0))
        return launch(batch, *rest)

    engine.runner.launch = watched
    Driver(engine).run([PROMPTS[0], PROMPTS[2]], [PARAMS[0], replace(PARAMS[2], max_tokens=20)])
    assert (True, False) in seen and (False, True) in seen and (True, True) not in seen
    engine.close()


def test_blocks_learn_their_share_of_attention(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first streamed step on, with drafts or without; and the hottest come to the device,
    the first block among them.
    """
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: 0)
    engine = small_engine(tiny("llama"), speculative=f"resident:{MOST}", **SETTINGS)
    engine.add_request(PROMPTS[0], PARAMS[0])
    while engine.has_unfinished_requests:
        engine.step()
        if engine.kv.tables:
            (table,) = engine.kv.tables.values()
            blocks = list(table.blocks)
    heats = sorted((block.heat for block in blocks), reverse=True)
    assert 0.99 < sum(heats) < 1.01 and heats[0] > 2 * heats[-2]
    assert not any(block.heat > 1.5 * 1.01 for block in blocks)
    engine.close()
