"""What only LFM2 has in config.json and in its checkpoints.

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
from safetensors.torch import load_file, save_file
from tiers import PROMPTS
from transformers import AutoModelForCausalLM, Lfm2Config, Lfm2ForCausalLM

from nanoengine.config.model import ExpertsConfig, ModelConfig, ShortConvConfig
from nanoengine.errors import CorruptModelError, UnsupportedModelError
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.weight_shapes import weight_shapes

Tiny = Callable[[str], Path]
ATTENTION = [2, 5, 8, 10, 12, 14]
# As of LiquidAI/LFM2-1.2B in July 2025.
OLDER: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_use_swiglu": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "eos_token_id": 7,
    "full_attn_idxs": ATTENTION,
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 65536,
}
# The same as transformers 5 writes it.
NEWER: dict[str, Any] = {
    **{key: value for key, value in OLDER.items() if key[:6] != "block_" or key[6] in "afm"},
    "block_ff_dim": None,
    "dtype": "bfloat16",
    "full_attn_idxs": None,
    "intermediate_size": 12288,
    "layer_types": ["full_attention" if i in ATTENTION else "conv" for i in range(16)],
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "rope_theta": None,
    "tie_word_embeddings": True,
}
# As of LiquidAI/LFM2-8B-A1B, whose layers are fewer here.
WITH_EXPERTS: dict[str, Any] = {
    **{key: NEWER[key] for key in NEWER if not key.startswith(("block", "full", "tie"))},
    "architectures": ["Lfm2MoeForCausalLM"],
    "intermediate_size": 7168,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "moe_intermediate_size": 1792,
    "norm_topk_prob": True,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
}


def read(folder: Path, config: dict[str, Any], **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config | changes))
    return read_model_config(folder)


@pytest.mark.parametrize("config", [OLDER, NEWER], ids=["older", "newer"])
def test_a_published_config_in_both_spellings(tmp_path: Path, config: dict[str, Any]) -> None:
    found = read(tmp_path, config)
    layers = tuple(i for i in range(16) if i not in ATTENTION)
    assert found.recurrent == ShortConvConfig(layers, 2048, 3)
    assert (found.intermediate_size, found.rms_norm_eps, found.rope.theta) == (8192, 1e-5, 1e6)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (32, 8, 64)
    assert found.tie_word_embeddings and found.is_stored_in_16_bits
    assert found.max_position == 128000


@pytest.mark.parametrize(
    "changes",
    [
        {"block_ff_dim": 6656},
        {"block_ff_dim": 10240, "intermediate_size": 7},
        {"block_ffn_dim_multiplier": 1.3},
        {"block_auto_adjust_ff_dim": False, "block_ff_dim": 10752},
        {"tie_embedding": False},
        {"tie_embedding": True, "tie_word_embeddings": False},
    ],
    ids=str,
)
def test_sizes_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    found = read(tmp_path, OLDER, num_hidden_layers=3, **changes)
    small = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 9}
    theirs = Lfm2ForCausalLM(Lfm2Config(**OLDER | changes | small))
    assert found.intermediate_size == theirs.model.layers[0].feed_forward.w1.out_features
    assert found.tie_word_embeddings == theirs.config.tie_word_embeddings


def test_missing_keys_are_transformers_defaults(tmp_path: Path) -> None:
    """Of which none makes a layer a convolution."""
    found = read(tmp_path, {"architectures": ["Lfm2ForCausalLM"]})
    theirs = Lfm2Config()
    assert set(theirs.layer_types) == {"full_attention"} and found.recurrent is None
    assert (found.hidden_size, found.num_layers) == (theirs.hidden_size, theirs.num_hidden_layers)
    assert found.intermediate_size == 8192 and found.rope.theta == 1e6


def test_experts_behind_dense_layers(tmp_path: Path) -> None:
    found = read(tmp_path, WITH_EXPERTS)
    assert found.recurrent == ShortConvConfig((0, 1, 3), 2048, 3)
    shape = {"dense_layers": (0, 1), "scoring": "sigmoid", "least_sum": 1e-6}
    assert found.experts == ExpertsConfig(32, 4, 1792, True, has_choice_bias=True, **shape)
    assert found.intermediate_size == 7168  # it is not adjusted
    scaled = read(tmp_path, WITH_EXPERTS, routed_scaling_factor=2.5, norm_topk_prob=False)
    assert scaled.experts is not None
    assert (scaled.experts.scaling, scaled.experts.renormalises) == (2.5, False)


def test_a_choice_without_a_bias_needs_no_tensor(tmp_path: Path) -> None:
    found = read(tmp_path, WITH_EXPERTS, use_expert_bias=False)
    assert found.experts is not None and not found.experts.has_choice_bias
    assert not any("bias" in name for name in weight_shapes(found))


@pytest.mark.parametrize(
    ("changes", "error", "about"),
    [
        ({"layer_types": ["conv"] * 16}, UnsupportedModelError, "'layer_types'"),
        ({"layer_types": ["conv", "full_attention"]}, UnsupportedModelError, "for 16 layers"),
        ({"layer_types": ["mamba"] * 16}, UnsupportedModelError, "'full_attention' or 'conv'"),
        ({"full_attn_idxs": []}, UnsupportedModelError, "'full_attn_idxs'"),
        ({"full_attn_idxs": 3}, UnsupportedModelError, "'full_attn_idxs' 3"),
        ({"conv_L_cache": 1}, UnsupportedModelError, "'conv_L_cache' is 1; the least is 2"),
        ({"conv_L_cache": 1000}, CorruptModelError, "conv_L_cache"),
        ({"block_ffn_dim_multiplier": 1e20}, CorruptModelError, "block_auto_adjust_ff_dim"),
        ({"block_ff_dim": "large"}, CorruptModelError, "intermediate_size"),
        ({"sliding_window": 64}, UnsupportedModelError, "sliding_window"),
    ],
    ids=str,
)
def test_what_does_not_run_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], about: str
) -> None:
    with pytest.raises(error, match=about):
        read(tmp_path, OLDER, **changes)


def assert_transformers(checkpoint: Path, original: Path) -> None:
    driver = Driver(small_engine(checkpoint))
    outputs = driver.run(PROMPTS)
    assert_greedy(original, PROMPTS, outputs, len(outputs[0].outputs[0].token_ids))
    assert_logits_are_transformers(driver, original, outputs)


def test_one_tensor_for_all_experts_of_a_layer(tiny: Tiny, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny("lfm2-moe"))
    shutil.copytree(tiny("lfm2-moe"), tmp_path, dirs_exist_ok=True)
    model.save_pretrained(tmp_path, save_original_format=False)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.1.feed_forward.experts.gate_up_proj"].shape == (5, 48, 64)
    assert_transformers(tmp_path, tiny("lfm2-moe"))


def test_scores_that_are_small_are_divided_by_a_larger_sum(tiny: Tiny, tmp_path: Path) -> None:
    """By 1e-6 larger, which shows where all scores are about as small."""
    shutil.copytree(tiny("lfm2-moe"), tmp_path, dirs_exist_ok=True)
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.embed_tokens.weight"][:, 0] = 20.0  # the one input that reaches the router
    for name, tensor in stored.items():
        if name.endswith("ffn_norm.weight"):
            tensor[0] = 1.0
        if name.endswith("feed_forward.gate.weight"):
            tensor.zero_()[:, 0] = -2.0
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    assert_transformers(tmp_path, tmp_path)
