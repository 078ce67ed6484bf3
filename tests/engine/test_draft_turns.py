"""Streamed requests that take turns: one half is checked while the other half drafts. Forced on a
CPU, with PyTorch's operators as on a GPU; freed memory is NaN and every access is checked.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from driver import STREAMED, Driver, small_engine
from fixed_drafts import FixedDrafter, scored
from marks import needs_compiler
from plain_products import use_plain_products

from nanoengine import SamplingParams
from nanoengine.config.engine import EngineConfig
from nanoengine.engine.draft_length import EngineDrafts, PayingDrafts
from nanoengine.engine.draft_turns import DraftTurns, FasterWay
from nanoengine.engine.drafter import Drafts
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.speculative import Guesses, guesses_for
from nanoengine.kv.open_step import OpenStep
from nanoengine.models.layer_ops import TorchOps
from nanoengine.outputs import RequestMetrics, RequestOutput
from nanoengine.sequence import (
    Grammar,
    Request,
    ScheduledBatch,
    ScheduledSequence,
    Sequence,
    SequenceStatus,
)
from nanoengine.startup import parts

MOST = 5
PROMPTS = [[(7 * i + 3 * j) % 250 + 4 for i in range(n)] for j, n in enumerate((120, 96, 101))]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "logprobs": 2}
PARAMS = [
    SamplingParams(max_tokens=32, **GREEDY),
    SamplingParams(max_tokens=29, **GREEDY | {"temperature": 0.9, "seed": 5}),
    SamplingParams(max_tokens=24, **GREEDY),
]
SETTINGS = STREAMED | {"debug_kv": True, "measure_speed": False, "num_gpu_blocks": 9}
LAYOUTS: dict[str, dict[str, Any]] = {
    "few blocks": {},
    "many blocks": {"num_gpu_blocks": 16, "ring_slots": 2},
    "blocks of two": {"num_gpu_blocks": 24, "kvcache_block_size": 2, "slot_tokens": 2},
    "no prefix cache": {"enable_prefix_caching": False},
}


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every streamed step drafts, and drafts are short; the bits of a row are its own."""
    numbers = cycle([MOST, MOST, 1, 3])
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: next(numbers))
    monkeypatch.setattr(PayingDrafts, "is_short", True)
    monkeypatch.setattr(FasterWay, "next", lambda self, num_checked: True)
    monkeypatch.setattr(parts, "choose_ops", lambda *_: TorchOps())
    use_plain_products(monkeypatch)


class Watched:
    """An engine whose requests take turns; batches: of all its steps. What is drafted between the
    layers of a step is what is drafted without these.
    """

    def __init__(self, path: Path, **settings: Any) -> None:
        speculative = settings.pop("speculative", f"resident:{MOST}")
        self.engine = small_engine(path, speculative=speculative, **SETTINGS | settings)
        self.engine.scheduler.turns.are_taken = True
        self.batches: list[ScheduledBatch] = []
        self.alone = Drafts()
        launch, open_step = self.engine.runner.launch, self.engine.kv.open_step

        def opened(batch: ScheduledBatch) -> OpenStep:
            """Let the drafts of who rests be made twice: before the step's layers, too."""
            step = open_step(batch)
            drafter = self.engine.runner.drafter
            if batch.resting:
                self.alone = drafter.draft(batch.of_resting, step.draft_steps_between(iter(())))
            return step

        def watched(batch: ScheduledBatch, *rest: Any) -> Any:
            self.batches.append(batch)
            tokens = launch(batch, *rest)
            if batch.resting:
                assert tokens.of_resting.tokens.tolist() == self.alone.tokens.tolist()
                assert tokens.of_resting.places == self.alone.places
            return tokens

        self.engine.runner.launch, self.engine.kv.open_step = watched, opened

    @property
    def num_turns(self) -> int:
        """Steps in which others drafted."""
        return sum(batch.resting != () for batch in self.batches)

    def check_who_waits(self) -> None:
        """Who rested is checked in its next step with what it drafted; where there is no room for
        all, one step later.
        """
        drafted: dict[int, tuple[int, int]] = {}
        for at, batch in enumerate(self.batches):
            for item in batch.items:
                number, rested = drafted.pop(item.seq.seq_id, (len(item.guesses), at))
                assert len(item.guesses) == number and at - rested <= 2
            drafted |= {item.seq.seq_id: (item.num_drafts, at) for item in batch.resting}


def run(engine: LLMEngine) -> list[RequestOutput]:
    return Driver(engine).run(PROMPTS, PARAMS)


def without_drafts(path: Path, **settings: Any) -> list[tuple[list[int], torch.Tensor]]:
    engine = small_engine(path, **SETTINGS | settings)
    outputs = run(engine)
    engine.close()
    return scored(outputs)


