"""Where steps are begun ahead of the one before, none is ahead of a step that drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver import STREAMED, Driver, small_engine

from nanoengine import SamplingParams
from nanoengine.engine.draft_length import PayingDrafts
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.sequence import ScheduledBatch

PROMPTS = [[(7 * i + 3 * j) % 250 + 4 for i in range(n)] for j, n in enumerate((70, 60))]
PARAMS = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (60, 20)]


def noted_steps(engine: LLMEngine) -> list[tuple[bool, bool]]:
    """Of each further step: whether it drafts, and whether the next one is begun ahead of it."""
    steps: list[tuple[bool, bool]] = []
    schedule_ahead = engine.scheduler.schedule_ahead

    def noted(batch: ScheduledBatch) -> ScheduledBatch | None:
        ahead = schedule_ahead(batch)
        steps.append((batch.num_drafts > 0, ahead is not None))
        return ahead

    engine.scheduler.schedule_ahead = noted  # type: ignore[method-assign]
    return steps


def ids_of(engine: LLMEngine) -> list[list[int]]:
    """What the prompts are answered with; ends the engine."""
    outputs = Driver(engine).run(PROMPTS, PARAMS)
    engine.close()
    return [output.outputs[0].token_ids for output in outputs]


def test_a_sequence_that_drafts_while_its_last_block_is_brought(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request ends, and the other fits the device. In the step that brings its blocks it still
    drafts, and how far it comes is not known before the step has ended.
    """
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: 5)
    settings: dict[str, Any] = STREAMED | {"num_gpu_blocks": 18, "measure_speed": False}
    texts, steps = [], set()
    for speculative in (None, "resident:5"):
        engine = small_engine(tiny("llama"), True, speculative=speculative, **settings)
        noted = noted_steps(engine)
        texts.append(ids_of(engine))
        steps |= {*noted}
    assert texts[0] == texts[1]
    assert {(True, False), (False, True)} <= steps and (True, True) not in steps


def test_who_streams_is_begun_ahead_until_one_drafts(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some steps without drafts comes one with drafts. Blocks are swapped meanwhile."""
    monkeypatch.setattr(PayingDrafts, "_number", lambda self: 5 * (self._since_trial % 2 == 1))
    texts = []
    for speculative in ("off", "resident:5"):
        settings = STREAMED | {"speculative": speculative, "measure_speed": False, "debug_kv": True}
        engine = small_engine(tiny("llama"), True, **settings)
        steps = noted_steps(engine)
        texts.append(ids_of(engine))
    assert texts[0] == texts[1]
    assert steps.count((True, False)) > 8 and (True, True) not in steps
    assert steps.count((False, True)) > 8
