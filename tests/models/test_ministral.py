"""What only Ministral 3 has: queries with a factor that grows with the position.

Logits and ids in fp32 are tested with the other architectures' (TINY).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Ministral3Config
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from nanoengine.config.model import RopeConfig
from nanoengine.errors import CorruptModelError
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.rope import query_factors


def test_factors_are_transformers() -> None:
    positions = torch.arange(262144)
    for beta, original in ((0.1, 16384), (0.5, 16), (0.1, 8192)):
        rope = RopeConfig(1e6, query_beta=beta, original_max_position=original)
        theirs = get_llama_4_attn_scale(positions[None], beta, original).flatten()
        assert torch.equal(query_factors(rope, positions), theirs)


# -- config.json

PUBLISHED: dict[str, Any] = {  # of the text model of mistralai/Ministral-3-8B-Base-2512
    "architectures": ["Ministral3ForCausalLM"],
    "model_type": "ministral3",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "vocab_size": 131072,
}


def test_keys_that_are_left_out_are_transformers_defaults(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    ours, theirs = read_model_config(tmp_path), Ministral3Config.from_pretrained(tmp_path)
    rope = theirs.rope_parameters
    assert (ours.head_dim, ours.num_kv_heads) == (theirs.head_dim, theirs.num_key_value_heads)
    assert (ours.max_position, ours.rms_norm_eps) == (theirs.max_position_embeddings, 1e-5)
    assert ours.rope.query_beta == rope["llama_4_scaling_beta"]
    assert ours.rope.original_max_position == rope["original_max_position_embeddings"]
    assert (ours.rope.factor, ours.rope.attention_factor) == (rope["factor"], 1.0)
    assert not ours.attention.windows


@pytest.mark.parametrize("beta", [-0.1, "a", True])
def test_an_impossible_factor_is_refused(tmp_path: Path, beta: Any) -> None:
    rope = {"rope_type": "default", "llama_4_scaling_beta": beta}
    content = PUBLISHED | {"rope_parameters": rope | {"original_max_position_embeddings": 64}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CorruptModelError, match="llama_4_scaling_beta"):
        read_model_config(tmp_path)
