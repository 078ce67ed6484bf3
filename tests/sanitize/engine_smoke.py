"""Whole engines on our C kernels, for benchmarks/proofs/sanitizers.py: not part of `make test`."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver, token_ids

from nanoengine import SamplingParams
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.kernels import cpu_linear
from nanoengine.kernels.cpu_linear import CpuLinear

OFFLOADED = {"num_gpu_blocks": 8, "enable_cpu_offload": True, "kv_offload_gib": 0.02}
MODES: dict[str, dict[str, Any]] = {
    "resident": {"num_gpu_blocks": 200},
    "in_place": OFFLOADED | {"offload_mode": "in_place"},
    "stream": OFFLOADED | {"offload_mode": "stream", "ring_slots": 2, "stream_mib_per_step": 1e6},
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=0.8, top_k=40, top_p=0.9, max_tokens=12, ignore_eos=True, seed=1
)


def some_prompts() -> list[list[int]]:
    """Enough of them that two threads share a decode step; two begin alike."""
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (1, 7, 33, 150, 200, 90)]
    return [*prompts, [*prompts[3][:100], 5]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "kimi-linear"])
def test_every_tier_gives_the_same_ids(
    tiny: Callable[[str], Path],
    threads_as_before: None,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    dtype: str,
) -> None:
    loads, load = [], CpuLinear.load

    def loading(*args: Any, **options: Any) -> CpuLinear:
        loads.append(load(*args, **options))
        return loads[-1]

    monkeypatch.setattr(CpuLinear, "load", loading)
    prompts, answers = some_prompts(), {}
    for mode, settings in MODES.items():
        engine = LLMEngine(
            tiny(name),
            dtype=dtype,
            device="cpu",
            num_threads=2,
            attention_backend="c",
            kvcache_block_size=16,
            max_num_batched_tokens=128,
            **settings,
        )
        assert torch.get_num_threads() == 2
        params = [SAMPLED if i % 2 else GREEDY for i in range(len(prompts))]
        answers[mode] = token_ids(Driver(engine).run(prompts, params))
        assert (engine.kv.counters.h2d_bytes > 0) == (mode == "stream")
        engine.close()
    assert answers["in_place"] == answers["stream"] == answers["resident"]
    assert bool(loads) == (dtype == "float32" or cpu_linear.is_supported())
