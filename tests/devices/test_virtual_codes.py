"""Engines on a GPU made of the CPU whose weights stay codes: answers of the dequantised model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from coded import coded_checkpoint
from driver import Driver, assert_greedy, assert_logits_are_transformers, host_gib, small_engine
from gguf import GGMLQuantizationType as QuantType
from gguf_model import GGUFModel
from marks import named, needs_no_gpu
from tiny_model import TinyModel
from tiny_models import TINY

pytest.importorskip("triton", reason="Triton is not installed")

from virtual_gpu import VirtualGpu

from nanoengine import SamplingParams
from nanoengine.errors import ConfigError

pytestmark = needs_no_gpu
Tiny = Callable[[str], Path]
BLOCK = 8
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPTS = [[i * 31 % 256 for i in range(n)] for n in (1, 40)]
RESIDENT: dict[str, Any] = {"num_gpu_blocks": 32}
STREAMED: dict[str, Any] = {"num_gpu_blocks": 4, "slot_tokens": 2 * BLOCK, "ring_slots": 2}
# Layers of several formats, also of one among q, k and v; embedding and head.
MIXED = {"embed": "Q8_0", "lm_head": "Q5_0", "v_proj": "INT8", "_proj": "Q4_0"}
K_QUANTS = {"embed": "Q6_K", "lm_head": "Q6_K", "v_proj": "Q6_K", "down": "Q5_K", "_proj": "Q4_K"}
# By names of TINY, or of what is here: wide enough for K-quants; experts that have whole blocks, in
# tensors of their own.
MODELS = {
    "wide": TinyModel(
        settings={"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    ),
    "mixtral": replace(
        TINY["mixtral"],
        settings=TINY["mixtral"].settings | {"intermediate_size": 64, "num_hidden_layers": 2},
        saved_as={},
    ),
}
CASES: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "k-quants, streamed": ("wide", K_QUANTS, STREAMED),
    "experts": ("mixtral", {"experts": "MXFP4", "embed": "Q8_0", "_proj": "Q4_0"}, RESIDENT),
    "experts, streamed": ("mixtral", {"experts": "Q4_0"}, STREAMED),
    "FP8": ("mixtral", {"experts": "FP8", "embed": "FP8", "_proj": "FP8"}, STREAMED),
    "mixed": ("llama", MIXED, RESIDENT),
    "integers with biases": ("llama-bias", {"_proj": "INT4"}, RESIDENT),
    "tied": ("qwen3", {"embed": "Q4_1", "_proj": "Q5_1"}, RESIDENT),
    "heads in another order": ("smollm3", {"_proj": "Q4_0"}, RESIDENT),
    "gates of heads, recurrent layers": ("qwen3.5", {"_proj": "Q5_0"}, RESIDENT),
}


@pytest.fixture
def folder_of(tiny: Tiny, tmp_path: Path) -> Callable[[str], Path]:
    def find(name: str) -> Path:
        if name not in MODELS:
            return tiny(name)
        MODELS[name](tmp_path / name)
        return tmp_path / name

    return find


@pytest.mark.parametrize(("model", "formats", "settings"), named(CASES, "experts"))
def test_codes_on_a_gpu(
    folder_of: Callable[[str], Path],
    tmp_path: Path,
    model: str,
    formats: dict[str, str],
    settings: dict[str, Any],
) -> None:
    """Ids and logits are transformers' of the numbers, steps are replayed and wait for tokens
    alone, and the plan counts the bytes that a CPU's does.
    """
    source = folder_of(model)
    ours, theirs = coded_checkpoint(source, tmp_path, formats)
    if settings is STREAMED:
        settings = STREAMED | {"kv_offload_gib": host_gib(source, 24, BLOCK)}
    common = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "max_model_len": 128}
    gib = small_engine(ours, **common).plan.weight_bytes
    with VirtualGpu() as gpu:
        made = small_engine(ours, device="cuda", **common, **settings)
        plan = made.plan
        assert plan.quantization.startswith("codes as stored: ") and plan.weight_bytes == gib
        gpu.strict = True
        driver = Driver(made)
        outputs = driver.run(PROMPTS, GREEDY)
        gpu.strict = False
        assert any(graph.num_replays for graph in gpu.graphs)
        if "kv_offload_gib" in settings:
            assert made.kv.counters.h2d_bytes > 3 * plan.kv.block_bytes
        made.close()
    assert_greedy(theirs, PROMPTS, outputs, 4)
    assert_logits_are_transformers(driver, theirs, outputs)


@pytest.mark.parametrize(
    ("model", "settings"),
    named({"experts": ("mixtral", RESIDENT), "streamed": ("llama-tied", STREAMED)}, "experts"),
)
def test_codes_that_are_made_on_a_gpu(
    folder_of: Callable[[str], Path], model: str, settings: dict[str, Any]
) -> None:
    """A CPU, which tests/models/test_make_codes.py compares with transformers, says the same."""
    source = folder_of(model)
    if settings is STREAMED:
        settings = STREAMED | {"kv_offload_gib": host_gib(source, 24, BLOCK)}
    assert_as_on_a_cpu(source, "int8", "int8 (lossy): ", settings)


@pytest.mark.breadth
def test_heads_in_the_order_of_a_gguf_on_a_gpu(tiny: Tiny, tmp_path: Path) -> None:
    """A CPU, which tests/models/test_recurrent_codes.py compares with transformers, says so."""
    model = GGUFModel(tiny("qwen3.5"))
    widths = {name: of.shape[-1] for name, of in model.tensors.items() if of.ndim == 2}
    model.types = {name: QuantType.Q5_1 for name, width in widths.items() if width % 32 == 0}
    path = model.write(tmp_path / "m.gguf")
    assert_as_on_a_cpu(path, "gguf", f"codes as stored: {len(model.types)} of Q5_1; ", RESIDENT)


def assert_as_on_a_cpu(
    source: Path, quantization: str, said: str, settings: dict[str, Any]
) -> None:
    common = {"quantization": quantization, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    driver = Driver(small_engine(source, **common))
    prompts = [prompt[:9] for prompt in PROMPTS]
    expected = driver.run(prompts, GREEDY)
    there = driver.engine.plan
    with VirtualGpu():
        ours = Driver(small_engine(source, device="cuda", **common, **settings))
        found = ours.run(prompts, GREEDY)
        plan = ours.engine.plan
        assert (plan.quantization, plan.weight_bytes) == (there.quantization, there.weight_bytes)
        assert plan.quantization.startswith(said)
        ours.engine.close()
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
        logits = torch.stack(ours.logits[mine.request_id])
        exact = torch.stack(driver.logits[theirs.request_id])
        torch.testing.assert_close(logits, exact, atol=1e-4, rtol=0)


def test_codes_stay_codes_unless_numbers_are_asked_for(tiny: Tiny, tmp_path: Path) -> None:
    """Of a GGUF, and of other files."""
    model = GGUFModel(tiny("llama"))
    model.types = {name: QuantType.Q8_0 for name, of in model.tensors.items() if of.ndim == 2}
    path = model.write(tmp_path / "m.gguf")
    coded, _ = coded_checkpoint(tiny("llama"), tmp_path, {"_proj": "INT4"})
    with VirtualGpu():
        for source, quantization, codes, said in (
            (path, None, "codes as stored: 23 of Q8_0", "Q8_0 GGUF, codes as stored"),
            (path, "gguf", "codes as stored: 23 of Q8_0", "Q8_0 GGUF, codes as stored"),
            (path, "none", "", "Q8_0 GGUF, dequantised to bfloat16)"),
            (coded, None, "codes as stored: 21 of INT4", "safetensors"),
            (coded, "none", "", "safetensors"),
        ):
            engine = small_engine(source, device="cuda", quantization=quantization)
            assert engine.plan.quantization.startswith(codes) and said in str(engine.plan)
            assert bool(engine.plan.quantization) == bool(codes)
            engine.close()


def test_codes_need_triton(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody asks for them, the plan says so."""
    monkeypatch.setitem(sys.modules, "nanoengine.kernels.gpu_ops", None)
    with VirtualGpu(), pytest.raises(ConfigError, match=r"'int8' needs Triton on cuda.*; leave it"):
        small_engine(tiny("llama"), device="cuda", quantization="int8")
    model = GGUFModel(tiny("llama"))
    model.types = {name: QuantType.Q8_0 for name, of in model.tensors.items() if of.ndim == 2}
    with VirtualGpu():
        engine = small_engine(model.write(tmp_path / "m.gguf"), device="cuda")
        assert "dequantised to bfloat16 (codes need Triton on cuda, which has" in str(engine.plan)
        engine.close()


def test_rounded_activations_are_for_a_cpu(tiny: Tiny) -> None:
    with VirtualGpu(), pytest.raises(ConfigError, match="is for a CPU; leave it out on cuda"):
        small_engine(tiny("llama"), device="cuda", quantization="int8", activation_dtype="int8")


def test_a_model_without_codes_is_refused(tiny: Tiny) -> None:
    with VirtualGpu(), pytest.raises(ConfigError, match="no weight is codes of a GGUF; leave it"):
        small_engine(tiny("llama"), device="cuda", quantization="gguf")
