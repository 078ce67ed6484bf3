"""What only North Mini Code and Command A+ have: their keys in config.json.

Logits and ids in fp32, on every tier and on ranks are tested with the other architectures' (TINY).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from published import bytes_in_bf16, read_published

from nanoengine.errors import UnsupportedModelError

SLIDING, FULL = "sliding_attention", "full_attention"
NORTH: dict[str, Any] = {  # the form of CohereLabs/North-Mini-Code-1.0
    "architectures": ["Cohere2MoeForCausalLM"],
    "expert_selection_fn": "sigmoid",
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 768,
    "layer_norm_eps": 1e-5,
    "layer_types": [FULL, *(SLIDING if i % 4 else FULL for i in range(1, 49))],
    "logit_scale": 1.0,
    "max_position_embeddings": 500000,
    "model_type": "cohere2_moe",
    "norm_topk_prob": False,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 49,
    "num_key_value_heads": 4,
    "num_shared_experts": 0,
    "prefix_dense_intermediate_size": 3072,
    "prefix_dense_sliding_window_pattern": 1,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_window": 4096,
    "use_qk_norm": False,
    "vocab_size": 262144,
}


def test_the_published_shape_has_the_published_size(tmp_path: Path) -> None:
    held = bytes_in_bf16(read_published(tmp_path, NORTH)).held
    assert round(held / 2**30, 1) == 56.8


def test_layers_that_see_all_keys_do_not_turn_but_for_dense_ones(tmp_path: Path) -> None:
    config = read_published(tmp_path, NORTH)
    assert config.no_rope_layers == (*range(4, 49, 4),)
    assert config.windows == tuple(4096 if i % 4 else None for i in range(49))
    config = read_published(tmp_path, NORTH, prefix_dense_sliding_window_pattern=2)
    assert config.no_rope_layers == (*range(0, 49, 4),)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("sigmoid", False, 1.0, 0, False)),
        ({"norm_topk_prob": True}, ("sigmoid", True, 1.0, 0, False)),
        ({"expert_selection_fn": "softmax"}, ("softmax", True, 1.0, 0, False)),
        ({"num_shared_experts": 4}, ("sigmoid", False, 0.5, 3072, True)),
        (
            {"num_shared_experts": 4, "shared_expert_combination_strategy": "sum"},
            ("sigmoid", False, 1.0, 3072, False),
        ),
    ],
    ids=str,
)
def test_how_experts_are_chosen_and_added(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    config = read_published(tmp_path, NORTH, **changes)
    found = config.experts
    assert found is not None and found.dense_layers == (0,) and found.inner_size == 768
    assert config.intermediate_size == 3072
    numbers = found.scoring, found.renormalises, found.scaling, found.shared_size
    assert (*numbers, found.averages_shared) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"expert_selection_fn": "relu"},
        {"layer_types": None},
        {"rms_norm_eps": None},  # LayerNorm
        {"shared_expert_combination_strategy": "max"},
        {"use_qk_norm": True},
    ],
    ids=str,
)
def test_other_arithmetic_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(changes))):
        read_published(tmp_path, NORTH, **changes)
