"""What only Laguna has: query heads that differ from layer to layer, and their softplus gates.

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
from gguf_model import GGUFModel
from safetensors.torch import load_file
from tiers import PROMPTS
from transformers import AutoModelForCausalLM, LagunaConfig

from nanoengine.config.model import ModelConfig
from nanoengine.errors import ConfigError, CorruptModelError, UnsupportedModelError
from nanoengine.loading.gguf.convert import read_gguf_config
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.shard import Shard
from nanoengine.models.weight_shapes import weight_shapes

WINDOWS = ["full_attention", *["sliding_attention"] * 3]
COUNTS = [48, 64, 64, 64]
FOUR = {"num_hidden_layers": 4, "num_attention_heads_per_layer": COUNTS, "layer_types": WINDOWS}


def read(folder: Path, **changes: Any) -> ModelConfig:
    """A config.json with the least that it must have, and changes."""
    settings = {"architectures": ["LagunaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(settings | changes))
    return read_model_config(folder)


def test_missing_keys_are_transformers_defaults(tmp_path: Path) -> None:
    theirs, found = LagunaConfig(), read(tmp_path)
    for key in ("vocab_size", "hidden_size", "intermediate_size", "head_dim"):
        assert getattr(found, key) == getattr(theirs, key)
    assert found.num_layers == theirs.num_hidden_layers and found.windows == ()
    heads = theirs.num_attention_heads, theirs.num_key_value_heads
    assert (found.num_heads, found.num_kv_heads) == heads and found.shapes == ()
    assert found.max_position == theirs.max_position_embeddings
    assert found.rms_norm_eps == theirs.rms_norm_eps and not found.tie_word_embeddings
    for kind, rope in (("full", found.rope), ("sliding", found.local_rope)):
        assert rope is not None
        its = theirs.rope_parameters[f"{kind}_attention"]
        assert (rope.kind, rope.theta) == (its["rope_type"], its["rope_theta"])
        assert rope.partial_rotary_factor == its["partial_rotary_factor"]
    experts = found.experts
    assert experts is not None and experts.dense_layers == (0,)
    assert theirs.mlp_layer_types == ["dense", *["sparse"] * (theirs.num_hidden_layers - 1)]
    assert (experts.count, experts.top_k) == (theirs.num_experts, theirs.num_experts_per_tok)
    sizes = theirs.moe_intermediate_size, theirs.shared_expert_intermediate_size
    assert (experts.inner_size, experts.shared_size) == sizes
    assert experts.scaling == theirs.moe_routed_scaling_factor and experts.renormalises


# What the config.json of Laguna XS.2 has at the hub, and transformers' class does not.
HUB = {
    "auto_map": {
        "AutoConfig": "configuration_laguna.LagunaConfig",
        "AutoModelForCausalLM": "modeling_laguna.LagunaForCausalLM",
    },
    "gating": True,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_slow": 1.0,
            "beta_fast": 64.0,
            "attention_factor": 1.0,
            "partial_rotary_factor": 0.5,
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
        },
        "original_max_position_embeddings": 4096,
    },
}


def test_the_keys_at_the_hub(tmp_path: Path) -> None:
    found, local = (config := read(tmp_path, **FOUR | HUB)).rope, config.local_rope
    assert (found.kind, found.theta, found.factor, found.beta_fast) == ("yarn", 5e5, 32.0, 64.0)
    assert (found.original_max_position, found.attention_factor) == (4096, 1.0)
    assert found.partial_rotary_factor == 0.5 and config.max_position == 131072
    assert local is not None and (local.kind, local.partial_rotary_factor) == ("default", 1.0)
    assert config.experts is not None and config.experts.dense_layers == (0,)


def test_each_layer_has_heads_of_its_own(tmp_path: Path) -> None:
    found = read(tmp_path, **FOUR)
    assert [found.shape(layer).num_heads for layer in range(4)] == COUNTS
    assert {found.shape(layer).kv_heads for layer in range(4)} == {(8, 128)}
    shapes = weight_shapes(found)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (48 * 128, 2048)
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (64 * 128, 2048)
    assert shapes["model.layers.1.self_attn.o_proj.weight"] == (2048, 64 * 128)
    assert shapes["model.layers.1.self_attn.g_proj.weight"] == (64, 2048)


def test_ranks_divide_the_heads_of_every_layer(tmp_path: Path) -> None:
    found = read(tmp_path, **FOUR)
    mine = Shard(1, 16).config(found)
    assert [mine.shape(layer).num_heads for layer in range(4)] == [3, 4, 4, 4]
    gate = "model.layers.{}.self_attn.g_proj.weight"
    assert Shard(1, 16).rows(gate.format(0), found) == (range(3, 6),)
    assert Shard(1, 16).rows(gate.format(1), found) == (range(4, 8),)
    with pytest.raises(
        ConfigError, match="48 or 64 heads and 8 KV heads; it can be 1, 2, 4, 8, 16"
    ):
        Shard(0, 32).check(found)


@pytest.mark.parametrize(
    ("changes", "error", "about"),
    [
        ({"num_attention_heads_per_layer": COUNTS[:3]}, CorruptModelError, "each of 4 layers"),
        ({"num_attention_heads_per_layer": 48}, CorruptModelError, "each of 4 layers, not 48"),
        (
            {"num_attention_heads_per_layer": [48, 64, 0, 64]},
            CorruptModelError,
            "'num_attention_heads_per_layer.2' is 0",
        ),
        (
            {"num_attention_heads_per_layer": [48, 64, 60, 64]},
            UnsupportedModelError,
            "60 heads, 8 KV heads",
        ),
        ({"gating": "per-element"}, UnsupportedModelError, "'gating' is 'per-element'"),
        ({"gating": False}, UnsupportedModelError, "'gating' is False"),
        ({"attention_bias": True}, UnsupportedModelError, "'attention_bias' is True"),
        (
            {"moe_router_logit_softcapping": 30.0},
            UnsupportedModelError,
            "'moe_router_logit_softcapping' is 30.0",
        ),
        (
            {"moe_apply_router_weight_on_input": True},
            UnsupportedModelError,
            "'moe_apply_router_weight_on_input' is True",
        ),
        (
            {"swa_attention_sink_enabled": True},
            UnsupportedModelError,
            "'swa_attention_sink_enabled' is True",
        ),
        ({"norm_topk_prob": False}, UnsupportedModelError, "'norm_topk_prob' is False"),
        (
            {"rope_parameters": {"full_attention": {}, "another": {}}},
            UnsupportedModelError,
            "must hold those of 'full_attention'",
        ),
        ({"layer_types": WINDOWS[:3]}, UnsupportedModelError, "for 4 layers"),
    ],
    ids=str,
)
def test_what_does_not_run_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], about: str
) -> None:
    with pytest.raises(error, match=about):
        read(tmp_path, **FOUR | changes)


@pytest.mark.breadth
def test_experts_have_two_names(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Of the shared one and of the router's bias: at the hub, and in transformers 5."""
    folder = tiny("laguna")
    at_hub = ("shared_expert.up_proj.weight", "experts.e_score_correction_bias")
    in_5 = ("shared_experts.up_proj.weight", "gate.e_score_correction_bias")
    stored = load_file(folder / "model.safetensors")
    assert all(f"model.layers.1.mlp.{name}" in stored for name in at_hub)
    model = AutoModelForCausalLM.from_pretrained(folder)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    model.save_pretrained(tmp_path, save_original_format=False)
    stored = load_file(tmp_path / "model.safetensors")
    assert all(f"model.layers.1.mlp.{name}" in stored for name in in_5)
    driver = Driver(small_engine(tmp_path))
    outputs = driver.run(PROMPTS)
    assert_greedy(folder, PROMPTS, outputs, len(outputs[0].outputs[0].token_ids))
    assert_logits_are_transformers(driver, folder, outputs)


