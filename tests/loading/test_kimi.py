"""What only Kimi Linear has in config.json and in its checkpoints.

Logits and ids in fp32, on every tier and on ranks are tested with the other architectures' (TINY).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver, assert_greedy, assert_logits_are_transformers, small_engine
from safetensors.torch import load_file, save_file
from tiers import PROMPTS
from transformers import KimiLinearConfig

from nanoengine.config.model import ExpertsConfig, LatentConfig, ModelConfig, RecurrentConfig
from nanoengine.errors import ModelLoadError
from nanoengine.loading.model_config import read_model_config

Tiny = Callable[[str], Path]
FULL = [4, 8, 12, 16, 20, 24, 27]
LINEAR = {
    "full_attn_layers": FULL,
    "head_dim": 128,
    "kda_layers": [i for i in range(1, 28) if i not in FULL],
    "num_heads": 32,
    "short_conv_kernel_size": 4,
}
# As of moonshotai/Kimi-Linear-48B-A3B-Instruct in 2025.
PUBLISHED: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_kimi.KimiLinearConfig",
        "AutoModel": "modeling_kimi.KimiLinearModel",
        "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM",
    },
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": LINEAR,
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def read(folder: Path, config: dict[str, Any], **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config | changes))
    return read_model_config(folder)


def test_the_published_config(tmp_path: Path) -> None:
    found = read(tmp_path, PUBLISHED)
    layers = tuple(i - 1 for i in LINEAR["kda_layers"])  # type: ignore[attr-defined]
    rule = RecurrentConfig(layers, 32, 32, 128, 128, 4, rule="kimi", has_short_vectors=True)
    assert found.recurrent == rule
    assert found.latent == LatentConfig(0, 512, 64, 128, 128, takes_turns=False)
    assert found.kv_layers == [i - 1 for i in FULL] and found.num_kv_heads == 1
    assert found.no_rope_layers == tuple(range(27))
    groups = {"num_groups": 1, "top_groups": 1, "group_best": 2, "has_choice_bias": True}
    assert found.experts == ExpertsConfig(
        256, 8, 1024, True, (0,), "sigmoid", 2.446, shared_size=1024, **groups
    )
    assert (found.rms_norm_eps, found.max_position, found.attention.scale) == (
        1e-5,
        1048576,
        192**-0.5,
    )


def test_values_that_are_not_those_of_missing_keys(tmp_path: Path) -> None:
    found = read(tmp_path, PUBLISHED, model_max_length=4096, moe_renormalize=False)
    assert found.max_position == 4096
    assert found.experts is not None and not found.experts.renormalises


def test_the_same_as_transformers_writes_it(tmp_path: Path) -> None:
    wanted = read(tmp_path, PUBLISHED)
    KimiLinearConfig(**PUBLISHED).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    changes = {"architectures": ["KimiLinearForCausalLM"], "linear_attn_config": None}
    assert read(tmp_path, written, **changes) == wanted


def test_missing_keys_are_transformers_defaults(tmp_path: Path) -> None:
    config = {key: PUBLISHED[key] for key in ("architectures", "hidden_size", "vocab_size")}
    sizes = {"num_hidden_layers": 9, "num_attention_heads": 32, "intermediate_size": 9216}
    found, theirs = read(tmp_path, config, **sizes), KimiLinearConfig(num_hidden_layers=9)
    kinds = ["full_attention"] * 9
    assert found.recurrent is not None and found.latent is not None and found.experts is not None
    for layer in found.recurrent.layers:
        kinds[layer] = "linear_attention"
    assert kinds == theirs.layer_types
    assert found.experts.dense_layers == (0,) and theirs.mlp_layer_types[1] == "sparse"
    rule = found.recurrent
    assert (rule.num_value_heads, rule.key_dim, rule.conv_size) == (
        theirs.linear_num_heads,
        theirs.linear_head_dim,
        theirs.linear_conv_kernel_dim,
    )
    assert (found.experts.count, found.experts.top_k, found.experts.scaling) == (256, 8, 2.446)
    assert (found.latent.kv_rank, found.latent.rope_dim) == (512, 64)


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"linear_attn_config": LINEAR | {"kda_layers": [1, 2]}}, "each of the 27 layers once"),
        ({"linear_attn_config": LINEAR | {"full_attn_layers": "4"}}, "each of the 27 layers once"),
        ({"linear_attn_config": [4]}, "'linear_attn_config' is"),
        ({"linear_attn_config": LINEAR | {"short_conv_kernel_size": 1}}, "the least is 2"),
        ({"linear_attn_config": LINEAR | {"head_dim": 4096}}, "linear_head_dim"),
        ({"layer_types": ["linear_attention"] * 27}, "'layer_types'"),
        ({"mla_use_nope": False}, "'mla_use_nope' is False"),
        ({"moe_router_activation_func": "softmax"}, "'moe_router_activation_func'"),
        ({"hidden_act": "situ"}, "'hidden_act' is 'situ'"),
        ({"auto_map": {"AutoModel": "modeling_k3.KimiModel"}}, "'auto_map'"),
    ],
    ids=str,
)
def test_what_does_not_run_is_refused(tmp_path: Path, changes: dict[str, Any], about: str) -> None:
    with pytest.raises(ModelLoadError, match=about):
        read(tmp_path, PUBLISHED, **changes)


def test_a_dense_layer_as_the_hub_has_it(tiny: Tiny, tmp_path: Path) -> None:
    """transformers saves it among the experts; rates of decay may have one dimension, too."""
    shutil.copytree(tiny("kimi-linear"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    dense = re.compile(r"block_sparse_moe(?=\.(gate|up|down)_proj)")
    renamed = {dense.sub("mlp", name): tensor for name, tensor in tensors.items()}
    assert len(renamed.keys() - tensors.keys()) == 3
    for name in [name for name in renamed if name.endswith("A_log")]:
        assert renamed[name].dim() == 4
        renamed[name] = renamed[name].flatten()
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    driver = Driver(small_engine(tmp_path))
    outputs = driver.run(PROMPTS)
    assert_greedy(tiny("kimi-linear"), PROMPTS, outputs, len(outputs[0].outputs[0].token_ids))
    assert_logits_are_transformers(driver, tiny("kimi-linear"), outputs)


def test_only_latent_rows_are_kv(tiny: Tiny) -> None:
    """Of one layer of three; the others have a state."""
    engine = small_engine(tiny("kimi-linear"))
    assert engine.kv.spec.block_bytes == 8 * (32 + 16) * 4
    (inputs, memory) = (torch.Size(shape).numel() for shape in ((3, 240), (4, 20, 20)))
    assert engine.plan.kv.state_bytes == 65 * 2 * 4 * (inputs + memory)  # one slot is for padding
    engine.close()
