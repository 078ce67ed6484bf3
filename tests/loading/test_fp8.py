"""Checkpoints in FP8 against a decoder of the format's bits, and against transformers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import (
    Driver,
    assert_bits_of_numbers,
    assert_codes_on_a_gpu,
    assert_logits_are_transformers,
    small_engine,
)
from marks import needs_compiler, needs_no_gpu
from mtp_models import said_of, with_head
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import UnsupportedModelError, WeightMismatchError
from nanoengine.loading.fp8 import BLOCK, Fp8Reader, fp8_block
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.stored_codes import CodedWeight, numbers_of
from nanoengine.startup import parts

Tiny = Callable[[str], Path]
FLOAT8 = {"type": "float", "num_bits": 8, "strategy": "channel"}
CHANNELS = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": FLOAT8}}}
OF_BLOCKS = FLOAT8 | {"strategy": "block", "block_structure": [16, 32]}
MODELOPT = {"quant_method": "modelopt", "config_groups": CHANNELS["config_groups"]}
# By name: the quantization_config, the end of the name of scales, rows and columns that share one.
KINDS: dict[str, tuple[dict[str, Any], str, tuple[int, int]]] = {
    "blocks": ({"quant_method": "fp8", "weight_block_size": [40, 56]}, "_scale_inv", (40, 56)),
    "even blocks": ({"quant_method": "fp8", "weight_block_size": [16, 32]}, "_scale_inv", (16, 32)),
    "blocks of compressed-tensors": (
        CHANNELS | {"config_groups": {"group_0": {"weights": OF_BLOCKS}}},
        "_scale",
        (16, 32),
    ),
    "rows": (CHANNELS, "_scale", (1, 1 << 20)),
    "one": (CHANNELS, "_scale", (1 << 20, 1 << 20)),
    "modelopt": (MODELOPT | {"quant_algo": "FP8"}, "_scale", (1 << 20, 1 << 20)),
    # nvidia/Nemotron-H-47B-Reasoning-128K-FP8's config.json names no method.
    "modelopt, unnamed": (
        {"quant_algo": "FP8", "producer": {"name": "modelopt"}, "ignore": []},
        "_scale",
        (1 << 20, 1 << 20),
    ),
    "modelopt, rows": (
        MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        "_scale",
        (1, 1 << 20),
    ),
    "modelopt, blocks": (MODELOPT | {"quant_algo": "fp8_pb_wo"}, "_scale", (128, 128)),
}
SHAPED: dict[str, Callable[[Tensor], Tensor]] = {
    "one": Tensor.flatten,
    "modelopt": Tensor.squeeze,
    "modelopt, unnamed": Tensor.squeeze,
    "modelopt, rows": Tensor.flatten,
    "modelopt, blocks": lambda scales: scales[:, None, :, None],
}


def decoded(bits: int) -> float:
    """E4M3: a sign, 4 bits of exponent with a bias of 7, 3 of mantissa; no infinity."""
    sign, exponent, mantissa = -1 if bits >> 7 else 1, bits >> 3 & 15, bits & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


TABLE = torch.tensor([decoded(bits) for bits in range(256)])


def quantised(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """FP8 codes, a scale for each block, and what they say, each from one block at a time; of a
    tensor for all experts those of each.
    """
    if weight.dim() == 3:
        codes, scales, said = zip(*(quantised(each, block) for each in weight), strict=True)
        return torch.stack(codes), torch.stack(scales), torch.stack(said)
    rows, columns = (min(size, most) for size, most in zip(weight.shape, block, strict=True))
    codes, said = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    scales = torch.empty(-(-len(weight) // rows), -(-weight.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[place].abs().amax() / 448
            codes[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
            said[place] = TABLE[codes[place].view(torch.uint8).long()] * scales[i, j]
    return codes, scales, said


def make(
    source: Path, folder: Path, kind: str, ends: tuple[str, ...] = ("_proj.weight",)
) -> dict[str, Tensor]:
    """The checkpoint with tensors whose names end so in FP8; returns what these say."""
    config, suffix, block = KINDS[kind]
    shutil.copytree(source, folder)
    path, said = folder / "model.safetensors", {}
    tensors = load_file(path)
    for name in [n for n in tensors if n.endswith(ends)]:
        tensors[name], scales, said[name] = quantised(tensors[name], block)
        tensors[name + suffix] = SHAPED.get(kind, Tensor.contiguous)(scales)
        for other in (".input_scale", ".k_scale"):
            tensors[name.removesuffix(".weight") + other] = torch.ones(1)
    save_file(tensors, path)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": config}))
    return said


OF_MODELOPT = [kind for kind in KINDS if "modelopt" in kind]


@pytest.mark.some(6)
@pytest.mark.parametrize("kind", ["blocks", "even blocks", "rows", "one", *OF_MODELOPT])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gemma4-moe"])
def test_every_weight_is_what_its_codes_and_scales_say(
    tiny: Tiny, tmp_path: Path, name: str, kind: str
) -> None:
    """Also as codes, which it stays where 32 inputs have one scale. Gemma 4's router has a weight
    that is called a scale.
    """
    said = make(tiny(name), tmp_path / "m", kind)
    block = fp8_block(KINDS[kind][0])
    assert len(said) > 15 and block is not None
    assert read_model_config(tmp_path / "m").experts == read_model_config(tiny(name)).experts
    with Fp8Reader(tmp_path / "m", False, block) as reader:
        assert reader.names() == load_file(tiny(name) / "model.safetensors").keys()
        for each, values in said.items():
            assert torch.equal(reader.tensor(each), values), each
            weight = reader.weight(each, torch.float32)
            is_coded = kind != "blocks" and values.shape[1] % 32 == 0
            assert isinstance(weight, CodedWeight) is is_coded
            assert torch.equal(numbers_of(weight), values), each


WITH_ENDS = ("_proj.weight", "embed_tokens.weight", "head.weight")


def numbers_beside(
    source: Path, folder: Path, kind: str, ends: tuple[str, ...] = WITH_ENDS
) -> tuple[Path, Path]:
    """The checkpoint in FP8, also embedding and head, and the same as numbers."""
    said = make(source, folder / "m", kind, ends)
    shutil.copytree(source, folder / "plain")
    path = folder / "plain" / "model.safetensors"
    save_file(load_file(path) | said, path)
    return folder / "m", folder / "plain"


DEQUANTISED = "FP8, dequantised: 0.00 GiB stored are 0.00 GiB in memory; quantization="


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_same_weights_in_float32(
    tiny: Tiny, tmp_path: Path, kind: str
) -> None:
    """And the plan says what stays codes, or by how much they grow."""
    ours, plain = numbers_beside(tiny("llama"), tmp_path, kind)
    driver = Driver(small_engine(ours))
    line = DEQUANTISED if kind == "blocks" else "codes as stored: 23 of FP8; the rest in float32"
    assert line in str(driver.engine.plan)
    outputs = driver.run([[7 * i % 256 for i in range(50)]])
    driver.engine.close()
    assert_logits_are_transformers(driver, plain, outputs)


@needs_compiler
@pytest.mark.parametrize("name", ["qwen3.5", "glm4-moe", "ling"])
def test_a_models_own_head_may_be_in_it(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source = with_head(tiny(name), tmp_path, splits_experts=True)
    ours, plain = numbers_beside(source, tmp_path, "even blocks")
    said = [said_of(path, monkeypatch) for path in (ours, plain)]
    torch.testing.assert_close(*said, atol=1e-4, rtol=0)
    stored = load_file(ours / "model.safetensors")
    assert any("mtp." in each or ".3." in each for each in stored if each.endswith("_scale_inv"))


@needs_compiler
def test_tensors_with_names_of_their_own(tiny: Tiny, tmp_path: Path) -> None:
    """LFM2's convolutions, feed-forwards and experts."""
    ends = ("_proj.weight", *(f"w{i}.weight" for i in (1, 2, 3)))
    ours, plain = numbers_beside(tiny("lfm2-moe"), tmp_path, "even blocks", ends)
    driver = Driver(small_engine(ours))
    assert re.search(r"codes as stored: \d\d of FP8", str(driver.engine.plan))
    outputs = driver.run([[7 * i % 256 for i in range(50)], [3, 4]])
    driver.engine.close()
    assert_logits_are_transformers(driver, plain, outputs)


