"""Several completions of one prompt: they share its KV, and are those of requests of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver import STREAMED, Driver, small_engine

from nanoengine import SamplingParams
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import InvalidParamsError
from nanoengine.outputs import RequestOutput

BLOCK = 8
NUM = 4
OFFLOAD = STREAMED | {"debug_kv": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "resident": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "two at a time": {"max_num_seqs": 2},
    "preempted": {"num_gpu_blocks": 9, "decode_reserve_blocks": 0},
    "run ahead": {"runs_ahead": True},
    "streamed": OFFLOAD,
    "streamed, late": OFFLOAD | {"debug_copy_delay_ms": 0.3},
    "in place": OFFLOAD | {"offload_mode": "in_place"},
    "a large device": OFFLOAD | {"num_gpu_blocks": 60},
}
# After 24 tokens a window of 21 passes a block, which whoever computes the last of them sees.
BLOCKS_OF_FOUR = {"kvcache_block_size": 4, "num_gpu_blocks": 128}


def drain(engine: LLMEngine) -> dict[int, RequestOutput]:
    return Driver(engine).drain()


def prompt_of(length: int) -> list[int]:
    return [(i * 37 + length) % 256 for i in range(length)]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(("llama", settings) for settings in SETTINGS.values()),
        *(("mistral-window", SETTINGS[kind]) for kind in ("resident", "chunked", "streamed")),
        ("mistral-window", BLOCKS_OF_FOUR),
    ],
    ids=[*SETTINGS, "windows", "windows, chunked", "windows, streamed", "windows, small blocks"],
)
def test_completions_are_those_of_single_requests(
    tiny: Callable[[str], Path], name: str, settings: dict[str, Any]
) -> None:
    """Prompts that end inside a block, at its border, in the first one; twice over one cache."""
    lengths = (19, 24, 1, 3, 43)
    params = {"max_tokens": 11, "ignore_eos": True, "temperature": 1.5}
    single = small_engine(tiny(name))
    expected = []
    for length in lengths:
        each = [SamplingParams(**params, seed=100 + length + i) for i in range(NUM)]
        ids = [single.add_request(prompt_of(length), one) for one in each]
        found = drain(single)
        expected.append([found[i].outputs[0].token_ids for i in ids])
    single.close()
    assert len({tuple(ids) for each in expected for ids in each}) == NUM * len(lengths)
    engine = small_engine(tiny(name), **settings)
    for _ in range(2):
        ids = [
            engine.add_request(
                prompt_of(length), SamplingParams(**params, n=NUM, seed=100 + length)
            )
            for length in lengths
        ]
        found = drain(engine)
        assert set(found) == set(ids)
        outputs = [found[i].outputs for i in ids]
        assert [[made.token_ids for made in each] for each in outputs] == expected
        assert all([made.index for made in each] == [*range(NUM)] for each in outputs)
    engine.close()


@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_is_computed_and_held_once(tiny: Callable[[str], Path], caching: bool) -> None:
    """Full blocks are the same blocks; of the last one, each completion has its own copy, and
    computes one token of the prompt.
    """
    engine = small_engine(
        tiny("llama"),
        max_num_batched_tokens=256,
        enable_prefix_caching=caching,
    )
    length = 8 * BLOCK + 3
    engine.add_request(prompt_of(length), SamplingParams(n=NUM, seed=1, max_tokens=4))
    sizes = []
    for _ in range(2):
        batch = engine.scheduler.schedule()
        sizes.append([item.num_tokens for item in batch.items])
        engine.scheduler.postprocess(batch, engine.runner.run(batch))
    assert sizes == [[length], [1] * NUM]
    tables = [table.blocks for table in engine.kv.tables.values()]
    assert len(tables) == NUM
    assert all(blocks[:8] == tables[0][:8] for blocks in tables)
    assert len({blocks[8] for blocks in tables}) == NUM
    drain(engine)
    engine.close()


def test_completions_end_each_in_its_time(tiny: Callable[[str], Path]) -> None:
    """Some meet a stop; the request is answered when all have ended, and leaves nothing behind."""
    engine = small_engine(tiny("llama"), enable_prefix_caching=False)
    params = SamplingParams(n=16, seed=5, max_tokens=20, temperature=2.0, logprobs=1)
    engine.add_request(prompt_of(11), params)
    (output,) = drain(engine).values()
    reasons = {made.finish_reason for made in output.outputs}
    assert reasons == {"stop", "length"} and output.finished
    assert all(len(made.logprobs) == len(made.token_ids) for made in output.outputs)
    assert not engine.kv.tables and not engine.outputs.unfinished(range(100))
    engine.close()


def test_abort_ends_all_completions(tiny: Callable[[str], Path]) -> None:
    engine = small_engine(tiny("llama"), max_num_seqs=3)
    request_id = engine.add_request(
        prompt_of(20), SamplingParams(n=NUM, max_tokens=50, ignore_eos=True)
    )
    for _ in range(4):
        assert not engine.step()
    (output,) = engine.abort(request_id)
    assert [made.finish_reason for made in output.outputs] == ["abort"] * NUM
    assert len(output.outputs[0].token_ids) == 4 and not output.outputs[3].token_ids
    assert not engine.has_unfinished_requests and not engine.kv.tables
    engine.close()


def test_what_a_request_names_is_read_once_for_all_completions(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body may name a million ids, or words of 64,000 characters, and ask for 1024 texts."""
    engine = LLMEngine(tiny("llama"), kvcache_block_size=8, num_gpu_blocks=64, dtype="float32")
    encoded: list[str] = []
    encode = type(engine.inputs.tokenizer).encode

    def counted(self: Any, text: str, **kwargs: Any) -> list[int]:
        encoded.append(text)
        return encode(self, text, **kwargs)

    monkeypatch.setattr(type(engine.inputs.tokenizer), "encode", counted)
    params = SamplingParams(
        n=5,
        seed=(1 << 64) - 2,
        bad_words=["word"],
        allowed_token_ids=[7, 8, 7, 9],
        stop_token_ids=[8, 8],
        repetition_penalty=1.1,
    )
    assert (params.allowed_token_ids, params.stop_token_ids) == ((7, 8, 9), (8,))
    first, *others = engine.inputs.sequences([1, 2, 3], params, None, None)
    assert encoded == ["word", " word"]
    for index, seq in enumerate(others, 1):
        mine, its = first.request, seq.request
        assert its.stop_token_ids is mine.stop_token_ids and its.bad_words is mine.bad_words
        assert its.params.allowed_token_ids is mine.params.allowed_token_ids
        assert first.history is not None and seq.history is not None
        assert seq.history is not first.history and seq.history.prompt is first.history.prompt
        assert (its.index, its.seed) == (index, its.params.seed) == (index, (index - 2) % (1 << 64))
    engine.close()


def test_greedy_completions_are_refused() -> None:
    with pytest.raises(InvalidParamsError, match="n=2 greedy completions would all be the same"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(InvalidParamsError, match="n must be between 1 and"):
        SamplingParams(n=0)
