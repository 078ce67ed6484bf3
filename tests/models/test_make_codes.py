"""int8 and int4 on a CPU: weights become codes of our kernels as they are loaded.

What codes stand for is said by the package gguf. Plain grids are made here, in numpy.
"""

from __future__ import annotations

import copy
import json
import platform
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import reference, reference_logits
from driver import Driver, host_gib
from gguf import GGMLQuantizationType as QuantType
from marks import needs_compiler
from replays import watch_replays
from torch import Tensor
from transformers import PreTrainedModel

from nanoengine import SamplingParams
from nanoengine.cli.main import main
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import ConfigError
from nanoengine.kernels import c_build, code_maker, cpu_linear
from nanoengine.kernels.call_tape import CallTape
from nanoengine.kernels.code_maker import CodeMaker
from nanoengine.kernels.cpu_linear import PackedAfterAttention
from nanoengine.loading.checkpoint import CheckpointReader
from nanoengine.loading.loader import _FinalWeights
from nanoengine.models.make_codes import made_format
from nanoengine.models.stored_codes import CodedWeight, Weight, numbers_of

Tiny = Callable[[str], Path]
METHODS = ("int8", "int4")
LAYER_WEIGHTS = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))
PROMPTS = [[i * 7 % 256 for i in range(n)] for n in (9, 130)]


def some_weight(outputs: int, inputs: int) -> Tensor:
    """Normal numbers; rows of zeros, of one number, with a far outlier, far from zero, small."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)) * 0.05
    weight[1], weight[2], weight[3, 3] = 0, 0.37, 7.0
    weight[4] += 0.4
    weight[5] *= 2.0**-6
    return weight


def numbers(name: str, weight: Tensor) -> Tensor:
    """What its codes stand for, by the package gguf."""
    rows = CodeMaker.load("int4").rows(name, weight)
    assert rows.format == name
    return torch.from_numpy(gguf.quants.dequantize(rows.rows.numpy(), QuantType[name]))


def squares(found: Tensor, weight: Tensor) -> Tensor:
    """The squared error of each block."""
    return (found - weight).double().square().view(len(weight), -1, 32).sum(2)


def plain_grid(weight: Tensor) -> Tensor:
    """Each block's span in 15 equal steps, scale and minimum in float16."""
    x = weight.numpy().reshape(-1, 32)
    low = x.min(1, keepdims=True).astype(np.float16).astype(np.float32)
    step = ((x.max(1, keepdims=True) - x.min(1, keepdims=True)) / 15).astype(np.float16)
    steps = np.where(step == 0, 1, step.astype(np.float32))
    codes = np.clip(np.rint((x - low) / steps), 0, 15)
    return torch.from_numpy((codes * step.astype(np.float32) + low).reshape(weight.shape))


# -- the codes


@needs_compiler
def test_int8_takes_the_nearest_codes() -> None:
    """At least as near as those of the package, whose scale is rounded after codes are chosen."""
    weight = some_weight(40, 96)
    found = numbers("Q8_0", weight)
    theirs = gguf.quants.quantize(weight.numpy(), QuantType.Q8_0)
    their_numbers = torch.from_numpy(gguf.quants.dequantize(theirs, QuantType.Q8_0))
    assert (squares(found, weight) <= squares(their_numbers, weight) * (1 + 1e-6)).all()
    largest = weight.abs().view(40, -1, 32).amax(2, keepdim=True)
    error = (found - weight).abs().view(40, -1, 32)
    assert (error <= largest / 127 * 0.5 + largest * 2.0**-11).all() and not found[1].any()
    assert error.max() > 0.4 * largest.max() / 127, "and not by much less"


@needs_compiler
def test_int4_is_never_worse_than_the_plain_grid() -> None:
    weight = some_weight(400, 160)
    found = squares(numbers("Q4_1", weight), weight)
    plain = squares(plain_grid(weight), weight)
    theirs = gguf.quants.quantize(weight.numpy(), QuantType.Q4_1)
    theirs_off = squares(torch.from_numpy(gguf.quants.dequantize(theirs, QuantType.Q4_1)), weight)
    assert (found <= plain * (1 + 1e-6) + 1e-12).all()
    assert (found <= theirs_off * 1.05 + 1e-12).all()
    assert not found[1].any() and found[2].max() < 32 * (0.37 * 2.0**-11) ** 2
    assert found[6:].sum() < 0.86 * plain[6:].sum(), "the search finds a good deal"


