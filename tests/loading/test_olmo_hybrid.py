"""What only OLMo Hybrid has in config.json and in its checkpoints.

Logits and ids in fp32, on every tier and on ranks are tested with the other architectures' (TINY).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from driver import Driver, assert_greedy, assert_logits_are_transformers, small_engine
from safetensors.torch import load_file, save_file
from tiers import PROMPTS
from tiny_models import TINY
from transformers import OlmoHybridConfig

from nanoengine.config.model import ModelConfig, RecurrentConfig
from nanoengine.loading.model_config import read_model_config

HEADS = {
    "linear_num_key_heads": 30,
    "linear_num_value_heads": 30,
    "linear_key_head_dim": 96,
    "linear_value_head_dim": 192,
}


def read(folder: Path, **changes: Any) -> ModelConfig:
    """A config.json with the least that it must have, and changes."""
    settings = {"architectures": ["OlmoHybridForCausalLM"], **HEADS}
    (folder / "config.json").write_text(json.dumps(settings | changes))
    return read_model_config(folder)


def test_missing_keys_are_transformers_defaults(tmp_path: Path) -> None:
    found, theirs = read(tmp_path), OlmoHybridConfig()
    layers = tuple(i for i, kind in enumerate(theirs.layer_types) if kind == "linear_attention")
    shape = RecurrentConfig(layers, 30, 30, 96, 192, 4, doubles_steps=True)
    assert found.recurrent == shape
    for key in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps"):
        assert getattr(found, key) == getattr(theirs, key)
    heads = theirs.num_attention_heads, theirs.num_key_value_heads
    assert (found.num_heads, found.num_kv_heads) == heads and found.head_dim == 128
    assert (found.num_layers, found.max_position) == (32, theirs.max_position_embeddings)
    single = read(tmp_path, linear_allow_neg_eigval=False).recurrent
    assert single == replace(shape, doubles_steps=False)
    qwen = {"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 32, "hidden_size": 64}
    qwen |= {"intermediate_size": 96, "vocab_size": 100, "linear_allow_neg_eigval": True}
    ignores = read(tmp_path, **qwen).recurrent  # as transformers' class does
    assert ignores == replace(shape, doubles_steps=False)


@pytest.mark.parametrize(
    ("changes", "turns"),
    [
        ({}, True),
        ({"rope_theta": None}, False),
        ({"rope_parameters": None}, False),
        ({"rope_parameters": None, "rope_theta": 5e5}, True),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, True),
        ({"rope_parameters": {"rope_type": "default"}}, True),
    ],
    ids=str,
)
def test_no_layer_turns_where_theta_is_null(
    tmp_path: Path, changes: dict[str, Any], turns: bool
) -> None:
    """As in vLLM; transformers 5.23 takes its default for rope_parameters that are null."""
    assert read(tmp_path, **changes).no_rope_layers == (() if turns else tuple(range(32)))


@pytest.mark.breadth
def test_names_of_the_hub(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Norms have other names there, and q, k and v a convolution each."""
    folder = tiny("olmo-hybrid")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    stored = load_file(folder / "model.safetensors")
    for layer in ("model.layers.0.", "model.layers.1."):
        for old, new in (("attention", "input"), ("feedforward", "post_attention")):
            norm = stored.pop(f"{layer}{new}_layernorm.weight")
            stored[f"{layer}{old}_layer_norm.weight"] = norm
        convs = stored.pop(f"{layer}linear_attn.conv1d.weight").split_with_sizes([24, 24, 80])
        for name, conv in zip("qkv", convs, strict=True):
            stored[f"{layer}linear_attn.{name}_conv1d.weight"] = conv.clone()
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    assert_answers_are_those_of(folder, tmp_path)


@pytest.mark.breadth
def test_layers_that_turn_and_shares_up_to_one(tmp_path: Path) -> None:
    row = TINY["olmo-hybrid"]
    changes = {"rope_parameters": None, "linear_allow_neg_eigval": False, "attention_bias": True}
    replace(row, settings=row.settings | changes)(tmp_path)
    assert read_model_config(tmp_path).no_rope_layers == ()
    assert_answers_are_those_of(tmp_path, tmp_path)


def assert_answers_are_those_of(original: Path, checkpoint: Path) -> None:
    driver = Driver(small_engine(checkpoint))
    outputs = driver.run(PROMPTS)
    assert_greedy(original, PROMPTS, outputs, len(outputs[0].outputs[0].token_ids))
    assert_logits_are_transformers(driver, original, outputs)
