"""What only Ling 3.0 has in config.json and in its checkpoints.

Logits and ids in fp32, on every tier and on ranks are tested with the other architectures' (TINY).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference
from driver import Driver, small_engine
from gguf_model import GGUFModel, keys_and_values_apart
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.bailing_hybrid import BailingHybridConfig
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridRMSNorm

from nanoengine.config.model import ExpertsConfig, LatentConfig, ModelConfig, RecurrentConfig
from nanoengine.errors import ModelLoadError
from nanoengine.loading.gguf.convert import read_gguf_config
from nanoengine.loading.model_config import read_model_config

Tiny = Callable[[str], Path]
FULL = (3, 7, 11, 15, 19, 23)
# As of inclusionAI/Ling-3.0-tiny in 2026.
PUBLISHED: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_bailing_moe_v3.BailingMoeV3Config",
        "AutoModel": "modeling_bailing_moe_v3.BailingMoeV3Model",
        "AutoModelForCausalLM": "modeling_bailing_moe_v3.BailingMoeV3ForCausalLM",
    },
    "dtype": "bfloat16",
    "eos_token_id": 156895,
    "first_k_dense_replace": 1,
    "gated_attention_proj_granularity_type": "head_wise",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 4608,
    "kda_lower_bound": -5,
    "kda_safe_gate": True,
    "kv_lora_rank": 512,
    "layer_group_size": 4,
    "linear_attention": "kda",
    "max_position_embeddings": 131072,
    "model_type": "bailing_hybrid",
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 512,
    "n_group": 4,
    "no_kda_lora": True,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 256,
    "qk_head_dim": 192,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_theta": 6000000,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "short_conv_kernel_size": 4,
    "tie_word_embeddings": False,
    "topk_group": 2,
    "use_qkv_bias": False,
    "v_head_dim": 128,
    "vocab_size": 157184,
}


def read(folder: Path, config: dict[str, Any], **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config | changes))
    return read_model_config(folder)


def test_the_published_config(tmp_path: Path) -> None:
    found = read(tmp_path, PUBLISHED)
    layers = tuple(i for i in range(24) if i not in FULL)
    assert found.recurrent == RecurrentConfig(
        layers, 16, 16, 128, 128, 4, rule="kimi", least_rate=-5.0
    )
    assert found.latent == LatentConfig(256, 512, 64, 128, 128, takes_turns=True)
    assert found.kv_layers == [*FULL] and found.num_kv_heads == 1
    assert (found.rope.theta, found.rope.num_dims, found.no_rope_layers) == (6e6, 64, ())
    groups = {"num_groups": 4, "top_groups": 2, "group_best": 2, "has_choice_bias": True}
    assert found.experts == ExpertsConfig(
        128, 8, 512, True, (0,), "sigmoid", 2.5, shared_size=512, **groups
    )
    assert (found.max_position, found.attention.scale) == (131072, 192**-0.5)


def test_what_turns_is_no_part_of_a_head(tmp_path: Path) -> None:
    """The published model's factor is of another head size."""
    rope = {"rope_type": "default", "rope_theta": 6e6, "partial_rotary_factor": 0.5}
    assert read(tmp_path, PUBLISHED, rope_parameters=rope) == read(tmp_path, PUBLISHED)


def test_missing_keys_are_transformers_defaults(tmp_path: Path) -> None:
    theirs = BailingHybridConfig()
    keys = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    named = {key: getattr(theirs, key) for key in (*keys, "intermediate_size")}
    found = read(tmp_path, {"architectures": ["BailingHybridForCausalLM"]}, **named)
    theirs.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["head_dim"], written["linear_head_dim"]) == (64, 128)
    assert found.recurrent is not None and found.recurrent.layers[:6] == (0, 1, 2, 3, 4, 6)
    assert found.experts is not None and found.experts.dense_layers == (0, 1)
    assert (found.recurrent.key_dim, found.recurrent.least_rate) == (128, theirs.kda_lower_bound)
    changes = {"architectures": ["BailingHybridForCausalLM"]}
    whole = read(tmp_path, written, **changes)
    assert found == ModelConfig(**{**_fields(whole), "eos_token_ids": found.eos_token_ids})


def _fields(config: ModelConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"layer_group_size": 5}, "'layer_group_size' is 5; it must divide the 24 layers"),
        ({"kda_lower_bound": 5}, "'-kda_lower_bound' is -5, not a positive number"),
        ({"kda_lower_bound": None}, "'-kda_lower_bound' is None"),
        ({"moe_shared_expert_intermediate_size": 1024}, "must be as 'moe_intermediate_size', 512"),
        ({"expert_swiglu_limit_list": [0, 7.0]}, "'expert_swiglu_limit_list'"),
        ({"share_expert_swiglu_limit_list": [7.0]}, "'share_expert_swiglu_limit_list'"),
        ({"no_kda_lora": False}, "'no_kda_lora' is False"),
        ({"use_mla_nope": True}, "'use_mla_nope' is True"),
        ({"score_function": "softmax"}, "'score_function'"),
        ({"gated_attention_proj_granularity_type": "elementwise"}, "'gated_attention"),
        ({"auto_map": {"AutoModel": "modeling_ling4.LingModel"}}, "'auto_map'"),
        ({"short_conv_kernel_size": 1}, "the least is 2"),
    ],
    ids=str,
)
def test_what_does_not_run_is_refused(tmp_path: Path, changes: dict[str, Any], about: str) -> None:
    with pytest.raises(ModelLoadError, match=about):
        read(tmp_path, PUBLISHED, **changes)


