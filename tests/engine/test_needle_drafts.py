"""Drafts of a model that copies what followed a key (benchmarks/induction.py): they are right where
the needle is on the device, and attention brings it there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from driver import STREAMED, Driver, small_engine

from benchmarks.induction import write_checkpoint
from nanoengine import SamplingParams
from nanoengine.engine.draft_length import PayingDrafts
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.kv import draft_plan
from nanoengine.kv.block_heat import BlockHeat
from nanoengine.outputs import RequestOutput

SIZE, NUM_BLOCKS = 16, 40  # tokens of a block, blocks of the prompt
NEEDLE_BLOCKS = 4
NUM_TOKENS = 60  # to be found
MOST = 5
SETTINGS = STREAMED | {
    "kvcache_block_size": SIZE,
    "slot_tokens": 2 * SIZE,
    "num_gpu_blocks": 12,
    "max_model_len": SIZE * (NUM_BLOCKS + NEEDLE_BLOCKS + 1),
    "speculative": f"resident:{MOST}",
    "measure_speed": False,
}


@dataclass(frozen=True)
class Haystack:
    """A prompt that ends with the first token of its needle, which lies from block `block` on; the
    model goes on with the others.
    """

    prompt: list[int]
    needle: list[int]
    block: int

    @classmethod
    def with_needle_at(cls, block: int) -> Haystack:
        rng = random.Random(5)
        tokens = rng.sample(range(2, 512), 510)
        needle, straw = tokens[: NEEDLE_BLOCKS * SIZE], tokens[NEEDLE_BLOCKS * SIZE :]
        prompt = rng.choices(straw, k=NUM_BLOCKS * SIZE - 3)
        prompt[block * SIZE : block * SIZE + len(needle)] = needle
        return cls([*prompt, needle[0]], needle, block)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("induction"))


@pytest.fixture
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLMEngine]:
    """It drafts in every streamed step, whether that pays or not."""
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: MOST)
    made = small_engine(folder, **SETTINGS)
    yield made
    made.close()


@pytest.fixture
def without_heat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockHeat, "begin", lambda *rest: None)


@dataclass(frozen=True)
class Told:
    """What a run showed: the share of drafts that were right, the steps that decoded, and how many
    of these each block of the needle was asked for in and not on the device.
    """

    share_right: float
    num_steps: int
    num_misses: list[int]


def run(engine: LLMEngine, haystack: Haystack, num_tokens: int) -> Told:
    """The text must be the needle."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    engine.add_request(haystack.prompt, params)
    driver, misses, num_steps = Driver(engine), [0] * NEEDLE_BLOCKS, 0
    outputs: list[RequestOutput] = []
    while not outputs:
        (seq,) = [*engine.scheduler.running, *engine.scheduler.waiting]
        if seq.num_output_tokens:
            num_steps += 1
            number = (seq.num_output_tokens + 1) // SIZE
            block = engine.kv.tables[seq.seq_id].blocks[haystack.block + number]
            misses[number] += block.device_slot is None
        outputs = driver.step()
    metrics = outputs[0].metrics
    assert outputs[0].outputs[0].token_ids == haystack.needle[1 : 1 + num_tokens]
    return Told(metrics.num_accepted / metrics.num_guessed, num_steps, misses)


@pytest.mark.usefixtures("without_heat")
def test_with_the_needle_on_the_device_every_draft_is_right(engine: LLMEngine) -> None:
    """The newest blocks are there."""
    told = run(engine, Haystack.with_needle_at(NUM_BLOCKS - NEEDLE_BLOCKS - 2), NUM_TOKENS)
    assert told == Told(1.0, -(-(NUM_TOKENS - 1) // (1 + MOST)), [0] * NEEDLE_BLOCKS)


@pytest.mark.usefixtures("without_heat")
def test_with_the_needle_on_the_host_no_draft_is_right(engine: LLMEngine) -> None:
    """And the text is the same."""
    told = run(engine, Haystack.with_needle_at(NUM_BLOCKS // 4), NUM_TOKENS)
    assert told.share_right < 0.05
    assert sum(told.num_misses) == told.num_steps > 0.9 * NUM_TOKENS


def test_attention_brings_the_needle_to_the_device(engine: LLMEngine) -> None:
    """One block after the other, once the text has come to it."""
    told = run(engine, Haystack.with_needle_at(NUM_BLOCKS // 4), NUM_TOKENS)
    assert max(told.num_misses) <= 2
    assert told.share_right > 0.4
    assert told.num_steps < 0.4 * NUM_TOKENS


def test_what_attention_brought_is_read_where_drafts_read_a_part(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the 11 blocks before the tail that the device has room for, drafts read 6."""
    monkeypatch.setattr(draft_plan, "MAX_DRAFT_TOKENS", 6 * SIZE)
    told = run(engine, Haystack.with_needle_at(NUM_BLOCKS // 4), NUM_TOKENS)
    assert max(told.num_misses) <= 2
    assert told.share_right > 0.4
