"""What only Bamba has in config.json.

Logits and ids in fp32, on every tier and on ranks are tested with the other architectures' (TINY).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BambaConfig

from nanoengine.config.model import ModelConfig, RecurrentConfig
from nanoengine.errors import UnsupportedModelError
from nanoengine.loading.model_config import read_model_config


def read(folder: Path, **changes: Any) -> ModelConfig:
    """A config.json with the least that it must have, and changes."""
    settings = {"architectures": ["BambaForCausalLM"], "attn_layer_indices": [9, 18, 27]}
    (folder / "config.json").write_text(json.dumps(settings | changes))
    return read_model_config(folder)


def test_missing_keys_are_transformers_defaults(tmp_path: Path) -> None:
    found, theirs = read(tmp_path), BambaConfig(attn_layer_indices=[9, 18, 27])
    layers = tuple(i for i, kind in enumerate(theirs.layers_block_type) if "linear" in kind)
    shape = RecurrentConfig(layers, 1, 128, 256, 64, 4, rule="mamba")
    assert found.recurrent == shape and found.attention_layers == [9, 18, 27]
    for key in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps"):
        assert getattr(found, key) == getattr(theirs, key)
    assert (found.num_layers, found.max_position) == (32, theirs.max_position_embeddings)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (32, 8, 128)
    part = theirs.rope_parameters["partial_rotary_factor"]
    assert found.rope.partial_rotary_factor == part == 0.5 and found.no_rope_layers == ()
    assert found.experts is None


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"attn_layer_indices": []}, "no layer has attention"),
        ({"attn_layer_indices": None}, "'layer_types' None"),
        ({"mamba_proj_bias": True}, "'mamba_proj_bias' is True"),
        ({"mamba_conv_bias": False}, "'mamba_conv_bias' is False"),
        ({"time_step_limit": [0.0, 1.0]}, "'time_step_limit'"),
    ],
    ids=str,
)
def test_what_does_not_run_is_refused(tmp_path: Path, changes: dict[str, Any], about: str) -> None:
    with pytest.raises(UnsupportedModelError, match=about):
        read(tmp_path, **changes)
