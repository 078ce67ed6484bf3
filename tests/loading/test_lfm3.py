"""What only LFM3 has in config.json and in its checkpoints.

Logits and ids in fp32, on every tier and on ranks are tested with the other architectures' (TINY).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver import Driver, assert_greedy, assert_logits_are_transformers, small_engine
from safetensors.torch import load_file
from tiers import PROMPTS
from transformers import AutoModelForCausalLM, Lfm3Config

from nanoengine.config.model import ModelConfig, ShortConvConfig
from nanoengine.errors import UnsupportedModelError
from nanoengine.loading.model_config import read_model_config

KINDS = ["conv", "full_attention", "sliding_attention", "conv"]


def read(folder: Path, **changes: Any) -> ModelConfig:
    """A config.json with the least that it must have, and changes."""
    settings = {"architectures": ["Lfm3ForCausalLM"], "num_hidden_layers": 4, "layer_types": KINDS}
    (folder / "config.json").write_text(json.dumps(settings | changes))
    return read_model_config(folder)


def test_missing_keys_are_transformers_defaults(tmp_path: Path) -> None:
    theirs = Lfm3Config()
    found = read(tmp_path, num_hidden_layers=24, layer_types=theirs.layer_types)
    convs = tuple(i for i, kind in enumerate(theirs.layer_types) if kind == "conv")
    assert found.recurrent == ShortConvConfig(convs, theirs.hidden_size, theirs.conv_L_cache)
    for key in ("vocab_size", "hidden_size", "intermediate_size", "head_dim"):
        assert getattr(found, key) == getattr(theirs, key)
    heads = theirs.num_attention_heads, theirs.num_key_value_heads
    assert (found.num_heads, found.num_kv_heads) == heads
    assert found.max_position == theirs.max_position_embeddings
    assert found.rms_norm_eps == theirs.norm_eps and found.tie_word_embeddings
    full, local = (theirs.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    assert found.local_rope is not None
    assert (found.rope.kind, found.rope.theta) == (full["rope_type"], full["rope_theta"])
    assert found.rope.partial_rotary_factor == full["partial_rotary_factor"]
    assert (found.local_rope.kind, found.local_rope.theta) == ("default", local["rope_theta"])


def test_windows_are_of_layers_and_of_those_with_attention(tmp_path: Path) -> None:
    found = read(tmp_path, sliding_window=40)
    assert found.windows == (None, None, 40, None)
    assert found.attention_layers == [1, 2] and found.attention.windows == (None, 40)


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"layer_types": None}, "'layer_types' None"),
        ({"layer_types": KINDS[:3]}, "for 4 layers"),
        ({"layer_types": ["conv", "sliding_attention"] * 2}, "one at least the first"),
        ({"layer_types": [*KINDS[:3], "mamba"]}, "mamba"),
        ({"sliding_window": None}, "a 'sliding_window' of None"),
        ({"use_attention_gate": False}, "'use_attention_gate' is False"),
        ({"use_sandwich_norm": False}, "'use_sandwich_norm' is False"),
        ({"attention_bias": True}, "'attention_bias' is True"),
    ],
    ids=str,
)
def test_what_does_not_run_is_refused(tmp_path: Path, changes: dict[str, Any], about: str) -> None:
    with pytest.raises(UnsupportedModelError, match=about):
        read(tmp_path, **changes)


@pytest.mark.breadth
def test_the_gate_has_two_names(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """At the hub it is gate_proj, in transformers 5 g_proj."""
    folder = tiny("lfm3")
    assert "model.layers.0.self_attn.gate_proj.weight" in load_file(folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.self_attn.g_proj.weight" in load_file(tmp_path / "model.safetensors")
    driver = Driver(small_engine(tmp_path))
    outputs = driver.run(PROMPTS)
    assert_greedy(folder, PROMPTS, outputs, len(outputs[0].outputs[0].token_ids))
    assert_logits_are_transformers(driver, folder, outputs)
