"""Tensor parallelism on GPUs made of the CPU: two ranks as threads (virtual_nccl.py). What one GPU
finds, two find, whatever is replayed, streamed or late; and a rank that dies is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import TINY
from driver import answer, host_gib, small_engine
from marks import needs_no_gpu
from plain_products import use_plain_products

pytest.importorskip("triton", reason="Triton is not installed")

from virtual_gpu import VirtualGpu
from virtual_nccl import Wires, use_virtual_nccl

from nanoengine import SamplingParams
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.outputs import RequestOutput

pytestmark = needs_no_gpu
BLOCK = 8
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
RESIDENT: dict[str, Any] = {"num_gpu_blocks": 32}
STREAMED: dict[str, Any] = {
    "num_gpu_blocks": 5,
    "enable_cpu_offload": True,
    "slot_tokens": 2 * BLOCK,
    "ring_slots": 2,
    "stream_mib_per_step": 1000.0,
}
Found = list[list[Any]]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[VirtualGpu]]:
    """Two; the test's thread has the first."""
    use_plain_products(monkeypatch)
    with VirtualGpu() as first:
        yield [first, first.another()]


def engine(folder: Path, size: int, **settings: Any) -> LLMEngine:
    defaults = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "max_model_len": 128}
    defaults |= {"measure_speed": False, "device": "cuda", "tensor_parallel_size": size}
    if "enable_cpu_offload" in settings:
        defaults["kv_offload_gib"] = host_gib(folder, 24, BLOCK)
    return small_engine(folder, True, **(defaults | settings))


def prompt(num_tokens: int) -> list[int]:
    return [(num_tokens * 31 + n) % 256 for n in range(num_tokens)]


PROMPTS = [prompt(n) for n in (1, 47)]


def numbers(outputs: list[RequestOutput]) -> Found:
    """Ids and log probabilities, as they are."""
    found: Found = []
    for output in outputs:
        assert not output.error
        scores = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]
        each = [[(i, known.logprob) for i, known in (of or {}).items()] for of in scores]
        found.append([output.outputs[0].token_ids, each])
    return found


def run(folder: Path, size: int, **settings: Any) -> Found:
    made = engine(folder, size, **settings)
    found = numbers(answer(made, PROMPTS, [PARAMS] * 2))
    made.close()
    return found


@pytest.mark.parametrize("settings", [RESIDENT, STREAMED], ids=["resident", "streamed"])
def test_two_gpus_have_the_bits_of_one(
    gpus: list[VirtualGpu],
    monkeypatch: pytest.MonkeyPatch,
    tiny: Callable[[str], Path],
    settings: dict[str, Any],
) -> None:
    expected = run(tiny("llama"), 1, **settings)
    wires = use_virtual_nccl(monkeypatch, gpus)
    assert run(tiny("llama"), 2, **settings) == expected
    assert wires.calls
