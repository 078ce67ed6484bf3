"""config.json of EXAONE 3, Ling 2.0 and Sarvam as publishers wrote it, before transformers had
these models and other names for some keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoengine.config.model import ModelConfig
from nanoengine.errors import UnsupportedModelError
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.weight_shapes import weight_shapes

Tiny = Callable[[str], Path]
EXAONE = {
    "hidden_act": "activation_function",
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
}
LING = {
    "attention_bias": "use_qkv_bias",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
}
EXAONE_3_5: dict[str, Any] = {
    "architectures": ["ExaoneForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_exaone.ExaoneConfig",
        "AutoModelForCausalLM": "modeling_exaone.ExaoneForCausalLM",
    },
    "activation_function": "silu",
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 32768,
    "model_type": "exaone",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_layers": 32,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "vocab_size": 102400,
}
LING_MINI: dict[str, Any] = {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_bailing_moe_v2.BailingMoeV2Config",
        "AutoModelForCausalLM": "modeling_bailing_moe_v2.BailingMoeV2ForCausalLM",
    },
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "max_position_embeddings": 32768,
    "model_type": "bailing_moe",
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 512,
    "n_group": 8,
    "norm_head": False,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 20,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 600000,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "vocab_size": 157184,
}


def read(folder: Path, content: dict[str, Any], **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(content | changes))
    return read_model_config(folder)


def billions(config: ModelConfig) -> float:
    return sum(map(math.prod, weight_shapes(config).values())) / 1e9


@pytest.mark.parametrize(
    ("name", "spelled"),
    [("exaone", EXAONE), ("ling-2", LING), ("sarvam", LING), ("sarvam-latent", LING)],
)
def test_keys_of_the_publishers_are_read(
    tiny: Tiny, tmp_path: Path, name: str, spelled: dict[str, str]
) -> None:
    content = json.loads((tiny(name) / "config.json").read_text())
    theirs = {spelled.get(key, key): value for key, value in content.items()}
    assert set(theirs) & {*spelled.values()} and not set(theirs) & {*spelled}
    ours = replace(read_model_config(tiny(name)), eos_token_ids=())
    assert replace(read(tmp_path, theirs), eos_token_ids=()) == ours


def test_yarn_by_the_name_that_sarvam_gave_it(tiny: Tiny, tmp_path: Path) -> None:
    content = json.loads((tiny("sarvam-latent") / "config.json").read_text())
    ours = read_model_config(tiny("sarvam-latent"))
    scaling = content.pop("rope_parameters")
    theta = scaling.pop("rope_theta")
    del scaling["rope_type"]
    old = {"rope_scaling": scaling | {"type": "deepseek_yarn"}, "rope_theta": theta}
    assert read(tmp_path, content | old).rope == ours.rope


def test_exaone_as_it_was_published(tmp_path: Path) -> None:
    config = read(tmp_path, EXAONE_3_5)
    assert (config.num_layers, config.rms_norm_eps, config.max_position) == (32, 1e-5, 32768)
    assert (config.rope.kind, config.rope.theta, config.rope.factor) == ("llama3", 1e6, 8.0)
    assert billions(config) == pytest.approx(7.818, abs=1e-3)


def test_ling_mini_as_it_was_published(tmp_path: Path) -> None:
    config = read(tmp_path, LING_MINI)
    assert config.experts is not None and config.experts.dense_layers == (0,)
    experts = config.experts
    assert (experts.count, experts.top_k, experts.num_groups, experts.top_groups) == (256, 8, 8, 4)
    assert (experts.scaling, experts.shared_size, config.rope.partial_rotary_factor) == (
        *(2.5, 512, 0.5),
    )
    assert billions(config) == pytest.approx(16.26, abs=0.01)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"n_group": None}, "'n_group' is None, which is not supported"),
        ({"score_function": "softmax"}, "'score_function' is 'softmax'"),
        ({"moe_shared_expert_intermediate_size": 1024}, "must be as 'moe_intermediate_size', 512"),
        ({"use_bias": True}, "'use_bias' is True"),
    ],
)
def test_another_ling_is_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedModelError, match=text):
        read(tmp_path, LING_MINI, **changes)
