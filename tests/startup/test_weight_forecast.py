"""What a plan says that weights take, against what an engine holds of them when it has loaded."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import quantised
import torch
from checkpoints import load_reference
from gguf_model import ARCHITECTURES as IN_GGUF
from marks import named, needs_compiler
from peft import LoraConfig, get_peft_model
from tiny_models import TINY

from nanoengine.config.engine import GIB, make_config
from nanoengine.config.model import LeftOut, ModelConfig
from nanoengine.devices.cpu import native_dtype
from nanoengine.kernels import cpu_linear
from nanoengine.loading.find_model import read_config_of
from nanoengine.loading.left_out import read_left_out, stays_numbers
from nanoengine.loading.lora import read_adapter
from nanoengine.loading.model_config import read_model_config
from nanoengine.loading.stored_weights import StoredWeights, read_stored, said_weights
from nanoengine.startup.forecast import Forecaster, Hardware
from nanoengine.startup.parts import load_parts, make_engine_device

pytestmark = [needs_compiler, pytest.mark.usefixtures("in_16_bits", "fresh_cache")]
Tiny = Callable[[str], Path]
MOST_OFF = 0.03
# Their dense layers have no place in it, or none beside experts, or the biases of a mixer.
NOT_IN_GGUF = (
    "falcon-h1-norm",
    "glm4-moe-lite",
    "kimi-linear-dense",
    "ling-unbounded",
    "nemotron-h-moe",
    "qwen3-next",
)
DTYPES = ("float32", "bfloat16")
OUR_DTYPES = DTYPES if cpu_linear.is_supported() else ("float32",)  # with products of our own
HARDWARE = Hardware(0, 8 * GIB, 20.0, 25.0, native_dtype()[0])


def weights_held(path: Path, **settings: Any) -> int:
    config = make_config(str(path), {"device": "cpu", "num_threads": 1} | settings)
    return load_parts(config, make_engine_device(config)).facts.weight_bytes


def weights_planned(path: Path, model: ModelConfig, stored: StoredWeights, **settings: Any) -> int:
    config = make_config(str(path), {"num_gpu_blocks": 8} | settings)
    return Forecaster(config, model, HARDWARE, stored).forecast(None).plan.weight_bytes


def how_far_off(path: Path, by_files: bool = True, **settings: Any) -> float:
    model = read_config_of(path)
    stored = read_stored(path, model) if by_files else said_weights(model)
    return weights_planned(path, model, stored, **settings) / weights_held(path, **settings) - 1


def variants(source: Path, folder: Path, name: str) -> Iterator[tuple[Path, str | None]]:
    """The model in each form, and the setting quantization."""
    for method in (None, "none", "int8"):
        yield source, method
        yield quantised.in_16_bits(source, folder / f"16 {method}"), method
    # Hybrids of Granite 4, and Granite 3 with a shared expert, are refused if they are quantised.
    is_refused = name.startswith(("granite-hybrid", "granite-moe-shared"))
    for kind in () if is_refused else quantised.KINDS:
        path = quantised.quantised(source, folder / kind, kind, is_left)
        for method in (None, "int8"):
            yield path, method
    architecture = json.loads((source / "config.json").read_text())["architectures"][0]
    if architecture in IN_GGUF and name not in NOT_IN_GGUF:
        path = quantised.mixed_gguf(source, folder / "gguf" / "m.gguf", name)
        for method in (None, "none", "int8"):
            yield path, method


def is_left(name: str) -> bool:
    return "layers.1." in name or "down_proj" in name


MODELS = {name: name for name in TINY}


@pytest.mark.some(1)
@pytest.mark.parametrize("name", named(MODELS, "llama-tied", "qwen3-moe", "nemotron-h"))
def test_weights_are_those_that_the_engine_holds(tiny: Tiny, tmp_path: Path, name: str) -> None:
    for path, method in variants(tiny(name), tmp_path, name):
        for dtype in OUR_DTYPES:
            off = how_far_off(path, dtype=dtype, quantization=method)
            assert abs(off) <= MOST_OFF, (path, method, dtype)


@pytest.mark.parametrize("kind", quantised.KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_config_json_alone_says_what_is_left_out(
    tiny: Tiny, tmp_path: Path, kind: str, dtype: str
) -> None:
    """Where no file is there, as before a download."""
    path = quantised.quantised(tiny("llama"), tmp_path / "m", kind, is_left)
    assert abs(how_far_off(path, by_files=False, dtype=dtype)) <= MOST_OFF
    model = read_model_config(path)
    held = weights_held(path, dtype=dtype)
    (path / "model.safetensors").unlink()
    stored = read_stored(path, model)
    assert stored == said_weights(model)
    assert weights_planned(path, model, stored, dtype=dtype) == pytest.approx(held, rel=MOST_OFF)


def test_an_own_head_counts_as_one(tiny: Tiny, tmp_path: Path) -> None:
    """Whatever config.json says; a copy of the embeddings does not."""
    tensors = quantised.all_tensors(tiny("llama"))
    own = quantised.copied(tiny("llama"), tmp_path / "own", tensors, tie_word_embeddings=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    same = quantised.copied(tiny("llama"), tmp_path / "same", tensors, tie_word_embeddings=True)
    for path, is_own in ((own, True), (same, False)):
        assert read_stored(path, read_model_config(path)).has_own_head is is_own
        assert how_far_off(path, dtype="bfloat16") == 0


def test_a_group_of_inputs_that_are_apart_makes_numbers(tiny: Tiny, tmp_path: Path) -> None:
    """config.json says that they may be; the file, whether they are."""
    for is_apart in (False, True):
        path = quantised.quantised(tiny("llama"), tmp_path / f"{is_apart}", "gptq", is_left)
        tensors, content = (
            quantised.all_tensors(path),
            json.loads((path / "config.json").read_text()),
        )
        content["quantization_config"] |= {"desc_act": True}
        if is_apart:
            tensors = {n: t.flip(0) if n.endswith("g_idx") else t for n, t in tensors.items()}
            name = "model.layers.0.self_attn.q_proj.g_idx"
            tensors[name] = tensors[name][torch.randperm(64)]
        made = quantised.copied(path, tmp_path / f"of {is_apart}", tensors, **content)
        assert how_far_off(made, dtype="float32") == 0


LAYER = "model.layers.4.linear_attn.out_proj.weight"
SLOW = r"re:(.*a)*b"


@pytest.mark.parametrize(
    ("listed", "name", "is_left_out"),
    [
        ({}, LAYER, False),
        ({"modules_to_not_convert": ["linear_attn"]}, LAYER, True),
        ({"modules_to_not_convert": ["gate"]}, "model.layers.0.mlp.gate_proj.weight", False),
        ({"modules_to_not_convert": ["model.layers.4."]}, LAYER, True),
        ({"modules_to_not_convert": ["model.layers.4"]}, LAYER.replace("4", "41"), False),
        ({"ignore": ["model.language_model.layers.4.linear_attn.out_proj"]}, LAYER, True),
        ({"ignore": [r"re:.*linear_attn\..*"]}, LAYER, True),
        ({"ignore": [r"re:model\.language_model\.layers\.(3|4)\..*"]}, LAYER, True),
        ({"ignore": [r"re:linear_attn"]}, LAYER, False),
        ({"ignore": ["re:(", SLOW, f"re:{'a*' * 9}b", "Linear"]}, LAYER, False),
        ({"ignored_layers": ["self_attn.out_proj"]}, LAYER, False),
        ({"ignored_layers": ["4"]}, LAYER, True),
        ({"ignored_layers": ["attn.out_proj"]}, LAYER, False),
        ({"ignore": [r"re:.*layers\.\d\.linear.*"]}, LAYER, True),
        ({"ignore": [r"re:.*layers\.\d\.linear.*"]}, LAYER.replace("4", "41"), False),
        ({"ignore": ["re:.*layers.5.*"]}, LAYER, False),
        ({"ignore": ["re:.*layers.4.*"]}, LAYER, True),
        ({"exclude_modules": ["*layers.4*"]}, LAYER, True),
        ({"exclude_modules": ["*layers.5*"]}, LAYER, False),
        ({"dynamic": {r"-:.*linear_attn\..*": {}}}, LAYER, True),
        ({"dynamic": {r"+:.*linear_attn\..*": {"bits": 8}}}, LAYER, False),
        ({"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]}, LAYER, True),
        ({"modules_in_block_to_quantize": [["linear_attn.out_proj"]]}, LAYER, False),
        ({"config_groups": {"0": {"targets": ["Linear"]}}}, LAYER, False),
        ({"config_groups": {"0": {"targets": [r"re:.*mlp.*"]}}}, LAYER, True),
        (
            {"modules_to_not_convert": None, "ignore": 3, "ignored_layers": [3, ""]},
            LAYER,
            False,
        ),
    ],
)
def test_lists_name_modules_in_the_ways_of_their_tools(
    listed: dict[str, Any], name: str, is_left_out: bool
) -> None:
    assert stays_numbers(name, read_left_out(listed)) is is_left_out


SLOW_LISTS = [
    {"ignore": [f"re:{'.*' * 4}{mark}" for mark in "!#$%&"] * 20},
    {"ignore": [f"re:.*.*{number}!" for number in range(1000)]},
    {"ignore": [f"model.layers.{i}.mlp.experts.{j}" for i in range(100) for j in range(100)]},
]


@pytest.mark.parametrize("listed", SLOW_LISTS)
def test_no_list_takes_long(listed: dict[str, Any]) -> None:
    """Of a model with many experts."""
    left_out, start = read_left_out(listed), time.process_time()
    for layer in range(30):
        for expert in range(128):
            stays_numbers(f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight", left_out)
    assert time.process_time() - start < 20


@pytest.mark.parametrize("content", [None, "awq", 3, []])
def test_a_config_of_another_form_lists_nothing(content: Any) -> None:
    assert read_left_out(content) == LeftOut()


@pytest.mark.parametrize("kind", ["16 bits", "GGUF", "nf4"])
def test_weights_with_an_adapter(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    """What it changes is numbers, which fit no 16 bits where activations have 32."""
    source, folder = tiny("llama"), tmp_path / kind
    if kind == "GGUF":
        path = quantised.mixed_gguf(source, folder / "m.gguf", "llama")
    elif kind == "nf4":
        path = quantised.quantised(source, folder, kind, lambda name: False)
    else:
        path = quantised.in_16_bits(source, folder)
    adapter = random_adapter(source, tmp_path / "a")
    for dtype in OUR_DTYPES:
        model = read_config_of(path)
        stored = read_stored(path, model)
        stored = replace(stored, forms=read_adapter(str(adapter)).forms(stored.forms))
        settings = {"dtype": dtype, "lora": str(adapter)}
        planned, held = (
            weights_planned(path, model, stored, **settings),
            weights_held(path, **settings),
        )
        assert planned == pytest.approx(held, rel=MOST_OFF), dtype


def random_adapter(source: Path, folder: Path) -> Path:
    """Of the matrices of all layers."""
    adapted = get_peft_model(load_reference(source), LoraConfig(r=2, target_modules="all-linear"))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.2)
    adapted.save_pretrained(folder)
    return folder
