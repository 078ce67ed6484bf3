"""Quantised weights: within half a step of what they stand for, and products that are theirs.

The reference quantises by itself, in numpy, and multiplies what comes back in float64.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoints import reference, reference_logits
from driver import Driver, host_gib, token_ids
from marks import needs_compiler
from torch import Tensor
from transformers import PreTrainedModel

from nanoengine import SamplingParams
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import ConfigError
from nanoengine.kernels.call_tape import CallTape, _Pass
from nanoengine.kernels.cpu_linear import PackedLinear
from nanoengine.loading.checkpoint import CheckpointReader
from nanoengine.loading.model_config import read_model_config
from nanoengine.models import quant
from nanoengine.models.quant import Quantizer, quantise_int4, quantise_int8, stored_int4
from nanoengine.models.weight_shapes import weight_shapes
from nanoengine.startup import parts

Tiny = Callable[[str], Path]
CPU = torch.device("cpu")
METHODS = ("int8", "int4")
DTYPES = (torch.float32, torch.bfloat16)
LAYER_WEIGHTS = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))


def some_weight(outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal numbers; a row of zeros, one with a far outlier and one far from zero."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 0.05
    weight[1] = 0
    weight[2, 3] = 7.0
    weight[3] += 0.4
    return weight.to(dtype)


def rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(values.astype(np.float32)).to(dtype).double().numpy()


def group_of(inputs: int) -> int:
    return 128 if inputs % 128 == 0 else 64 if inputs % 64 == 0 else 32


def nearest(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """In float32: what lies half way between two steps must fall to the same one."""
    return np.rint(values.astype(np.float32) / scales.astype(np.float32)).astype(np.float64)


def dequantised(weight: Tensor, method: str) -> Tensor:
    """The scheme as documented, by numpy: float64 [outputs, inputs]."""
    wide, dtype = weight.detach().double().numpy(), weight.dtype
    if method == "int8":
        scales = rounded(np.abs(wide).max(1, keepdims=True) / 127, dtype)
        scales[scales == 0] = 1
        return torch.from_numpy(np.clip(nearest(wide, scales), -127, 127) * scales)
    groups = wide.reshape(len(wide), -1, group_of(wide.shape[1]))
    low, high = groups.min(2, keepdims=True), groups.max(2, keepdims=True)
    scales = rounded((high - low) / 15, dtype)
    scales[scales == 0] = 1
    zeros = rounded(low + 8 * scales, dtype)
    codes = np.clip(nearest(groups - zeros, scales) + 8, 0, 15)
    return torch.from_numpy(((codes - 8) * scales + zeros).reshape(wide.shape))


# -- the schemes


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    weight = some_weight(33, 96, dtype)
    codes, scales = quantise_int8(weight)
    assert codes.dtype is torch.int8 and scales.dtype is dtype
    error = (codes.double() * scales.double()[:, None] - weight.double()).abs()
    assert (error <= scales.double()[:, None] * 0.5001).all()
    assert error.max() > 0.4 * scales.min(), "and not by much less"
    assert codes.int().abs().amax(1)[[0, 2, 3]].tolist() == [127] * 3
    assert not codes[1].any()


@pytest.mark.parametrize("group", quant.GROUPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_is_off_by_half_a_step_at_most(dtype: torch.dtype, group: int) -> None:
    weight = some_weight(33, 2 * group, dtype)
    weight[2, 3] = 0.05  # an outlier puts zero far off; its rounding is tested below
    codes, both = quantise_int4(weight, group)
    scales, zeros = (each.T.double().unsqueeze(2) for each in both.unbind(2))
    grouped = codes.double().view(33, -1, group)
    error = ((grouped - 8) * scales + zeros - weight.double().view(33, -1, group)).abs()
    assert (error <= scales * 0.5001 + zeros.abs() * 2.0**-8 * (dtype is torch.bfloat16)).all()
    assert (error[4:] <= scales[4:] * 0.5001).all(), "where zero is not far off, without allowance"
    assert (grouped.amin(2)[4:] == 0).all() and (grouped.amax(2)[4:] == 15).all()


# -- the products


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 65, 200])
@pytest.mark.parametrize("shape", [(192, 96), (48, 128), (320, 576), (144, 256)])
@pytest.mark.parametrize("method", METHODS)
def test_a_product_is_that_of_the_dequantised_weight(
    monkeypatch: pytest.MonkeyPatch, method: str, shape: tuple[int, int], num_tokens: int
) -> None:
    """Few tokens and many (another way), whole weights and weights in pieces."""
    monkeypatch.setattr(quant, "_PIECE", 128 * 96)  # so that larger ones are several pieces
    for dtype in DTYPES:
        weight = some_weight(*shape, dtype)
        x = torch.randn(num_tokens, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
        packed = Quantizer(method, CPU, dtype).product(weight)
        assert packed is not None
        ours = packed(x)
        assert ours.dtype is dtype
        wide = dequantised(weight, method)
        exact = x.double() @ wide.T
        # Roundings of the result, and of each weight where it is unpacked to bfloat16.
        step = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-20
        allowed = step * (exact.abs() + (x.double().square() @ wide.T.square()).sqrt() * 4)
        assert ((ours.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_row_has_the_same_bits_in_any_small_batch(method: str) -> None:
    packed = Quantizer(method, CPU, torch.bfloat16).product(some_weight(192, 128, torch.bfloat16))
    assert packed is not None
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    together = packed(x)
    for size in range(1, 16):
        assert torch.equal(packed(x[16 - size :]), together[16 - size :])


@pytest.mark.parametrize("outputs", [64, 128, 192, 960])
def test_packed_codes_can_be_unpacked(outputs: int) -> None:
    block = quant.packed_block()
    assert block in (0, 32, 64)
    if not block:
        assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
        pytest.skip("a layout that is not unpacked: the operator serves any number of tokens")
    codes = torch.randint(0, 16, (outputs, 96), dtype=torch.uint8)
    blocks = quant.unpack_int4(quant.pack_int4(codes), block)
    assert torch.equal(blocks.transpose(1, 2).reshape(outputs, 96) + 8, codes)


def test_without_a_known_layout_the_operator_serves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = some_weight(64, 64, torch.float32), torch.randn(100, 64)
    monkeypatch.setattr(quant, "packed_block", lambda: 0)
    packed = Quantizer("int4", CPU, torch.float32).product(weight)
    assert packed is not None
    monkeypatch.setattr(quant, "unpack_int4", None)
    exact = x.double() @ dequantised(weight, "int4").T
    torch.testing.assert_close(packed(x).double(), exact, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("inputs", "tiles"), [(32, 2), (96, 2), (64, 4), (576, 4), (128, 8), (4096, 8)]
)
def test_the_packed_layout_of_a_gpu_has_its_shape(inputs: int, tiles: int) -> None:
    """By PyTorch's own shape function; what is in it is tested where there is a GPU."""
    codes = torch.empty(48, inputs, dtype=torch.uint8, device="meta")
    packed = quant.pack_int4(codes)
    assert packed.shape == (48 // 8, inputs // (tiles * 16), 32, tiles // 2)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 5, 16, 17, 200])
@pytest.mark.parametrize("method", METHODS)
def test_products_on_a_gpu(method: str, num_tokens: int) -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    for shape in ((192, 96), (320, 576), (144, 256)):
        weight = some_weight(*shape, dtype)
        packed = Quantizer(method, device, dtype).product(weight.to(device))
        assert packed is not None
        x = torch.randn(num_tokens, shape[1]).to(dtype)
        wide = dequantised(weight, method)
        exact = x.double() @ wide.T
        ours = packed(x.to(device)).double().cpu()
        spread = (x.double().square() @ wide.T.square()).sqrt()
        assert ((ours - exact).abs() <= 2.0**-8 * (exact.abs() + 4 * spread)).all()


# -- what is taken, and what is refused


def test_shapes_that_no_operator_takes_are_left_and_counted() -> None:
    for method, bad in (("int8", (64, 48)), ("int4", (64, 48)), ("int4", (40, 64))):
        quantizer = Quantizer(method, CPU, torch.float32)
        assert quantizer.product(torch.ones(bad)) is None
        with pytest.raises(ConfigError, match=f"{method}.*no weight of the layers has a shape"):
            quantizer.saved_bytes()
        packed = quantizer.product(torch.ones(64, 64))
        assert packed is not None
        assert "1 weights" in str(quantizer) and "1 of other shapes left" in str(quantizer)
        assert quantizer.saved_bytes() == 64 * 64 * 4 - packed.num_bytes


def test_int4_on_a_gpu_wants_bfloat16() -> None:
    with pytest.raises(ConfigError, match=r'bfloat16 on cuda, got torch\.float32; set dtype="bfl'):
        Quantizer("int4", torch.device("cuda"), torch.float32)


@pytest.mark.parametrize(
    ("method", "operator"),
    [("int8", "_weight_int8pack_mm"), ("int4", "_weight_int4pack_mm_for_cpu")],
)
def test_an_operator_that_fails_or_errs_is_a_config_error(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, method: str, operator: str
) -> None:
    def broken(*args: object) -> Tensor:
        raise RuntimeError("expected scalar type Half")

    monkeypatch.setattr(torch, operator, broken)
    with pytest.raises(ConfigError, match=f"{method}.*expected scalar type Half"):
        LLMEngine(tiny("llama"), quantization=method, dtype="float32")
    monkeypatch.setattr(torch, operator, lambda x, *rest: torch.zeros(len(x), 128))
    with pytest.raises(ConfigError, match=f"{method}.*product is wrong"):
        LLMEngine(tiny("llama"), quantization=method, dtype="float32")
    monkeypatch.delattr(torch, operator)
    with pytest.raises(ConfigError, match=f"{method}.*no attribute"):
        LLMEngine(tiny("llama"), quantization=method, dtype="float32")


# -- the engine


def make_engine(path: Path, method: str | None, **settings: object) -> LLMEngine:
    defaults: dict[str, object] = {
        "kvcache_block_size": 8,
        "dtype": "float32",
        "device": "cpu",
        "num_gpu_blocks": 64,
    }
    return LLMEngine(path, quantization=method, **(defaults | settings))


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def quantised_reference(path: Path, method: str) -> PreTrainedModel:
    """transformers' model with its layers' weights replaced by the dequantised ones."""
    model = copy.deepcopy(reference(path))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            outputs, inputs = parameter.shape if parameter.dim() == 2 else (0, 1)
            # Gate and up are quantised as one, and so are q, k and v: together they are multiples.
            if name.endswith(LAYER_WEIGHTS) and inputs % 32 == 0:
                assert outputs % 16 == 0
                parameter.copy_(dequantised(parameter, method).float())
    return model


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama-tied", "llama-bias", "qwen3"])
def test_the_engine_equals_transformers_on_dequantised_weights(
    tiny: Tiny, name: str, method: str
) -> None:
    path = tiny(name)
    model = quantised_reference(path, method)
    prompts = [[i * 7 % 256 for i in range(n)] for n in (9, 150)]
    driver = Driver(make_engine(path, method, max_num_batched_tokens=90, max_num_seqs=4))
    for prompt, output in zip(prompts, driver.run(prompts, greedy(8)), strict=True):
        tokens = output.outputs[0].token_ids
        logits = reference_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
        ours = torch.stack(driver.logits[output.request_id])
        torch.testing.assert_close(ours, logits, atol=3e-4, rtol=0)
        assert ours.argmax(1).tolist() == logits.argmax(1).tolist() == tokens
        plain = reference_logits(reference(path), prompt + tokens)[len(prompt) - 1 : -1]
        assert (ours - plain).abs().max() > 1e-2, "quantised weights are other weights"


@pytest.mark.parametrize(("method", "dtype"), [("int8", "bfloat16"), ("int4", "float32")])
def test_resident_and_streamed_are_bitwise_equal(tiny: Tiny, method: str, dtype: str) -> None:
    path = tiny("qwen3")
    prompts = [[i * 11 % 256 for i in range(n)] for n in (70, 33, 50)]
    on_host = {
        "num_gpu_blocks": 7,
        "enable_cpu_offload": True,
        "kv_offload_gib": host_gib(path, 200, 8),
        "debug_kv": True,
        "stream_mib_per_step": 1e6,
    }
    layouts = {
        "resident": {"num_gpu_blocks": 100},
        "in place": on_host | {"offload_mode": "in_place"},
        "stream": on_host | {"offload_mode": "stream", "slot_tokens": 16, "ring_slots": 2},
    }
    runs = {}
    for layout, settings in layouts.items():
        engine = make_engine(
            path, method, max_num_batched_tokens=20, max_num_seqs=3, **settings, dtype=dtype
        )
        driver = Driver(engine)
        outputs = driver.run(prompts, greedy(5))
        logits = [torch.stack(driver.logits[output.request_id]) for output in outputs]
        runs[layout] = driver.audit.schedule, token_ids(outputs), logits
        assert (engine.kv.counters.h2d_bytes > 0) == (layout == "stream")
        engine.close()
    for layout in layouts:
        assert runs[layout][:2] == runs["resident"][:2]
        assert all(map(torch.equal, runs[layout][2], runs["resident"][2])), layout


@pytest.mark.parametrize(("name", "num_left"), [("llama", 0), ("qwen3", 6)])
@pytest.mark.parametrize("method", METHODS)
def test_the_plan_counts_bytes_as_computed(
    tiny: Tiny, method: str, name: str, num_left: int
) -> None:
    path = tiny(name)
    engine = make_engine(path, method)
    num_bytes = 0
    for tensor, (outputs, *rest) in weight_shapes(read_model_config(path)).items():
        inputs = rest[0] if rest else 1
        if not tensor.endswith(LAYER_WEIGHTS) or inputs % 32:
            num_bytes += 4 * outputs * inputs
        elif method == "int8":
            num_bytes += outputs * inputs + 4 * outputs
        else:
            num_bytes += outputs * inputs // 2 + 8 * outputs * inputs // group_of(inputs)
    plan = engine.plan
    assert plan.weight_bytes == num_bytes < make_engine(path, None).plan.weight_bytes
    line = next(line for line in str(plan).splitlines() if "quantised" in line)
    assert f"{method} (lossy): {12 - num_left} weights" in line
    assert (f"{num_left} of other shapes left in float32" in line) == bool(num_left)
    assert "output head" in line


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_held_whole_one_layer_at_a_time(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, method: str
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
    engine = make_engine(tiny("llama"), method)
    assert len(most) == 3 * 7 and max(most) <= 3 and not alive
    engine.close()


# -- what a GGUF stored


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_the_codes_of_a_gguf_are_found_again(kind: str, dtype: torch.dtype) -> None:
    """Blocks by the package gguf, rounded to bfloat16 as the converter does."""
    rows = (np.random.default_rng(0).standard_normal((48, 96)) * 0.05).astype(np.float32)
    rows[0] = 0
    rows[1, :32] += 0.3
    blocks = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[kind])
    exact = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]))
    header = 2 if kind == "Q4_0" else 4
    raw = torch.from_numpy(blocks.reshape(48, 3, -1).copy())
    codes = torch.cat((raw[:, :, header:] & 15, raw[:, :, header:] >> 4), dim=2)
    if kind == "Q4_0":  # a negative scale turns them round
        codes = codes.where(raw[:, :, :2].contiguous().view(torch.float16) > 0, 15 - codes)
    found = stored_int4(exact.bfloat16().to(dtype))
    assert found is not None
    ours = found[0].view(48, 3, 32)
    scales, zeros = (each.T.double().unsqueeze(2) for each in found[1].unbind(2))
    back = (ours.double() - 8) * scales + zeros
    assert ((back - exact.double().view(48, 3, 32)).abs() <= 0.15 * scales)[1:].all()
    assert not back[0].any() and torch.equal(ours[1:], codes[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", None])
def test_what_was_stored_otherwise_is_left(kind: str | None, dtype: torch.dtype) -> None:
    rows = (np.random.default_rng(0).standard_normal((64, 96)) * 0.05).astype(np.float32)
    if kind is not None:
        known = gguf.GGMLQuantizationType[kind]
        rows = gguf.quants.dequantize(gguf.quants.quantize(rows, known), known)
    quantizer = Quantizer("gguf", CPU, dtype)
    assert quantizer.product(torch.from_numpy(rows).to(dtype)) is None
    with pytest.raises(ConfigError, match=r"gguf.*no weight of the layers came from Q4_0"):
        quantizer.saved_bytes()


def test_a_folder_without_stored_codes_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="Q4_0 or Q4_1"):
        make_engine(tiny("llama"), "gguf")


# -- off, it is not there


@needs_compiler
@pytest.mark.usefixtures("our_products")
def test_off_by_default_and_then_nothing_is_touched(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "Quantizer", None)
    engine = LLMEngine(tiny("llama"), num_gpu_blocks=4, dtype="bfloat16")
    assert engine.config.quantization is None and "quantised" not in str(engine.plan)
    assert type(engine.runner.model._first_qkv) is PackedLinear


# -- beside the tape of C calls


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
def test_the_tape_notices(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, method: str, dtype: str
) -> None:
    """PyTorch computes in these steps, so none is replayed."""
    prompts = [[7, 8, 9], [*range(40)]]

    def run() -> list[Tensor]:
        driver = Driver(make_engine(tiny("llama"), method, dtype=dtype))
        outputs = driver.run(prompts, greedy(6))
        return [torch.stack(driver.logits[output.request_id]) for output in outputs]

    monkeypatch.setattr(_Pass, "replay", None)
    taped = run()
    monkeypatch.setattr(CallTape, "replay", lambda self, key, forward: forward())
    assert all(map(torch.equal, taped, run()))