@needs_compiler
def test_int4_is_near_the_best_of_many_grids() -> None:
    weight = torch.randn(30, 32, generator=torch.Generator().manual_seed(1))
    x = weight.double().numpy()
    best = np.full(30, np.inf)
    for below in np.linspace(-0.05, 0.2, 60):
        for above in np.linspace(-0.05, 0.2, 60):
            span = x.max(1) - x.min(1)
            step = (span * (1 - below - above) / 15)[:, None]
            low = (x.min(1) + span * below)[:, None]
            codes = np.clip(np.rint((x - low) / step), 0, 15)
            best = np.minimum(best, ((codes * step + low - x) ** 2).sum(1))
    found = squares(numbers("Q4_1", weight), weight)[:, 0].numpy()
    assert found.sum() < 1.1 * best.sum()


@needs_compiler
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_the_grid_of_a_four_bit_file_is_found_again(kind: str) -> None:
    stored = gguf.quants.quantize(some_weight(60, 96)[6:].numpy(), QuantType[kind])
    weight = torch.from_numpy(gguf.quants.dequantize(stored, QuantType[kind])).bfloat16().float()
    error = squares(numbers("Q4_1", weight), weight).sum() / weight.double().square().sum()
    assert error.sqrt() < 0.003


@needs_compiler
def test_pieces_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = some_weight(37, 64)
    make = CodeMaker.load("int4").rows
    whole = [make(name, weight) for name in ("Q8_0", "Q4_1")]
    monkeypatch.setattr(code_maker, "_PIECE", 5 * 64)
    assert all(torch.equal(make(each.format, weight).rows, each.rows) for each in whole)


