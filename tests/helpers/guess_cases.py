"""Requests for tests that guess: what they ask for, where their KV lies, and what comes without
guesses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from driver import STREAMED, Driver, small_engine
from fixed_drafts import scored
from torch import Tensor

from nanoengine import SamplingParams
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.outputs import RequestOutput

PROMPTS = [[(7 * i + 3 * j) % 250 + 4 for i in range(n)] for j, n in enumerate((70, 33, 9))]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "logprobs": 2}
PARAMS = [
    SamplingParams(max_tokens=30, **GREEDY),
    SamplingParams(max_tokens=24, **GREEDY | {"temperature": 0.9, "seed": 5}),
    SamplingParams(max_tokens=40, **GREEDY),
]
DEBUG: dict[str, Any] = {"debug_kv": True, "measure_speed": False}


def in_two_tiers(num_gpu_blocks: int) -> dict[str, Any]:
    """Settings with so many blocks on the device."""
    return STREAMED | {"num_gpu_blocks": num_gpu_blocks, "max_num_seqs": 3}


def layouts(num_gpu_blocks: int) -> dict[str, dict[str, Any]]:
    """Where KV may lie, with so many blocks on the device where there are two tiers."""
    tiers = in_two_tiers(num_gpu_blocks)
    return {
        "resident": {},
        "in place": tiers | {"offload_mode": "in_place", "stream_mib_per_step": None},
        "ring of two": tiers | {"ring_slots": 2},
        "ring of three": tiers | {"ring_slots": 3},
        "preempted": {"num_gpu_blocks": 14, "decode_reserve_blocks": 0},
        "no prefix cache": {"enable_prefix_caching": False},
        "blocks of two": {"num_gpu_blocks": 256, "kvcache_block_size": 2},
    }


def run(engine: LLMEngine) -> list[RequestOutput]:
    """The answers to PROMPTS."""
    return Driver(engine).run(PROMPTS, PARAMS)


def plain(path: Path, **settings: Any) -> list[tuple[list[int], Tensor]]:
    """Their ids and log probabilities, from an engine that nobody guesses for."""
    engine = small_engine(path, **settings)
    outputs = scored(run(engine))
    engine.close()
    return outputs


def everything() -> list[SamplingParams]:
    """Parameters of many kinds."""
    shared: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "logprobs": 2}
    return [
        SamplingParams(**shared, temperature=0, repetition_penalty=1.4),
        SamplingParams(**shared, temperature=0.8, seed=3, n=3),
        SamplingParams(**shared, temperature=0, frequency_penalty=0.8, presence_penalty=0.5),
        SamplingParams(**shared, temperature=0, bad_words=["ab", "a", "e"], prompt_logprobs=1),
        SamplingParams(max_tokens=20, logprobs=0, structured_outputs={"regex": "(ab|cd){4,}"}),
        SamplingParams(**shared, temperature=1.5, seed=8, top_p=0.9, min_tokens=7, stop=["a"]),
        SamplingParams(**shared, temperature=0, allowed_token_ids=[5, 16, 27]),
    ]
