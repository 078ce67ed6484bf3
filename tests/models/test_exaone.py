"""What only EXAONE 4 has: RoPE in layers with a window alone.

Logits and ids in fp32, on every tier, are tested with the other architectures' (TINY).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Exaone4Config

from nanoengine.config.model import ModelConfig
from nanoengine.errors import UnsupportedModelError
from nanoengine.loading.model_config import read_model_config

# -- config.json

PUBLISHED: dict[str, Any] = {  # the form of LGAI-EXAONE/EXAONE-4.0-32B, with four layers
    "architectures": ["Exaone4ForCausalLM"],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 27392,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "max_position_embeddings": 131072,
    "model_type": "exaone4",
    "num_attention_heads": 40,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "vocab_size": 102400,
}


def read(folder: Path, **changes: Any) -> ModelConfig:
    """A change to ... leaves the key out."""
    content = {k: v for k, v in (PUBLISHED | changes).items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(content))
    return read_model_config(folder)


@pytest.mark.parametrize(
    ("changes", "windows", "without"),
    [
        ({}, (4096, 4096, 4096, None), (3,)),
        ({"layer_types": ..., "sliding_window_pattern": ...}, (4096, 4096, 4096, None), (3,)),
        ({"layer_types": ..., "sliding_window_pattern": 2}, (4096, None, 4096, None), (1, 3)),
        ({"layer_types": ["full_attention"] * 4}, (), (0, 1, 2, 3)),
        ({"layer_types": ["full_attention"] * 4, "sliding_window": None}, (), ()),
    ],
)
def test_layers_without_a_window_do_not_turn(
    tmp_path: Path, changes: dict[str, Any], windows: tuple[Any, ...], without: tuple[int, ...]
) -> None:
    config = read(tmp_path, **changes)
    assert (config.windows, config.no_rope_layers) == (windows, without)
    theirs = Exaone4Config.from_pretrained(tmp_path)
    kinds = ["sliding_attention" if window else "full_attention" for window in config.windows]
    assert theirs.layer_types == (kinds or ["full_attention"] * 4)


def test_a_pattern_of_letters_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="a 'sliding_window_pattern' of 'LLLG'"):
        read(tmp_path, layer_types=...)
