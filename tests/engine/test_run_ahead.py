"""A step that is begun before the tokens of the one before it are read gives the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import reference, reference_greedy

from nanoengine import SamplingParams
from nanoengine.engine.llm_engine import LLMEngine

BLOCK = 4
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
SETTINGS = {
    "resident": {"num_gpu_blocks": 100},
    "no prefix cache": {"num_gpu_blocks": 100, "enable_prefix_caching": False},
    "few blocks": {"num_gpu_blocks": 14, "max_num_seqs": 3},
    "stream": {
        "num_gpu_blocks": 6,
        "enable_cpu_offload": True,
        "offload_mode": "stream",
        "kv_offload_gib": 0.01,
        "slot_tokens": BLOCK,
        "stream_mib_per_step": 1000.0,
    },
}


def engine(folder: Path, **settings: Any) -> LLMEngine:
    defaults = {
        "device": "cpu",
        "dtype": "float32",
        "kvcache_block_size": BLOCK,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 4,
        "speculative": "off",
    }
    made = LLMEngine(folder, **(defaults | settings))
    made.runs_ahead = True
    return made


def prompts() -> list[list[int]]:
    return [[(i * 31 + n) % 256 for i in range(n)] for n in (1, 3, 4, 9, 16, 21)]


def answer(made: LLMEngine, each: list[SamplingParams]) -> list[list[int]]:
    """Runs all to their end and counts, in `made.num_ahead`, the steps that were begun early."""
    ids = [made.add_request(p, params) for p, params in zip(prompts(), each, strict=True)]
    found, made.num_ahead = {}, 0
    while made.has_unfinished_requests:
        made.num_ahead += made._under_way is not None
        for output in made.step():
            found[output.request_id] = output.outputs[0].token_ids
        made.kv.check()
    return [found[i] for i in ids]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_greedy_ids_are_those_of_transformers(
    tiny: Callable[[str], Path], settings: dict[str, Any]
) -> None:
    """Lengths differ, so requests end while a step that holds them is under way."""
    folder = tiny("llama")
    lengths = [3, 5, 8, 13, 14, 9]
    each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    made = engine(folder, **settings)
    found = answer(made, each)
    model = reference(folder)
    for prompt, num_tokens, tokens in zip(prompts(), lengths, found, strict=True):
        assert tokens == reference_greedy(model, prompt, num_tokens, tokens)
    assert made.num_ahead > 2
    assert made._under_way is None
    made.close()


@pytest.mark.parametrize("settings", [SETTINGS["resident"], SETTINGS["stream"]], ids=str)
def test_chunks_of_a_prompt_run_ahead(
    tiny: Callable[[str], Path], settings: dict[str, Any]
) -> None:
    """Blocks that the chunk before fills leave the device meanwhile, as complete."""
    folder, prompt = tiny("llama"), [(i * 31) % 256 for i in range(119)]
    made = engine(folder, **(settings | {"max_num_batched_tokens": 16}))
    request, num_ahead, found = made.add_request(prompt, SamplingParams(**GREEDY)), 0, {}
    while made.has_unfinished_requests:
        found |= {o.request_id: o.outputs[0].token_ids for o in made.step()}
        num_ahead += made._under_way is not None
        made.kv.check()
    assert found[request] == reference_greedy(reference(folder), prompt, 6)
    assert num_ahead >= 7 + 4
    made.close()


def test_sampled_and_stopped_ids_are_those_of_an_engine_in_step(
    tiny: Callable[[str], Path],
) -> None:
    """Stop tokens end a request that is in the step under way, and its blocks serve others."""
    folder = tiny("llama")
    each = [
        SamplingParams(
            temperature=1.0, max_tokens=30, seed=n, stop_token_ids=list(range(0, 256, 9))
        )
        for n in range(len(prompts()))
    ]
    ahead, in_step = engine(folder, num_gpu_blocks=60), engine(folder, num_gpu_blocks=60)
    in_step.runs_ahead = False
    found = answer(ahead, each)
    assert found == answer(in_step, each)
    assert min(map(len, found)) < max(map(len, found))
    assert ahead.num_ahead > 5 and not in_step.num_ahead


def test_an_aborted_request_leaves_nothing_under_way(tiny: Callable[[str], Path]) -> None:
    """Aborted between two steps, one of which is already begun, it neither answers nor disturbs."""
    folder = tiny("llama")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    made = engine(folder, num_gpu_blocks=60)
    ids = [made.add_request(p, params) for p in prompts()[:3]]
    for _ in range(4):
        made.step()
    assert made._under_way is not None
    made.abort(ids[1])
    late = made.add_request(prompts()[3], params)
    found = {}
    while made.has_unfinished_requests:
        found |= {o.request_id: o.outputs[0].token_ids for o in made.step()}
        made.kv.check()
    model = reference(folder)
    assert sorted(found) == [ids[0], ids[2], late]
    for request, prompt in ((ids[0], prompts()[0]), (ids[2], prompts()[2]), (late, prompts()[3])):
        assert found[request] == reference_greedy(model, prompt, 12)
