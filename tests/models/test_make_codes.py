"""quantization="int8": weights become codes of our kernels as they are loaded.

What codes stand for is said by the package gguf.
"""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from checkpoints import reference, reference_logits
from driver import Driver, host_gib
from gguf import GGMLQuantizationType as QuantType
from marks import needs_compiler
from quantised import mixed_gguf
from replays import watch_replays
from torch import Tensor
from transformers import PreTrainedModel

from nanoengine import SamplingParams
from nanoengine.cli.main import main
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import ConfigError
from nanoengine.kernels import c_build, cpu_linear
from nanoengine.kernels.call_tape import CallTape
from nanoengine.kernels.packed_product import PackedAfterAttention
from nanoengine.loading.checkpoint import CheckpointReader
from nanoengine.loading.loader import _FinalWeights
from nanoengine.models import make_codes as making
from nanoengine.models.make_codes import becomes_codes, make_codes
from nanoengine.models.stored_codes import CodedWeight, Weight, numbers_of
from nanoengine.startup import parts

Tiny = Callable[[str], Path]
LAYER_WEIGHTS = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))
PROMPTS = [[i * 7 % 256 for i in range(n)] for n in (9, 130)]


def some_weight(outputs: int, inputs: int) -> Tensor:
    """Normal numbers; rows of zeros, of one number, with a far outlier, far from zero, small."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)) * 0.05
    weight[1], weight[2], weight[3, 3] = 0, 0.37, 7.0
    weight[4] += 0.4
    weight[5] *= 2.0**-6
    weight[6], weight[7] = weight[6] * 2.0**-17, 1.49 * 127 * 2.0**-24  # scales are denormal
    return weight


def numbers(weight: Tensor) -> Tensor:
    """What its codes stand for, by the package gguf."""
    made = make_codes(weight)
    assert made is not None and made.format == "Q8_0"
    return torch.from_numpy(gguf.quants.dequantize(made.rows.numpy(), QuantType.Q8_0))


def squares(found: Tensor, weight: Tensor) -> Tensor:
    """The squared error of each block."""
    return (found - weight).double().square().view(len(weight), -1, 32).sum(2)


# -- the codes


def test_int8_takes_the_nearest_codes() -> None:
    """At least as near as those of the package, whose scale is rounded after codes are chosen."""
    weight = some_weight(40, 96)
    found = numbers(weight)
    theirs = gguf.quants.quantize(weight.numpy(), QuantType.Q8_0)
    their_numbers = torch.from_numpy(gguf.quants.dequantize(theirs, QuantType.Q8_0))
    assert (squares(found, weight) <= squares(their_numbers, weight) * (1 + 1e-6)).all()
    largest = weight.abs().view(40, -1, 32).amax(2, keepdim=True)
    error = (found - weight).abs().view(40, -1, 32)
    rounded = torch.maximum(largest * 2.0**-11, torch.tensor(127 * 2.0**-25))
    assert (error <= largest / 127 * 0.5 + rounded).all() and not found[1].any()
    assert error.max() > 0.4 * largest.max() / 127, "and not by much less"


def test_pieces_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of weights in 16 bits, and of inputs that a rank has cut out."""
    weight = some_weight(37, 96)[:, 32:]
    found = numbers(weight)
    monkeypatch.setattr(making, "_PIECE", 5 * 64)
    assert torch.equal(numbers(weight), found)
    assert torch.equal(numbers(weight.bfloat16()), numbers(weight.bfloat16().float()))


@pytest.mark.parametrize("nasty", [torch.inf, torch.nan, 1e7])
def test_what_no_scale_can_hold_stays_numbers(nasty: float) -> None:
    weight = some_weight(8, 32)
    weight[7, 7] = nasty
    assert make_codes(weight) is None


# -- which weights