def test_a_gguf_says_which_layers_have_a_window(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """Older files do not: there every fourth layer sees all keys, the first among them."""
    model = GGUFModel(tiny("laguna-dense"))
    found = read_gguf_config(model.write(tmp_path / "older.gguf"))
    assert found["layer_types"] == WINDOWS[:3]
    model.settings["laguna.attention.sliding_window_pattern"] = [True, False, True]
    found = read_gguf_config(model.write(tmp_path / "newer.gguf"))
    assert found["layer_types"] == [WINDOWS[1], WINDOWS[0], WINDOWS[1]]


@pytest.mark.parametrize(
    ("changes", "error", "about"),
    [
        ({"expert_gating_func": 1}, UnsupportedModelError, "'laguna.expert_gating_func' is 1"),
        ({"attention.head_count": [4, 8]}, CorruptModelError, "one for each of 3 layers"),
        ({"attention.head_count": [4, 0, 8]}, CorruptModelError, "'laguna.attention.head_count'"),
        (
            {"attention.head_count": 2},
            UnsupportedModelError,
            "has 4 rows for 2 heads; a gate",
        ),
        ({"rope.scaling.yarn_ext_factor": 1.0}, UnsupportedModelError, "yarn_ext_factor"),
    ],
    ids=str,
)
def test_what_a_gguf_may_not_say(
    tiny: Callable[[str], Path],
    tmp_path: Path,
    changes: dict[str, Any],
    error: type[Exception],
    about: str,
) -> None:
    model = GGUFModel(tiny("laguna"))
    model.settings |= {f"laguna.{key}": value for key, value in changes.items()}
    with pytest.raises(error, match=about):
        read_gguf_config(model.write(tmp_path / "model.gguf"))
