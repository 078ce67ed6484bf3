"""The engine against transformers, fp32, on checkpoints that transformers saved: logits and
greedy ids.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import reference, reference_greedy, reference_logits
from driver import GREEDY, Driver, assert_greedy, token_ids
from tiny_models import TINY
from torch import Tensor
from transformers import AutoModelForCausalLM

from nanoengine.engine.llm_engine import LLMEngine

BLOCK = 8
NUM_OUT = GREEDY.max_tokens
VOCAB = 256

LATER = ("bamba", "laguna", "lfm3", "olmo-hybrid", "nemotron-h-latent")
# Each row changes how the same work is cut up; none may change a logit by more than rounding.
SETTINGS = {
    "whole prompts": {"num_gpu_blocks": 64},
    "chunks of one block": {"num_gpu_blocks": 64, "max_num_batched_tokens": 8, "max_num_seqs": 8},
    "chunks across blocks": {"num_gpu_blocks": 64, "max_num_batched_tokens": 13, "max_num_seqs": 8},
    "one at a time": {"num_gpu_blocks": 64, "max_num_seqs": 1},
    "preempted": {"num_gpu_blocks": 13, "decode_reserve_blocks": 0},
    "preempted, chunked": {
        "num_gpu_blocks": 13,
        "max_num_batched_tokens": 11,
        "max_num_seqs": 5,
        "decode_reserve_blocks": 0,
    },
    "no prefix cache": {"num_gpu_blocks": 128, "enable_prefix_caching": False},
    "blocks of one token": {"num_gpu_blocks": 512, "kvcache_block_size": 1},
    "big blocks": {"num_gpu_blocks": 40, "kvcache_block_size": 32},
}


def make_engine(path: Path, **settings: object) -> LLMEngine:
    defaults = {"kvcache_block_size": BLOCK, "dtype": "float32", "device": "cpu"}
    return LLMEngine(path, **(defaults | settings))


def some_prompts() -> list[list[int]]:
    """Lengths around multiples of the block, and beginnings shared in whole and in part."""
    rng = random.Random(7)
    prompts = [
        [rng.randrange(VOCAB) for _ in range(length)] for length in (1, 7, 8, 9, 15, 16, 17, 40, 61)
    ]
    shared = prompts[7]
    return [*prompts, shared[:24], [*shared, 5], shared[:27], list(shared)]


def test_the_reference_is_the_same_with_any_guess(tiny: Callable[[str], Path]) -> None:
    model, prompt = reference(tiny("llama")), some_prompts()[3]
    right = reference_greedy(model, prompt, 6)
    for guess in (right, right[:3], [*right[:2], right[2] ^ 1, *right[3:]], [0] * 9):
        assert reference_greedy(model, prompt, 6, guess) == right


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "name",
    [
        *("falcon-h1", "gemma3-softcap", "gpt-oss", "kimi-linear", "lfm2", "qwen3.5"),
        *(
            pytest.param(name, marks=pytest.mark.breadth)
            for name in (
                *("apertus", "cohere2", "falcon-h1-norm", "gemma", "gemma2", "vaultgemma"),
                *("gemma3", "granite", "ministral3", "olmo2", "granite-hybrid", "lfm2-moe"),
                *("qwen3.5-moe", "nemotron-h-moe", *LATER),
            )
        ),
    ],
)
def test_bfloat16_is_as_near_as_transformers_own(tiny: Callable[[str], Path], name: str) -> None:
    """To transformers' fp32, on the same tokens. A norm's 1 + weight rounded would show here.

    Of rows the median: near ties of a router send some elsewhere, far from what they should be.
    """
    folder, prompts = tiny(name), some_prompts()
    rounded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    driver = Driver(make_engine(folder, dtype="bfloat16", num_gpu_blocks=128))
    ours: list[Tensor] = []
    theirs: list[Tensor] = []
    for prompt, output in zip(prompts, driver.run(prompts), strict=True):
        ids = prompt + output.outputs[0].token_ids
        exact = reference_logits(reference(folder), ids)[len(prompt) - 1 : -1]
        ours.append(torch.stack(driver.logits[output.request_id]).float() - exact)
        theirs.append(reference_logits(rounded, ids)[len(prompt) - 1 : -1].float() - exact)
    driver.engine.close()
    error, allowed = (torch.cat(each).norm(dim=1).median() for each in (ours, theirs))
    assert 0 < error < 1.1 * allowed


@pytest.mark.some(3)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_ids_and_logits_equal_transformers(
    tiny: Callable[[str], Path], name: str, settings: dict[str, object]
) -> None:
    """All prompts at once, then all again (prefix hits), under every way to cut the work up."""
    path = tiny(name)
    model = reference(path)
    prompts = some_prompts()
    engine = make_engine(path, **settings)
    driver = Driver(engine)
    for _ in range(2):
        outputs = driver.run(prompts)
        for prompt, output in zip(prompts, outputs, strict=True):
            tokens = output.outputs[0].token_ids
            expected = reference_greedy(model, prompt, NUM_OUT, tokens)
            assert tokens == expected
            logits = reference_logits(model, prompt + expected)[len(prompt) - 1 : -1]
            ours = torch.stack(driver.logits[output.request_id])
            torch.testing.assert_close(ours[:, : logits.shape[1]], logits, atol=1e-4, rtol=0)
    preemptions = sum(output.metrics.num_preemptions for output in outputs)
    assert (preemptions > 0) == ("decode_reserve_blocks" in settings)
    cached = [output.num_cached_tokens for output in outputs]
    assert any(cached) == settings.get("enable_prefix_caching", True)


@pytest.mark.some(8)
@pytest.mark.parametrize("name", TINY)
def test_every_architecture(tiny: Callable[[str], Path], name: str) -> None:
    """Mixed batch, chunked, past the original RoPE positions."""
    path = tiny(name)
    model = reference(path)
    prompts = [*some_prompts()[2:6], [i * 7 % VOCAB for i in range(150)]]
    driver = Driver(make_engine(path, num_gpu_blocks=64, max_num_batched_tokens=50, max_num_seqs=8))
    for prompt, output in zip(prompts, driver.run(prompts), strict=True):
        tokens = output.outputs[0].token_ids
        expected = reference_greedy(model, prompt, NUM_OUT, tokens)
        assert tokens == expected
        logits = reference_logits(model, prompt + expected)[len(prompt) - 1 : -1]
        ours = torch.stack(driver.logits[output.request_id])
        torch.testing.assert_close(ours, logits, atol=1e-4, rtol=0)


def test_a_full_prefix_hit_computes_one_token(tiny: Callable[[str], Path]) -> None:
    """A prompt of k x block tokens seen before: only its last token runs, and the answer is the
    same.
    """
    driver = Driver(make_engine(tiny("llama"), num_gpu_blocks=64))
    prompt = some_prompts()[7]
    assert len(prompt) == 5 * BLOCK
    first, second = driver.run([prompt])[0], driver.run([prompt])[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, len(prompt) - 1)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_generated_blocks_are_reused(tiny: Callable[[str], Path]) -> None:
    """The next turn of a conversation finds the KV of the answer, too."""
    driver = Driver(make_engine(tiny("llama"), num_gpu_blocks=64))
    prompt = some_prompts()[2]
    answer = driver.run([prompt])[0].outputs[0].token_ids
    follow_up = driver.run([[*prompt, *answer, 3]])[0]
    assert follow_up.num_cached_tokens == (len(prompt) + NUM_OUT - 1) // BLOCK * BLOCK


def test_the_beginning_of_a_text_outlives_its_end_in_the_cache(
    tiny: Callable[[str], Path],
) -> None:
    """Another request takes some of its blocks: the deepest ones, as the others lead to them."""
    driver = Driver(make_engine(tiny("llama"), num_gpu_blocks=14))
    prompt, other = [i % 7 for i in range(10 * BLOCK)], [9 + i % 7 for i in range(8 * BLOCK)]
    driver.run([prompt])
    driver.run([other])
    assert driver.run([prompt])[0].num_cached_tokens >= 3 * BLOCK


def test_the_smallest_pool_serves_what_fits(tiny: Callable[[str], Path]) -> None:
    """Two blocks, six requests: one runs at a time and every answer is right."""
    path = tiny("llama")
    prompts = [[i + 3, i, 2 * i] for i in range(6)]
    params = [GREEDY] * 6
    driver = Driver(make_engine(path, num_gpu_blocks=3, kvcache_block_size=8))
    outputs = driver.run(prompts, params)
    assert_greedy(path, prompts, outputs, NUM_OUT)


def test_request_fifty_equals_a_fresh_engine(tiny: Callable[[str], Path]) -> None:
    """49 requests, some of them aborted half way, leave nothing behind that request 50 could
    see.
    """
    path = tiny("qwen3")
    engine = make_engine(path, num_gpu_blocks=24, max_num_batched_tokens=32, max_num_seqs=4)
    driver = Driver(engine)
    rng = random.Random(3)
    for i in range(49):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 90))]
        request = engine.add_request(prompt, GREEDY)
        if i % 3 == 0:
            for _ in range(rng.randrange(4)):
                driver.step()
            engine.abort(request)
            engine.kv.check()
    driver.drain()
    last = some_prompts()[8]
    fresh = Driver(make_engine(path, num_gpu_blocks=24, max_num_batched_tokens=32, max_num_seqs=4))
    ours, theirs = driver.run([last])[0], fresh.run([last])[0]
    assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
    old, new = driver.logits[ours.request_id], fresh.logits[theirs.request_id]
    torch.testing.assert_close(torch.stack(old), torch.stack(new), atol=0, rtol=0)


def test_batch_mates_do_not_matter(tiny: Callable[[str], Path]) -> None:
    """Seeded sampling gives the same tokens alone and in a crowd."""
    from nanoengine import SamplingParams

    path = tiny("llama")
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    prompts = some_prompts()
    alone = Driver(make_engine(path, num_gpu_blocks=64)).run([prompts[4]], params)
    crowd = Driver(make_engine(path, num_gpu_blocks=64)).run(prompts, params)
    assert alone[0].outputs[0].token_ids == crowd[4].outputs[0].token_ids
    assert len(set(map(tuple, token_ids(crowd)))) > 5