def test_limits_of_nothing_are_none(tmp_path: Path) -> None:
    zeros = {"expert_swiglu_limit_list": [0] * 24, "share_expert_swiglu_limit_list": None}
    assert read(tmp_path, PUBLISHED, **zeros) == read(tmp_path, PUBLISHED)


def test_queries_of_a_short_vector(tiny: Tiny, tmp_path: Path) -> None:
    """As of the published models: transformers' class, with the two products in place of one."""
    source, rank = tiny("ling"), 24
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    attention, generator = model.model.layers[1].self_attn, torch.Generator().manual_seed(5)
    whole = attention.q_proj
    parts = nn.Linear(64, rank, bias=False), nn.Linear(rank, whole.out_features, bias=False)
    norm = BailingHybridRMSNorm(rank, 1e-6)
    for weight in (*(part.weight for part in parts), norm.weight):
        weight.data.normal_(float(weight.dim() == 1), 0.2, generator=generator)
    attention.q_proj = nn.Sequential(parts[0], norm, parts[1])
    tensors, prefix = load_file(source / "model.safetensors"), "model.layers.1.attention."
    del tensors[f"{prefix}q_proj.weight"]
    for name, part in {"q_a_proj": parts[0], "q_a_layernorm": norm, "q_b_proj": parts[1]}.items():
        tensors[f"{prefix}{name}.weight"] = part.weight.data
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"q_lora_rank": rank}))
    driver, prompt = Driver(small_engine(tmp_path)), [7 * i % 256 for i in range(40)]
    (output,) = driver.run([prompt])
    driver.engine.close()
    text = torch.tensor([prompt + output.outputs[0].token_ids])
    with torch.inference_mode():
        right = model(text).logits[0, len(prompt) - 1 : -1]
        other = reference(source)(text).logits[0, len(prompt) - 1 : -1]
    ours = torch.stack(driver.logits[output.request_id])
    torch.testing.assert_close(ours, right, atol=1e-4, rtol=0)
    assert not torch.allclose(right, other, atol=1e-2)


@pytest.mark.parametrize("name", ["ling", "ling-unbounded"])
def test_rates_that_are_far_from_zero(tiny: Tiny, tmp_path: Path, name: str) -> None:
    """Decays of 1 and of the bound, where e^x has no number."""
    tensors = load_file(tiny(name) / "model.safetensors")
    for key in [key for key in tensors if key.endswith("dt_bias")]:
        tensors[key] = torch.tensor([-300.0, 300.0]).repeat(tensors[key].numel() // 2)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((tiny(name) / "config.json").read_text())
    driver = Driver(small_engine(tmp_path))
    prompt = [5 * i % 256 for i in range(40)]
    (output,) = driver.run([prompt])
    driver.engine.close()
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    text = torch.tensor([prompt + output.outputs[0].token_ids])
    with torch.inference_mode():
        right = model(text).logits[0, len(prompt) - 1 : -1]
    ours = torch.stack(driver.logits[output.request_id])
    assert math.isfinite(float(ours.sum()))
    torch.testing.assert_close(ours, right, atol=1e-4, rtol=0)


def test_only_latent_rows_are_kv(tiny: Tiny) -> None:
    """Of one layer of three; the others have a state."""
    engine = small_engine(tiny("ling"))
    assert engine.kv.spec.block_bytes == 8 * (32 + 16) * 4
    engine.close()


@pytest.mark.parametrize(
    ("settings", "about"),
    [
        ({"kda.safe_gate": False}, "'bailingmoe3.kda.safe_gate' is false"),
        ({"swiglu_clamp_exp": [0.0, 7.0, 0.0]}, "'expert_swiglu_limit_list'"),
        ({"kda.gate_lower_bound": 5.0}, "'-kda_lower_bound' is -5.0"),
    ],
    ids=str,
)
def test_a_file_that_does_not_run_is_refused(
    tiny: Tiny, tmp_path: Path, settings: dict[str, Any], about: str
) -> None:
    model = GGUFModel(tiny("ling"))
    keys_and_values_apart(model)
    model.settings |= {f"bailingmoe3.{key}": value for key, value in settings.items()}
    with pytest.raises(ModelLoadError, match=about):
        read(tmp_path, read_gguf_config(model.write(tmp_path / "model.gguf")))
