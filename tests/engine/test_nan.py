"""A request whose logits are no numbers fails with words, gives no token, and harms nobody."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from driver import assert_all_free
from safetensors.torch import load_file, save_file

from nanoengine import LLM, SamplingParams
from nanoengine.errors import LogitsError

HELD = {"structured_outputs": {"regex": "[a-z]{5,30}"}, "min_tokens": 1}
Tiny = Callable[[str], Path]
BAD = 77  # the token whose embedding is damaged
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=6, ignore_eos=True)
PROMPTS = [[10, 20, 30], [10, BAD, 30], [40, 50]]


@pytest.fixture(scope="module")
def damaged(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged") / "model"
    shutil.copytree(tiny("llama"), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def llm(damaged: Path) -> Iterator[LLM]:
    with LLM(damaged, dtype="float32", kvcache_block_size=8, num_gpu_blocks=40) as engine:
        yield engine
        assert_all_free(engine.llm_engine)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "float32", "attention_backend": "torch"},
        {"dtype": "float32", "speculative": "ngram:3"},
        {"dtype": "float32", "num_gpu_blocks": 3, "enable_cpu_offload": True, "debug_kv": True}
        | {"offload_mode": "stream", "kv_offload_gib": 0.01, "slot_tokens": 8},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_request_fails_and_its_neighbours_get_their_tokens(
    damaged: Path, tiny: Tiny, settings: dict[str, Any], params: SamplingParams
) -> None:
    settings = {"num_gpu_blocks": 40, "kvcache_block_size": 8, "num_threads": 1} | settings
    with LLM(tiny("llama"), **settings) as engine:
        wanted = engine.generate(PROMPTS, params, use_tqdm=False)
    with LLM(damaged, **settings) as engine:
        got = engine.generate(PROMPTS, params, use_tqdm=False)
        assert_all_free(engine.llm_engine)
    assert isinstance(got[1].error, LogitsError) and "token 3 of this" in str(got[1].error)
    assert (got[1].outputs[0].token_ids, got[1].outputs[0].finish_reason) == ([], "error")
    for index in (0, 2):
        assert got[index].error is None
        assert got[index]["token_ids"] == wanted[index]["token_ids"]


def test_what_was_generated_before_stays(llm: LLM) -> None:
    """The damaged token is forced in as the second of the output."""
    forced = SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=[BAD])
    output = llm.generate([[10, 20]], forced, use_tqdm=False)[0]
    assert output["token_ids"] == [BAD] and isinstance(output.error, LogitsError)


def test_streams_beams_and_several_completions_fail_with_the_same_words(llm: LLM) -> None:
    with pytest.raises(LogitsError, match="no finite numbers"):
        list(llm.stream([10, BAD], GREEDY))
    found = llm.beam_search([[10, BAD], [10, 20]], beam_width=2, max_tokens=3, use_tqdm=False)
    assert isinstance(found[0].error, LogitsError) and not found[0].sequences
    assert found[1].error is None and len(found[1].sequences) == 2
    several = SamplingParams(n=3, seed=1, max_tokens=3)
    output = llm.generate([[10, BAD]], several, use_tqdm=False)[0]
    assert [made.finish_reason for made in output.outputs] == ["error"] * 3
    scored = SamplingParams(temperature=0, max_tokens=2, logprobs=2, prompt_logprobs=1)
    assert isinstance(llm.generate([[10, BAD]], scored, use_tqdm=False)[0].error, LogitsError)


def test_broken_kv_is_not_found_by_others(llm: LLM) -> None:
    prompt = [10, BAD, *range(100, 130)]
    for _ in range(2):
        output = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        assert isinstance(output.error, LogitsError) and output.num_cached_tokens == 0


SHARED = [7 * i % 61 for i in range(8)]  # a block that is not broken
LATER = [*SHARED, 1, 2, 3, BAD, *range(100, 130)]  # BAD is in the first of three steps


@pytest.mark.parametrize("backend", ["auto", "torch", "sdpa"])
def test_a_block_before_the_broken_one(damaged: Path, backend: str) -> None:
    """It was computed in the same step. Others find it while the request goes on, where attention
    keeps blocks apart; once the request has failed, nobody does.
    """
    settings = {"attention_backend": backend, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    prompt = [*SHARED, 9, 8, 5]
    with LLM(damaged, dtype="float32", kvcache_block_size=8, num_gpu_blocks=40, **settings) as llm:
        wanted = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        llm.reset_prefix_cache()
        engine = llm.llm_engine
        engine.add_request(LATER, GREEDY)
        engine.step()
        answers = llm.generate([prompt], GREEDY, use_tqdm=False) if backend != "sdpa" else []
        while engine.has_unfinished_requests:
            engine.step()
        answers += llm.generate([prompt], GREEDY, use_tqdm=False)
        assert answers[0].num_cached_tokens == 8 * (backend != "sdpa")
        assert answers[-1].num_cached_tokens == 0
        assert all(a["token_ids"] == wanted["token_ids"] for a in answers)
        assert_all_free(engine)


@pytest.mark.parametrize("asked", [{}, HELD], ids=["plain", "held"])
def test_kv_that_was_broken_once_is_not_found_again(tiny: Tiny, asked: dict[str, Any]) -> None:
    """Whatever the error says: a form and min_tokens might be the reason as well."""
    params = SamplingParams(temperature=0, max_tokens=8, **asked)
    prompt = [(7 * i) % 250 + 4 for i in range(40)]
    settings: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "num_threads": 1}
    with LLM(
        tiny("llama"), dtype="float32", kvcache_block_size=8, num_gpu_blocks=64, **settings
    ) as llm:
        engine = llm.llm_engine
        request = engine.add_request(prompt, params)
        engine.step()
        for pool in engine.kv.memory.pool:
            pool[:] = float("nan")
        found = []
        while engine.has_unfinished_requests:
            found += engine.step()
        assert [output.request_id for output in found if output.error] == [request]
        (again,) = llm.generate([prompt], params, use_tqdm=False)
        assert again.error is None and again.num_cached_tokens == 0