def test_which_weights_become_codes() -> None:
    layer = "model.layers.3."
    found = {
        name: becomes_codes(name, shape)
        for name, shape in {
            "model.embed_tokens.weight": (100, 64),
            "lm_head.weight": (100, 64),
            "model.embed_tokens_per_layer.weight": (100, 64),
            f"{layer}self_attn.v_proj.weight": (32, 64),
            f"{layer}mlp.experts.5.down_proj.weight": (64, 32),
            f"{layer}mlp.down_proj.weight": (64, 48),
            f"{layer}self_attn.kv_b_proj.weight": (64, 32),
            f"{layer}mlp.gate.weight": (8, 64),
            f"{layer}linear_attn.in_proj_ba.weight": (8, 64),
            f"{layer}linear_attn.in_proj_qkvz.weight": (256, 64),
            f"{layer}linear_attn.conv1d.weight": (64, 1, 32),
            f"{layer}self_attn.q_proj.bias": (64,),
        }.items()
    }
    assert [name for name, becomes in found.items() if becomes] == [
        "model.embed_tokens.weight",
        "lm_head.weight",
        f"{layer}self_attn.v_proj.weight",
        f"{layer}mlp.experts.5.down_proj.weight",
        f"{layer}linear_attn.in_proj_qkvz.weight",
    ]


# -- the engine


def make_engine(path: Path, method: str | None, **settings: Any) -> LLMEngine:
    defaults: dict[str, Any] = {
        "kvcache_block_size": 8,
        "dtype": "float32",
        "device": "cpu",
        "num_gpu_blocks": 64,
        "speculative": "off",
        "max_num_batched_tokens": 90,
        "max_num_seqs": 4,
    }
    return LLMEngine(path, quantization=method, **(defaults | settings))


def logits_of(path: Path, method: str | None, **settings: Any) -> list[Tensor]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    driver = Driver(make_engine(path, method, **settings))
    outputs = driver.run(PROMPTS, params)
    driver.engine.close()
    return [torch.stack(driver.logits[output.request_id]) for output in outputs]


def quantised_reference(path: Path) -> PreTrainedModel:
    """transformers' model with the numbers that the codes stand for."""
    model = copy.deepcopy(reference(path))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_end = name in ("model.embed_tokens.weight", "lm_head.weight")
            if (is_end or name.endswith(LAYER_WEIGHTS)) and parameter.shape[1] % 32 == 0:
                parameter.copy_(numbers(parameter.detach()))
    return model


@needs_compiler
@pytest.mark.parametrize("name", ["llama-tied", "llama-bias", "qwen3"])
def test_the_engine_equals_transformers_on_dequantised_weights(tiny: Tiny, name: str) -> None:
    path = tiny(name)
    model = quantised_reference(path)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    driver = Driver(make_engine(path, "int8"))
    for prompt, output in zip(PROMPTS, driver.run(PROMPTS, params), strict=True):
        tokens = output.outputs[0].token_ids
        logits = reference_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
        ours = torch.stack(driver.logits[output.request_id])
        torch.testing.assert_close(ours, logits, atol=3e-4, rtol=0)
        assert ours.argmax(1).tolist() == logits.argmax(1).tolist() == tokens
        plain = reference_logits(reference(path), prompt + tokens)[len(prompt) - 1 : -1]
        assert (ours - plain).abs().max() > 1e-3, "quantised weights are other weights"


