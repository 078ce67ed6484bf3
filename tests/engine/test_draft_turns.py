"""Streamed requests that take turns: one half is checked while the other half drafts. Forced on a
CPU, with PyTorch's operators as on a GPU; freed memory is NaN and every access is checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import STREAMED, Driver, small_engine
from fixed_drafts import FixedDrafter, scored
from marks import needs_compiler
from plain_products import use_plain_products

from nanoengine import SamplingParams
from nanoengine.engine.draft_length import DraftCost, PayingDrafts
from nanoengine.engine.drafter import Drafts
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.kv.open_step import OpenStep
from nanoengine.models.torch_ops import TorchOps
from nanoengine.outputs import RequestOutput
from nanoengine.sampling_params import StructuredOutputsParams
from nanoengine.sequence import ScheduledBatch
from nanoengine.startup import parts

MOST = 5
PROMPTS = [[(7 * i + 3 * j) % 250 + 4 for i in range(n)] for j, n in enumerate((120, 96, 101))]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "logprobs": 2}
PARAMS = [
    SamplingParams(max_tokens=40, **GREEDY),
    SamplingParams(max_tokens=36, **GREEDY | {"temperature": 0.9, "seed": 5}),
    SamplingParams(max_tokens=30, **GREEDY),
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
        """Who rested is checked in the next step, with what it drafted."""
        for batch, following in zip(self.batches, self.batches[1:], strict=False):
            guesses = {item.seq.seq_id: item.guesses for item in following.items}
            for item in batch.resting:
                assert len(guesses[item.seq.seq_id]) == item.num_drafts or item.seq.is_finished


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
        ("resident", "few blocks"),
        ("oracle", "few blocks"),
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