def test_without_kernels_of_codes_they_are_dequantised(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_code_ops", lambda *_: None)
    ours, plain = numbers_beside(tiny("llama"), tmp_path, "rows")
    driver = Driver(small_engine(ours))
    assert DEQUANTISED in str(driver.engine.plan)
    outputs = driver.run([[7 * i % 256 for i in range(50)]])
    driver.engine.close()
    assert_logits_are_transformers(driver, plain, outputs)


@needs_compiler
@pytest.mark.usefixtures("our_products")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.breadth)])
def test_codes_have_the_bits_of_their_numbers_on_all_tiers(
    tiny: Tiny, tmp_path: Path, dtype: str
) -> None:
    """Experts, too: each is a tensor."""
    ours, plain = numbers_beside(tiny("qwen3-moe"), tmp_path, "even blocks")
    assert_bits_of_numbers(ours, plain, dtype)


@needs_compiler
def test_what_latent_attention_takes_apart_becomes_numbers(tiny: Tiny, tmp_path: Path) -> None:
    ours, plain = numbers_beside(tiny("deepseek-v3-dense"), tmp_path, "rows")
    with Fp8Reader(ours, False, BLOCK) as reader:
        stored = [name for name in reader.names() if reader.dtype(name) is torch.float8_e4m3fn]
        coded = [name for name in stored if reader.shape(name)[1] % 32 == 0]
    assert any("kv_b_proj" in name for name in coded)
    driver = Driver(small_engine(ours, dtype="float32"))
    kept = sum("kv_b_proj" not in name for name in coded)
    assert f"codes as stored: {kept} of FP8" in str(driver.engine.plan)
    outputs = driver.run([[7 * i % 256 for i in range(50)]])
    driver.engine.close()
    assert_logits_are_transformers(driver, plain, outputs)