@needs_compiler
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3.5-moe", "float32"),
        ("phi3", "bfloat16"),
        pytest.param("mixtral", "bfloat16", marks=pytest.mark.breadth),
        pytest.param("qwen3-next-moe", "float32", marks=pytest.mark.breadth),
        pytest.param("gemma4-shared", "float32", marks=pytest.mark.breadth),
        pytest.param("gpt-oss", "float32", marks=pytest.mark.breadth),
    ],
)
@pytest.mark.usefixtures("our_products", "in_16_bits")
def test_products_have_the_bits_of_their_numbers(
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    dtype: str,
) -> None:
    """Experts, recurrent layers, fused and mixed weights; and the forecast knew their bytes."""
    path = tiny(name)
    engine = make_engine(path, "int8", dtype=dtype)
    weights = engine.plan.weight_bytes
    engine.close()
    flags = ["--gpu-gib", "0", "--dtype", dtype, "--quantization", "int8", "--json"]
    assert main(["plan", str(path), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["RAM"]["weights"] == weights
    ours = logits_of(path, "int8", dtype=dtype)
    make, codes = _FinalWeights._made, []

    def as_numbers(self: _FinalWeights, name: str, stored: Tensor) -> Weight:
        """All but the first, so that our products serve here, too."""
        weight = make(self, name, stored)
        if isinstance(weight, CodedWeight):
            codes.append(weight)
        return weight if len(codes) == 1 else numbers_of(weight)

    monkeypatch.setattr(_FinalWeights, "_made", as_numbers)
    assert all(map(torch.equal, ours, logits_of(path, "int8", dtype=dtype)))
    assert len(codes) > 10


@needs_compiler
@pytest.mark.usefixtures("our_products")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_resident_and_streamed_are_bitwise_equal(tiny: Tiny, dtype: str) -> None:
    path, method = tiny("llama"), "int8"
    resident = logits_of(path, method, dtype=dtype)
    for mode in ("stream", "in_place"):
        gib = host_gib(path, 60, 8)
        settings = {"num_gpu_blocks": 7, "kv_offload_gib": gib, "offload_mode": mode}
        found = logits_of(path, method, dtype=dtype, debug_kv=True, **settings)
        assert all(map(torch.equal, found, resident)), mode
    found = logits_of(path, method, dtype=dtype, max_num_batched_tokens=33, max_num_seqs=1)
    assert all(map(torch.equal, found, resident)), "other batches and chunks"


@needs_compiler
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_decode_is_replayed_and_moves_no_bit(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also one with experts of codes."""
    replays = watch_replays(monkeypatch)
    taped = logits_of(tiny(name), "int8")
    assert replays
    monkeypatch.setattr(CallTape, "replay", lambda self, key, forward: forward())
    assert all(map(torch.equal, taped, logits_of(tiny(name), "int8")))


@needs_compiler
def test_the_plan_says_what_is_held(tiny: Tiny) -> None:
    engine = make_engine(tiny("llama"), "int8")
    lines = str(engine.plan).splitlines()
    line = next(line for line in lines if "quantised" in line)
    assert "int8 (lossy): 23 of Q8_0; the rest in float32" in line
    assert "the same bits in any batch" in str(engine.plan)
    assert type(engine.runner.model._layers[0].after_attention) is PackedAfterAttention
    engine.close()


@needs_compiler
def test_weights_are_held_whole_one_layer_at_a_time(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: set[int] = set()
    most = []
    tensor = CheckpointReader.tensor

    def watched(self: CheckpointReader, name: str) -> Tensor:
        found = tensor(self, name).clone()
        if name.endswith(LAYER_WEIGHTS):
            alive.add(id(found))
            weakref.finalize(found, alive.discard, id(found))
            most.append(len(alive))
        return found

    monkeypatch.setattr(CheckpointReader, "tensor", watched)
    engine = make_engine(tiny("llama"), "int8")
    assert len(most) == 3 * 7 and max(most) == 1 and not alive
    engine.close()


# -- where it cannot run


@needs_compiler
@pytest.mark.parametrize("method", ["int8", "gguf"])
def test_bfloat16_needs_a_cpu_that_multiplies_it(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    model = mixed_gguf(tiny("llama"), tmp_path / "gguf" / "m.gguf", "llama")
    monkeypatch.setattr(cpu_linear, "is_supported", lambda: False)
    with pytest.raises(ConfigError, match=f'{method}.*no AVX512-BF16: set dtype="float32"'):
        make_engine(model, method, dtype="bfloat16")


@pytest.mark.parametrize("method", ["int8", "gguf"])
def test_without_a_compiler_the_error_says_so(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    model = mixed_gguf(tiny("llama"), tmp_path / "gguf" / "m.gguf", "llama")
    monkeypatch.setattr(c_build.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=f"{method}.*no C compiler found.*: install gcc"):
        make_engine(model, method)


def test_codes_become_numbers_where_the_compiler_fails(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    engine = make_engine(mixed_gguf(tiny("llama"), tmp_path / "gguf" / "m.gguf", "llama"), None)
    assert "; dequantised as they are loaded: 0.00 GiB stored are " in str(engine.plan)
    engine.close()


@needs_compiler
def test_a_folder_without_codes_is_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its weights are read."""
    monkeypatch.setattr(parts, "load_model", None)
    with pytest.raises(ConfigError, match=r"gguf.*no weight is codes of a GGUF; leave it out"):
        make_engine(tiny("llama"), "gguf")