@needs_compiler
@pytest.mark.parametrize(
    ("flags", "has_same"),
    [
        (("-mno-avx512f",), True),
        pytest.param(("-mno-avx512f", "-mno-avx2", "-mno-fma"), False, marks=pytest.mark.breadth),
    ],
    ids=["8 lanes", "4 lanes"],
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other CPUs have one build")
def test_other_cpus_make_as_good_codes(
    build_folder: Path, flags: tuple[str, ...], has_same: bool
) -> None:
    """The same codes with fused steps; without these about the same."""
    weight, here = some_weight(37, 96), CodeMaker.load("int4")
    there = CodeMaker.load("int4", build_folder, flags)
    for name in ("Q8_0", "Q4_1"):
        ours, theirs = (make.rows(name, weight) for make in (here, there))
        off, there_off = (squares(each.numbers(torch.float32), weight) for each in (ours, theirs))
        assert torch.equal(ours.rows, theirs.rows) or not has_same
        assert there_off.sum() < 1.001 * off.sum()


@needs_compiler
@pytest.mark.parametrize("nasty", [torch.inf, torch.nan, 70000.0])
def test_what_no_scale_can_hold_stays_numbers(nasty: float) -> None:
    weight, make = some_weight(8, 32), CodeMaker.load("int4")
    name = "model.layers.0.mlp.up_proj.weight"
    assert make(name, weight) is not None
    weight[7, 7] = nasty
    assert make(name, weight) is None


# -- which weights


def test_which_weights_become_codes() -> None:
    layer = "model.layers.3."
    found = {
        name: [made_format(method, name, shape) for method in METHODS]
        for name, shape in {
            "model.embed_tokens.weight": (100, 64),
            "lm_head.weight": (100, 64),
            "model.embed_tokens_per_layer.weight": (100, 64),
            f"{layer}self_attn.v_proj.weight": (32, 64),
            f"{layer}mlp.experts.5.down_proj.weight": (64, 32),
            f"{layer}mlp.down_proj.weight": (64, 48),
            f"{layer}mlp.gate.weight": (8, 64),
            f"{layer}linear_attn.in_proj_ba.weight": (8, 64),
            f"{layer}linear_attn.in_proj_qkvz.weight": (256, 64),
            f"{layer}linear_attn.conv1d.weight": (64, 1, 32),
            f"{layer}self_attn.q_proj.bias": (64,),
        }.items()
    }
    assert [*found.values()] == [
        ["Q8_0", "Q8_0"],
        ["Q8_0", "Q8_0"],
        ["", ""],
        ["Q8_0", "Q8_0"],
        ["Q8_0", "Q4_1"],
        ["", ""],
        ["", ""],
        ["", ""],
        ["Q8_0", "Q4_1"],
        ["", ""],
        ["", ""],
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


def quantised_reference(path: Path, method: str) -> PreTrainedModel:
    """transformers' model with the numbers that the codes stand for."""
    model = copy.deepcopy(reference(path))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_end = name in ("model.embed_tokens.weight", "lm_head.weight")
            if (is_end or name.endswith(LAYER_WEIGHTS)) and parameter.shape[1] % 32 == 0:
                is_small = is_end or method == "int8" or name.endswith("v_proj.weight")
                parameter.copy_(numbers("Q8_0" if is_small else "Q4_1", parameter.detach()))
    return model


@needs_compiler
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama-tied", "llama-bias", "qwen3"])
def test_the_engine_equals_transformers_on_dequantised_weights(
    tiny: Tiny, name: str, method: str
) -> None:
    path = tiny(name)
    model = quantised_reference(path, method)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    driver = Driver(make_engine(path, method))
    for prompt, output in zip(PROMPTS, driver.run(PROMPTS, params), strict=True):
        tokens = output.outputs[0].token_ids
        logits = reference_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
        ours = torch.stack(driver.logits[output.request_id])
        torch.testing.assert_close(ours, logits, atol=3e-4, rtol=0)
        assert ours.argmax(1).tolist() == logits.argmax(1).tolist() == tokens
        plain = reference_logits(reference(path), prompt + tokens)[len(prompt) - 1 : -1]
        assert (ours - plain).abs().max() > 2e-3, "quantised weights are other weights"


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
@pytest.mark.usefixtures("our_products")
def test_products_have_the_bits_of_their_numbers(
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    dtype: str,
) -> None:
    """Experts, recurrent layers, fused and mixed weights; and the forecast knew their bytes."""
    path = tiny(name)
    engine = make_engine(path, "int4", dtype=dtype)
    weights = engine.plan.weight_bytes
    engine.close()
    flags = ["--gpu-gib", "0", "--dtype", dtype, "--quantization", "int4", "--json"]
    assert main(["plan", str(path), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["RAM"]["weights"] == weights
    ours = logits_of(path, "int4", dtype=dtype)
    make, codes = _FinalWeights._made, []

    def as_numbers(self: _FinalWeights, name: str, stored: Tensor) -> Weight:
        """All but the first, so that our products serve here, too."""
        weight = make(self, name, stored)
        if isinstance(weight, CodedWeight):
            codes.append(weight)
        return weight if len(codes) == 1 else numbers_of(weight)

    monkeypatch.setattr(_FinalWeights, "_made", as_numbers)
    assert all(map(torch.equal, ours, logits_of(path, "int4", dtype=dtype)))
    assert len(codes) > 10


@needs_compiler
@pytest.mark.usefixtures("our_products")
@pytest.mark.parametrize(("method", "dtype"), [("int8", "bfloat16"), ("int4", "float32")])
def test_resident_and_streamed_are_bitwise_equal(tiny: Tiny, method: str, dtype: str) -> None:
    path = tiny("llama")
    resident = logits_of(path, method, dtype=dtype)
    for mode in ("stream", "in_place"):
        gib = host_gib(path, 60, 8)
        settings = {"num_gpu_blocks": 7, "kv_offload_gib": gib, "offload_mode": mode}
        found = logits_of(path, method, dtype=dtype, debug_kv=True, **settings)
        assert all(map(torch.equal, found, resident)), mode
    found = logits_of(path, method, dtype=dtype, max_num_batched_tokens=33, max_num_seqs=1)
    assert all(map(torch.equal, found, resident)), "other batches and chunks"


@needs_compiler
@pytest.mark.parametrize("method", METHODS)
def test_a_decode_is_replayed_and_moves_no_bit(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    replays = watch_replays(monkeypatch)
    taped = logits_of(tiny("llama"), method)
    assert replays
    monkeypatch.setattr(CallTape, "replay", lambda self, key, forward: forward())
    assert all(map(torch.equal, taped, logits_of(tiny("llama"), method)))


@needs_compiler
def test_the_plan_says_what_is_held(tiny: Tiny) -> None:
    engine = make_engine(tiny("llama"), "int4")
    lines = str(engine.plan).splitlines()
    line = next(line for line in lines if "quantised" in line)
    assert "int4 (lossy): 18 of Q4_1, 5 of Q8_0; the rest in float32" in line
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
    engine = make_engine(tiny("llama"), "int4")
    assert len(most) == 3 * 7 and max(most) == 1 and not alive
    engine.close()


# -- where it cannot run


@needs_compiler
@pytest.mark.parametrize("method", [*METHODS, "gguf"])
def test_bfloat16_needs_a_cpu_that_multiplies_it(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(cpu_linear, "is_supported", lambda: False)
    with pytest.raises(ConfigError, match=f'{method}.*no AVX512-BF16: set dtype="float32"'):
        make_engine(tiny("llama"), method, dtype="bfloat16")


@pytest.mark.parametrize("method", [*METHODS, "gguf"])
def test_without_a_compiler_the_error_says_so(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(c_build.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=f"{method}.*no C compiler found.*: install gcc"):
        make_engine(tiny("llama"), method)


@needs_compiler
def test_a_folder_without_codes_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"gguf.*no weight is codes of a GGUF; leave it out"):
        make_engine(tiny("llama"), "gguf")