@needs_no_gpu
def test_they_stay_codes_on_a_gpu(tiny: Tiny, tmp_path: Path) -> None:
    ours, plain = numbers_beside(tiny("llama"), tmp_path, "even blocks")
    assert_codes_on_a_gpu(ours, plain, "23 of FP8")


@pytest.mark.parametrize("scale", [2.0**119, float("nan"), float("-inf")])
def test_scales_of_no_size_leave_numbers(tiny: Tiny, tmp_path: Path, scale: float) -> None:
    make(tiny("llama"), tmp_path / "m", "one")
    change(tmp_path / "m", **{"up_proj.weight_scale": torch.tensor([scale])})
    with Fp8Reader(tmp_path / "m", False, BLOCK) as reader:
        weight = reader.weight("model.layers.1.mlp.up_proj.weight", torch.float32)
        assert isinstance(weight, Tensor) and weight.dtype is torch.float32


def test_weights_are_those_that_transformers_reads(tiny: Tiny, tmp_path: Path) -> None:
    said = make(tiny("llama"), tmp_path / "m", "even blocks")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    theirs = model.state_dict()
    assert all(torch.equal(theirs[name], values) for name, values in said.items())


def change(folder: Path, **tensors: Tensor | None) -> None:
    path = folder / "model.safetensors"
    kept = load_file(path) | {f"model.layers.1.mlp.{n}": t for n, t in tensors.items()}
    save_file({name: t for name, t in kept.items() if t is not None}, path)


@pytest.mark.parametrize("scales", [None, torch.ones(2, 3), torch.ones(5), torch.ones(1, 1, 2)])
def test_scales_that_do_not_fit_are_refused(
    tiny: Tiny, tmp_path: Path, scales: Tensor | None
) -> None:
    make(tiny("llama"), tmp_path / "m", "blocks")
    change(tmp_path / "m", **{"up_proj.weight_scale_inv": scales})
    match = r"up_proj\.weight' is FP8 and has no scale" if scales is None else "no scales for block"
    with pytest.raises(WeightMismatchError, match=match):
        LLMEngine(tmp_path / "m", device="cpu")


