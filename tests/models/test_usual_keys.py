"""Architectures whose config.json has other names for usual keys, and what they refuse.

Their logits and ids are compared with transformers' with the other architectures' (TINY).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from published import read_published
from transformers import AutoConfig

from nanoengine.errors import UnsupportedModelError

SIZES: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 8,
    "num_key_value_heads": 16,
    "vocab_size": 4096,
}
STARCODER = SIZES | {  # the form of bigcode/starcoder2-3b
    "architectures": ["Starcoder2ForCausalLM"],
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-3,
    "sliding_window": 1024,
    "use_bias": True,
}
STABLELM = SIZES | {  # the form of stabilityai/stablelm-2-1_6b
    "architectures": ["StableLmForCausalLM"],
    "layer_norm_eps": 1e-3,
    "partial_rotary_factor": 0.5,
    "use_parallel_residual": False,
    "use_qkv_bias": True,
}
TRINITY = SIZES | {  # the form of arcee-ai/Trinity-Mini
    "architectures": ["AfmoeForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_afmoe.AfmoeForCausalLM"},
    "global_attn_every_n_layers": 2,
    "moe_intermediate_size": 1024,
    "mup_enabled": True,
    "num_dense_layers": 3,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "route_norm": True,
    "route_scale": 2.826,
    "score_func": "sigmoid",
    "sliding_window": 2048,
}
CLOVA = SIZES | {  # the form of naver-hyperclovax/HyperCLOVAX-SEED-Think-14B
    "architectures": ["HyperCLOVAXForCausalLM"],
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 10.0,
    "logits_scaling": 0.125,
    "residual_multiplier": 1.0,
    "use_post_norm": True,
}


def test_one_key_may_be_of_all_biases(tmp_path: Path) -> None:
    config = read_published(tmp_path, STARCODER)
    assert (config.attention_bias, config.mlp_bias) == (True, True)
    assert config.rms_norm_eps == 1e-3 and config.windows == (1024,) * 8
    config = read_published(tmp_path, STARCODER, use_bias=False)
    assert (config.attention_bias, config.mlp_bias) == (False, False)


def test_a_bias_may_be_of_queries_keys_and_values(tmp_path: Path) -> None:
    config = read_published(tmp_path, STABLELM)
    assert config.attention_bias and not config.mlp_bias
    assert (config.rms_norm_eps, config.rope.partial_rotary_factor) == (1e-3, 0.5)
    assert read_published(tmp_path, STABLELM, use_qkv_bias="left out").attention_bias is False


def test_experts_of_trinity(tmp_path: Path) -> None:
    config = read_published(tmp_path, TRINITY)
    experts = config.experts
    assert experts is not None and experts.renormalises and experts.has_choice_bias
    assert (experts.scaling, experts.shared_size) == (2.826, 1024)
    assert experts.dense_layers == (0, 1, 2) and config.windows == (2048, None) * 4
    assert config.no_rope_layers == (1, 3, 5, 7)
    assert config.factors.embeddings == 2048**0.5
    assert read_published(tmp_path, TRINITY, mup_enabled=False).factors.embeddings == 1


def test_logits_of_hyperclova_are_multiplied(tmp_path: Path) -> None:
    factors = read_published(tmp_path, CLOVA).factors
    assert (factors.logits, factors.embeddings, factors.summands) == (8.0, 10.0, 1.0)


def test_scores_of_hyperclova_are_as_usual_without_their_factor(tmp_path: Path) -> None:
    assert read_published(tmp_path, CLOVA).query_pre_attn_scalar == 0.0078125**-2
    for value in (None, "left out"):
        config = read_published(tmp_path, CLOVA, attention_multiplier=value)
        assert config.query_pre_attn_scalar is None


@pytest.mark.parametrize("name", ["cohere", "cwm"])
def test_a_rope_that_is_left_out_is_that_of_transformers(
    tiny: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    published = json.loads((tiny(name) / "config.json").read_text())
    ours = read_published(tmp_path, published, rope_parameters="left out").rope
    theirs = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert theirs["rope_theta"] != 1e4  # the default of most
    assert read_published(tmp_path, published, rope_parameters=theirs).rope == ours


@pytest.mark.parametrize(
    ("published", "changes"),
    [
        (STABLELM, {"use_parallel_residual": True}),
        (STABLELM, {"qk_layernorm": True}),
        (STARCODER, {"hidden_act": "gelu"}),
        (TRINITY, {"route_norm": False}),
        (TRINITY, {"score_func": "softmax"}),
        (CLOVA, {"use_post_norm": False}),
        (CLOVA, {"auto_map": {"AutoModelForCausalLM": "other.HyperCLOVAXForScores"}}),
    ],
)
def test_what_is_not_done_is_refused(
    tmp_path: Path, published: dict[str, Any], changes: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{next(iter(changes))!r} is .*not supported"):
        read_published(tmp_path, published, **changes)