@needs_compiler
@pytest.mark.parametrize(
    ("drafter", "layout"),
    [
        ("oracle", "few blocks"),
        pytest.param("resident", "few blocks", marks=pytest.mark.breadth),
        pytest.param("random", "few blocks", marks=pytest.mark.breadth),
        pytest.param("none", "few blocks", marks=pytest.mark.breadth),
        *(pytest.param("random", name, marks=pytest.mark.breadth) for name in [*LAYOUTS][1:]),
    ],
)
def test_bits_depend_neither_on_turns_nor_on_the_drafter(
    tiny: Callable[[str], Path], drafter: str, layout: str
) -> None:
    """Twice: what the first run published must hold nothing of what was drafted wrong."""
    expected = without_drafts(tiny("llama"), **LAYOUTS[layout])
    watched = Watched(tiny("llama"), **LAYOUTS[layout])
    whole = [prompt + ids for prompt, (ids, _) in zip(PROMPTS, expected, strict=True)]
    token: dict[str, Callable[[int, int], int]] = {
        "random": lambda seq, at: (seq * 37 + at * 101) % 256,
        "oracle": lambda seq, at: whole[seq % 3][at],
        "none": lambda seq, at: 0,
    }
    if drafter in token:
        watched.engine.runner.drafter = FixedDrafter(token[drafter])
    for _ in range(2):
        outputs = run(watched.engine)
        for (ids, logprobs), (right, as_before) in zip(scored(outputs), expected, strict=True):
            assert ids == right and torch.equal(logprobs, as_before)
    guessed = sum(output.metrics.num_guessed for output in outputs)
    accepted = sum(output.metrics.num_accepted for output in outputs)
    assert guessed > 50 and (drafter != "oracle" or accepted == guessed)
    assert watched.num_turns > 10
    watched.check_who_waits()
    watched.engine.close()


@pytest.mark.breadth
@pytest.mark.parametrize(
    "layout",
    ["few blocks", *(pytest.param(name, marks=pytest.mark.breadth) for name in [*LAYOUTS][1:])],
)
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.breadth)])
def test_real_drafts_leave_nothing(tiny: Callable[[str], Path], name: str, layout: str) -> None:
    """What no draft may read is NaN: freed KV, and what is left of drafts after each step, of those
    that were checked and of those that were not yet. Twice, as above.
    """
    expected = without_drafts(tiny(name), **LAYOUTS[layout])
    watched = Watched(tiny(name), **LAYOUTS[layout])
    for _ in range(2):
        driver = Driver(watched.engine)
        ids = [
            watched.engine.add_request(prompt, params)
            for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]
        ended: dict[int | str, RequestOutput] = {}
        while watched.engine.has_unfinished_requests:
            ended |= {output.request_id: output for output in driver.step()}
            for table in watched.engine.kv.tables.values():
                held = sum(block.num_tokens for block in table.held)
                held += table.num_released * watched.engine.kv.spec.block_size
                assert held == max(table.seq.num_computed, table.num_shared_tokens)
                poison_after(watched.engine, table)
        outputs = [ended[each] for each in ids]
        for output in outputs:
            assert output.outputs[0].finish_reason == "length", output
        for (tokens, logprobs), (right, as_before) in zip(scored(outputs), expected, strict=True):
            assert tokens == right and torch.equal(logprobs, as_before)
    assert watched.num_turns > 10
    watched.check_who_waits()
    watched.engine.close()


def poison_after(engine: LLMEngine, table: Any) -> None:
    """NaN in the slots after a sequence's computed tokens."""
    size, pool = engine.kv.spec.block_size, engine.kv.memory.pool
    for index, block in enumerate(table.blocks):
        first = max(0, table.seq.num_computed - index * size)
        if index >= table.num_released and block.device_slot is not None and first < size:
            for of_layer in pool:
                of_layer[block.device_slot, :, first:] = torch.nan


# -- who takes turns


class FakeKV:
    """All requests stream, and read nothing together, unless it is said otherwise."""

    def __init__(self) -> None:
        self.on_device: set[int] = set()
        self.shared: set[int] = set()
        self.room = 100

    def may_draft(self, seq: Sequence) -> bool:
        return seq.seq_id not in self.on_device

    def streams_alone(self, seq: Sequence) -> bool:
        return seq.seq_id not in self.shared | self.on_device

    def reserve(self, seq: Sequence, num_tokens: int, num_ahead: int = 0) -> int | None:
        return min(num_tokens, self.room)

    def free_tokens(self, seq: Sequence) -> int:
        return 100


def decoding(seq_id: int) -> Sequence:
    request = Request(SamplingParams(max_tokens=50), 0, frozenset(), 60)
    seq = Sequence(seq_id, [1, 2, 3], 2, request, RequestMetrics(0.0), SequenceStatus.RUNNING)
    seq.num_computed = 2
    seq.draft_length = PayingDrafts(MOST, EngineDrafts())
    return seq


def turns(kv: FakeKV) -> DraftTurns:
    return DraftTurns(EngineConfig("m", speculative=f"resident:{MOST}"), kv, are_taken=True)


def ids(seqs: list[Sequence]) -> list[int]:
    return [seq.seq_id for seq in seqs]