def test_a_vector_in_fp8_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    make(tiny("llama"), tmp_path / "m", "blocks")
    vector, scale = torch.ones(64).to(torch.float8_e4m3fn), torch.ones(1)
    path = tmp_path / "m" / "model.safetensors"
    norm = {"model.norm.weight": vector, "model.norm.weight_scale": scale}
    save_file(load_file(path) | norm, path)
    with pytest.raises(UnsupportedModelError, match=r"'model.norm.weight' is FP8 and no matrix"):
        LLMEngine(tmp_path / "m", device="cpu")


@pytest.mark.some(4)
@needs_compiler
@pytest.mark.parametrize("kind", ["blocks", "even blocks", "rows"])
@pytest.mark.parametrize(
    "name", ["granite-hybrid", "granite-hybrid-dense", "granite-moe-shared", "mixtral"]
)
def test_a_tensor_of_gates_and_ups_and_one_of_all_experts(
    tiny: Tiny, tmp_path: Path, name: str, kind: str
) -> None:
    """Blocks of 16 rows may end behind the last gate."""
    ends = ("_proj.weight", "_linear.weight", "experts.gate_up_proj", "experts.down_proj")
    ours, plain = numbers_beside(tiny(name), tmp_path, kind, ends)
    stored = load_file(ours / "model.safetensors")
    assert any(re.search("input_linear|gate_up", each) and "scale" in each for each in stored)
    driver = Driver(small_engine(ours))
    outputs = driver.run([[7 * i % 256 for i in range(50)], [3, 4]])
    driver.engine.close()
    assert_logits_are_transformers(driver, plain, outputs)


@pytest.mark.parametrize("scales", [torch.ones(4, 1, 1), torch.ones(1), torch.ones(5, 3, 1)])
def test_scales_of_other_experts_are_refused(tiny: Tiny, tmp_path: Path, scales: Tensor) -> None:
    make(tiny("granite-moe-shared"), tmp_path / "m", "rows", ("output_linear.weight",))
    path = tmp_path / "m" / "model.safetensors"
    name = "model.layers.1.block_sparse_moe.output_linear.weight_scale"
    save_file(load_file(path) | {name: scales}, path)
    with pytest.raises(WeightMismatchError, match=r"output_linear.weight_scale' is .* no scales"):
        LLMEngine(tmp_path / "m", device="cpu")


def test_experts_of_a_layer_with_inputs_first_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    make(tiny("gpt-oss"), tmp_path / "m", "rows", ("experts.down_proj",))
    with pytest.raises(UnsupportedModelError, match="a tensor for each expert"):
        LLMEngine(tmp_path / "m", device="cpu")


@pytest.mark.parametrize("block", [[16, 32], "16x32"])
def test_compressed_tensors_names_its_blocks_in_each_group(block: object) -> None:
    groups = {"a": {"weights": FLOAT8}, "b": {"weights": OF_BLOCKS | {"block_structure": block}}}
    assert fp8_block(CHANNELS | {"config_groups": groups}) == (16, 32)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "awq"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "compressed-tensors"},
        MODELOPT | {"quant_algo": "MXFP8"},
        {"quant_method": "compressed-tensors", "config_groups": {}},
        CHANNELS | {"config_groups": {"a": {"weights": FLOAT8}, "b": {"weights": {"num_bits": 4}}}},
        CHANNELS | {"config_groups": {"a": {"weights": FLOAT8 | {"type": "int"}}}},
        CHANNELS | {"config_groups": {"a": None}},
        CHANNELS | {"config_groups": {"a": {"weights": OF_BLOCKS | {"block_structure": [16]}}}},
        CHANNELS
        | {
            "config_groups": {
                "a": {"weights": OF_BLOCKS},
                "b": {"weights": OF_BLOCKS | {"block_structure": [32, 32]}},
            }
        },
        [],
    ],
)
def test_other_configs_are_not_of_fp8(tiny: Tiny, tmp_path: Path, config: object) -> None:
    assert fp8_block(config) is None
    shutil.copytree(tiny("llama"), tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    with pytest.raises(UnsupportedModelError, match="quantization_config"):
        read_model_config(tmp_path / "m")
