"""What only ERNIE 4.5 has: its keys for experts, and the name of the bias of their choice.

Logits and ids in fp32, on every tier, are tested with the other architectures' (TINY).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import small_engine
from safetensors.torch import load_file, save_file
from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

from nanoengine.config.model import ModelConfig
from nanoengine.errors import CorruptModelError, UnsupportedModelError
from nanoengine.loading.model_config import read_model_config


def test_a_head_that_guesses_is_left_out(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("ernie-moe"), folder)
    file = folder / "model.safetensors"
    head = {
        "model.mtp_block.0.input_layernorm.weight": torch.ones(64),
        "model.mtp_emb_norm.0.weight": torch.ones(64),
        "model.mtp_hidden_norm.0.weight": torch.ones(64),
        "model.mtp_linear_proj.0.weight": torch.ones(64, 128),
    }
    save_file(load_file(file) | head, file, {"format": "pt"})
    small_engine(folder).close()


# -- config.json

PUBLISHED: dict[str, Any] = {  # the form of baidu/ERNIE-4.5-21B-A3B-PT, with six layers
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "model_type": "ernie4_5_moe",
    "moe_capacity": [64, 64, 64],
    "moe_gate": "topk",
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_use_aux_free": True,
    "num_attention_heads": 20,
    "num_hidden_layers": 6,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000,
    "tie_word_embeddings": True,
    "use_bias": False,
    "vocab_size": 103424,
}
SMALL = {  # for a model of transformers
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}


def read(folder: Path, **changes: Any) -> ModelConfig:
    """A change to ... leaves the key out."""
    content = {k: v for k, v in (PUBLISHED | changes).items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(content))
    return read_model_config(folder)


def test_experts_are_those_of_config_json(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.experts is not None
    assert (config.experts.count, config.experts.top_k) == (64, 6)
    assert (config.experts.shared_size, config.experts.dense_layers) == (3072, (0,))
    keys = [key for key in PUBLISHED if key.startswith(("moe_", "rope", "tie", "rms"))]
    assert read(tmp_path, **dict.fromkeys(keys, ...)) == config


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moe_layer_start_index": 0},
        {"moe_layer_start_index": 2, "moe_layer_end_index": 4},
        {"moe_layer_interval": 2},
        {"moe_layer_interval": 3, "moe_layer_start_index": 3, "moe_layer_end_index": -1},
        {"moe_num_shared_experts": 0},
        {"moe_layer_start_index": 7},
    ],
)
def test_layers_with_experts_are_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    found = read(tmp_path, **SMALL, **changes).experts
    theirs = Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig.from_pretrained(tmp_path))
    blocks = [layer.mlp for layer in theirs.model.layers]
    dense = tuple(i for i, block in enumerate(blocks) if not hasattr(block, "experts"))
    if len(dense) == len(blocks):
        assert found is None
        return
    assert found is not None and found.dense_layers == dense
    shared = next(block for block in blocks if hasattr(block, "experts")).shared_experts
    assert found.shared_size == (0 if shared is None else shared.intermediate_size)


@pytest.mark.parametrize("value", [True, "1", 1.5])
@pytest.mark.parametrize("name", ["moe_layer_start_index", "moe_layer_end_index"])
def test_impossible_layers_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(CorruptModelError, match=name):
        read(tmp_path, **{name: value})


@pytest.mark.parametrize("changes", [{"use_bias": True}, {"moe_norm_min": 0.1}])
def test_other_arithmetic_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(changes))):
        read(tmp_path, **changes)