def test_each_is_checked_in_every_second_step() -> None:
    """Also who comes later, and who is left when others end."""
    made, running = turns(FakeKV()), [decoding(i) for i in range(3)]
    waited: Counter[int] = Counter()
    for step in range(12):
        if step == 4:
            running += [decoding(3), decoding(4)]
        if step == 8:
            del running[0]
        resting = made.resting(running)
        checked = [seq for seq in running if seq not in resting]
        assert checked and resting
        waited = Counter({i: waited[i] + 1 for i in ids(resting)})
        assert max(waited.values()) == 1
        made.end_step(ScheduledBatch(tuple(ScheduledSequence(seq, 1) for seq in checked)))
    assert ids(made.resting(running[:1])) == []


@pytest.mark.parametrize("why", ["shared", "on the device", "prompt", "grammar", "long", "off"])
def test_nobody_takes_turns_where_that_does_not_pay(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    kv, running = FakeKV(), [decoding(i) for i in range(3)]
    made = turns(kv)
    assert ids(made.resting(running)) == [1]
    kv.shared |= {2} if why == "shared" else set()
    kv.on_device |= {2} if why == "on the device" else set()
    if why == "prompt":
        running[2].token_ids.append(4)
    if why == "grammar":
        running[2].grammar = cast(Grammar, object())
    if why == "long":
        monkeypatch.setattr(PayingDrafts, "is_short", False)
    made.are_taken = why != "off"
    assert made.resting(running) == []


def test_what_was_drafted_is_checked_and_no_number_is_chosen_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kv, (one, other) = FakeKV(), (decoding(0), decoding(1))
    made, chosen = turns(kv), iter([4, 0, 3])
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: next(chosen))
    checked = (ScheduledSequence(one, 1),)
    (item,) = made.drafts([other], checked, 20)
    assert item.num_drafts == 4 and item.num_tokens == 5
    made.end_step(ScheduledBatch(checked, (item.with_drafts((7, 8, 9, 7)),)))
    guesses = guesses_for(other, 3, 0, drafts=True)
    assert guesses.tokens == (7, 8, 9) and guesses.has_drafted
    assert made.drafts([one], (ScheduledSequence(other, 1),), 20) == ()
    assert one.next_guesses == () and guesses_for(one, 9, 0, drafts=True) == Guesses()
    kv.room, other.next_guesses = 1, None
    assert made.drafts([other], checked, 20) == (), "no room for drafts"
    prompt = decoding(2)
    prompt.token_ids += [4, 5]
    assert made.drafts([other], (ScheduledSequence(prompt, 3),), 20) == (), "a prompt would wait"


# -- whether it pays


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "link_s", [2.0, *(pytest.param(s, marks=pytest.mark.breadth) for s in (0.5, 20.0, 200.0))]
)
@pytest.mark.parametrize("right", [0.3, 0.8, 0.95])
def test_turns_cost_next_to_nothing_where_they_do_not_pay(
    monkeypatch: pytest.MonkeyPatch, link_s: float, right: float
) -> None:
    """Two requests whose copies take so long; a draft takes 1 s, a step beside its copies half of
    that. Half a second of copies or two: requests that hardly stream.
    """
    together, in_turn = (
        sum(tokens_a_second(monkeypatch, way, link_s, right, seed) for seed in range(3))
        for way in (False, True)
    )
    assert in_turn > 0.97 * together
    if link_s == 20 and right > 0.5:
        assert in_turn > 1.04 * together


def tokens_a_second(
    monkeypatch: pytest.MonkeyPatch, takes_turns: bool, link_s: float, right: float, seed: int
) -> float:
    """What two requests get of a clock on which nothing else runs."""
    monkeypatch.undo()
    clock, dice, cost = SimpleNamespace(now=0.0), random.Random(seed), EngineDrafts()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    each = [PayingDrafts(8, cost), PayingDrafts(8, cost)]
    kept: list[int | None] = [None, None]
    way, checked = FasterWay(), [0, 1]
    has_rested, num_tokens, turn = [False, False], 0, 0
    for _ in range(1500):
        are_short = all(one.is_short for one in each)
        in_turn = takes_turns and are_short and way.next(len(checked))
        checked = [turn] if in_turn else [0, 1]
        made = [0]
        for index in checked:
            if kept[index] is None:
                kept[index] = each[index].choose()
                made.append(kept[index] or 0)
        resting_s = 0.0
        if in_turn:
            kept[1 - turn], has_rested[1 - turn] = each[1 - turn].choose(), True
            resting_s = float(kept[1 - turn] or 0)
        clock.now += 0.5 + max(made) + max(link_s * len(checked), resting_s)
        for index in checked:
            number, num_right = kept[index] or 0, 0
            while num_right < number and dice.random() < right:
                num_right += 1
            is_timed = not in_turn and not has_rested[index]
            each[index].record(number, num_right, is_timed, is_ahead=False)
            kept[index], has_rested[index] = None, False
            num_tokens += 1 + num_right
        turn = 1 - turn
    return num_tokens / clock.now
