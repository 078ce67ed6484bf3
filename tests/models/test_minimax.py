"""config.json of MiniMax-M2 and dots.llm1, and what only their experts have.

Logits and ids in fp32, on every tier and on ranks are tested with the other architectures' (TINY).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver, assert_greedy, assert_logits_are_transformers, small_engine
from published import bytes_in_bf16, read_published
from safetensors.torch import load_file
from tiers import PROMPTS
from transformers import AutoModelForCausalLM, Dots1Config, MiniMaxM2Config
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2RotaryEmbedding

from nanoengine.config.model import ModelConfig
from nanoengine.errors import CorruptModelError, UnsupportedModelError
from nanoengine.models.rope import inverse_frequencies, rotary_pairs

PUBLISHED: dict[str, Any] = {  # the form of MiniMaxAI/MiniMax-M2
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "auto_map": {"AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM"},
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "model_type": "minimax_m2",
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
DOTS: dict[str, Any] = {  # the form of rednote-hilab/dots.llm1.inst
    "architectures": ["Dots1ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 32768,
    "max_window_layers": 62,
    "model_type": "dots1",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 62,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "noaux_tc",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "vocab_size": 152064,
}


def read(folder: Path, published: dict[str, Any] = PUBLISHED, **changes: Any) -> ModelConfig:
    return read_published(folder, published, **changes)


@pytest.mark.parametrize(
    ("published", "billions"),
    [(PUBLISHED, (228.7, 11.0)), (DOTS, (142.8, 14.0))],
    ids=["MiniMax-M2", "dots.llm1"],
)
def test_the_published_shape_has_the_published_size(
    tmp_path: Path, published: dict[str, Any], billions: tuple[float, float]
) -> None:
    """In all, and of those the ones for a token."""
    found = bytes_in_bf16(read(tmp_path, published))
    assert (round(found.held / 2e9, 1), round(found.active / 2e9, 1)) == billions


@pytest.mark.parametrize("old", [True, False], ids=["rotary_dim", "rope_parameters"])
@pytest.mark.parametrize("dim", [64, 40, 128])
def test_a_part_of_a_head_rotates(tmp_path: Path, dim: int, old: bool) -> None:
    new = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": dim / 128}
    left = {"rotary_dim": "left out", "rope_theta": "left out", "rope_parameters": new}
    rope = read(tmp_path, **({"rotary_dim": dim} if old else left)).rope
    theirs = MiniMaxM2RotaryEmbedding(MiniMaxM2Config.from_pretrained(tmp_path)).inv_freq
    assert rotary_pairs(rope, 128) == dim // 2
    torch.testing.assert_close(inverse_frequencies(rope, dim), theirs)


def test_without_a_part_all_of_a_head_rotates(tmp_path: Path) -> None:
    assert rotary_pairs(read(tmp_path, rotary_dim="left out").rope, 128) == 64


def test_a_part_that_is_larger_than_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptModelError, match="rotates 256 of 128"):
        read(tmp_path, rotary_dim=256)


@pytest.mark.parametrize(
    ("published", "changes"),
    [
        (PUBLISHED, {"use_qk_norm": False}),
        (PUBLISHED, {"qk_norm_type": "per_head"}),
        (PUBLISHED, {"use_routing_bias": False}),
        (PUBLISHED, {"shared_intermediate_size": 512}),
        (PUBLISHED, {"scoring_func": "softmax"}),
        (PUBLISHED, {"attention_bias": True}),
        (PUBLISHED, {"auto_map": {"AutoModelForCausalLM": "modeling_other.Other"}}),
        (DOTS, {"scoring_func": "softmax"}),
        (DOTS, {"topk_method": "greedy"}),
        (DOTS, {"hidden_act": "gelu"}),
    ],
    ids=str,
)
def test_other_arithmetic_is_refused(
    tmp_path: Path, published: dict[str, Any], changes: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(changes))):
        read(tmp_path, published, **changes)


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 64, "max_window_layers": 3}], ids=str)
def test_windows_of_dots_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = read(tmp_path, DOTS, **changes)
    kinds = Dots1Config.from_pretrained(tmp_path).layer_types
    windows = config.windows or (None,) * 62
    assert [window == 64 for window in windows] == [kind != "full_attention" for kind in kinds]


def test_experts_of_dots_are_those_of_config_json(tmp_path: Path) -> None:
    experts = read(tmp_path, DOTS).experts
    assert experts is not None and experts.renormalises and experts.scoring == "sigmoid"
    assert (experts.count, experts.top_k, experts.inner_size) == (128, 6, 1408)
    assert (experts.shared_size, experts.dense_layers, experts.scaling) == (2816, (0,), 2.5)


def test_one_tensor_for_all_experts_of_a_layer(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """As transformers 5 names them in memory."""
    model = AutoModelForCausalLM.from_pretrained(tiny("minimax-m2"))
    shutil.copytree(tiny("minimax-m2"), tmp_path, dirs_exist_ok=True)
    model.save_pretrained(tmp_path, save_original_format=False)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.1.mlp.experts.gate_up_proj"].shape == (6, 80, 64)
    assert "model.layers.1.mlp.e_score_correction_bias" in stored
    driver = Driver(small_engine(tmp_path))
    outputs = driver.run(PROMPTS)
    assert_greedy(tiny("minimax-m2"), PROMPTS, outputs, len(outputs[0].outputs[0].token_ids))
    assert_logits_are_transformers(driver, tiny("minimax-m2"), outputs)
