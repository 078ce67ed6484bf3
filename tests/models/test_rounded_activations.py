"""activation_dtype="int8" in engines: near the exact ones, and a row's bits are its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from coded import coded_checkpoint
from driver import Driver
from marks import needs_compiler
from torch import Tensor

from nanoengine import SamplingParams
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import ConfigError

Tiny = Callable[[str], Path]
pytestmark = needs_compiler
PROMPTS = [[i * 7 % 256 for i in range(n)] for n in (9, 130, 40)]
ROUNDED = {"quantization": "int8", "activation_dtype": "int8"}


def engine_of(path: Path, **settings: Any) -> LLMEngine:
    defaults: dict[str, Any] = {
        "kvcache_block_size": 8,
        "dtype": "float32",
        "device": "cpu",
        "num_gpu_blocks": 64,
        "speculative": "off",
    }
    return LLMEngine(path, **(defaults | settings))


def first_logits(path: Path, **settings: Any) -> list[Tensor]:
    driver = Driver(engine_of(path, **settings))
    outputs = driver.run(PROMPTS, SamplingParams(max_tokens=1))
    driver.engine.close()
    return [driver.logits[output.request_id][0] for output in outputs]


def answers(path: Path, prompts: list[list[int]], **settings: Any) -> list[tuple[Any, Any]]:
    """The ids of each, and their log probabilities."""
    engine = engine_of(path, **settings)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=20)
    found = [output.outputs[0] for output in Driver(engine).run(prompts, params)]
    engine.close()
    return [(each.token_ids, each.logprobs) for each in found]


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-moe"])
def test_logits_are_near_the_exact_ones(tiny: Tiny, name: str) -> None:
    exact = first_logits(tiny(name), quantization="int8")
    for one, other in zip(exact, first_logits(tiny(name), **ROUNDED), strict=True):
        assert not torch.equal(one, other)
        assert (one - other).norm() < 0.05 * one.norm()


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_bits_depend_on_no_other_row(tiny: Tiny, name: str) -> None:
    alone = [answers(tiny(name), [prompt], **ROUNDED)[0] for prompt in PROMPTS]
    layouts: dict[str, dict[str, Any]] = {
        "together": {},
        "in chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        "guesses": {"speculative": "ngram:4"},
        "one thread": {"num_threads": 1},
        "streamed": {"num_gpu_blocks": 6, "kv_offload_gib": 0.01, "offload_mode": "stream"},
    }
    for layout, settings in layouts.items():
        assert answers(tiny(name), PROMPTS, **(ROUNDED | settings)) == alone, layout


def test_the_plan_says_that_it_is_lossy(tiny: Tiny) -> None:
    engine = LLMEngine(tiny("llama"), num_gpu_blocks=8, device="cpu", **ROUNDED)
    assert "activations in int8 (lossy)" in str(engine.plan)
    engine.close()


@pytest.mark.parametrize("settings", [{}, {"quantization": "none"}])
def test_it_needs_codes(tiny: Tiny, settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"needs weights that are codes .* quantization=\"int8\""):
        LLMEngine(tiny("llama"), device="cpu", activation_dtype="int8", **settings)


def test_codes_that_are_no_integers_are_not_enough(tiny: Tiny, tmp_path: Path) -> None:
    formats = dict.fromkeys(("self_attn", "mlp"), "MXFP4")
    coded, _ = coded_checkpoint(tiny("llama"), tmp_path / "coded", formats)
    with pytest.raises(ConfigError, match="MXFP4 is multiplied as numbers"):
        LLMEngine(coded, device="cpu", activation_dtype="int8")
