"""What only Hunyuan has: norms of q and k after the rotation, whose theta grows by alpha.

Logits and ids in fp32, on every tier, are tested with the other architectures' (TINY).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference, reference_greedy
from driver import GREEDY, Driver, small_engine
from transformers import HunYuanDenseV1Config
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import (
    HunYuanDenseV1RotaryEmbedding,
)

from nanoengine.config.model import ModelConfig
from nanoengine.errors import CorruptModelError, UnsupportedModelError
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.rope import inverse_frequencies


@pytest.mark.parametrize("draft", ["ngram:3", "resident:2"])
def test_guesses_change_no_token(tiny: Callable[[str], Path], draft: str) -> None:
    path, prompt = tiny("hunyuan"), [*range(5, 15)] * 4
    output = Driver(small_engine(path, speculative=draft)).run([prompt])[0]
    tokens = output.outputs[0].token_ids
    assert tokens == reference_greedy(reference(path), prompt, GREEDY.max_tokens or 0, tokens)


# -- config.json

PUBLISHED: dict[str, Any] = {  # the form of tencent/Hunyuan-7B-Instruct
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "mlp_bias": False,
    "model_type": "hunyuan_v1_dense",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "alpha": 1000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "type": "dynamic",
    },
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_cla": False,
    "use_qk_norm": True,
    "vocab_size": 128256,
}


def read(folder: Path, max_model_len: int | None = None, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(PUBLISHED | changes))
    return read_model_config(folder, max_model_len)


@pytest.mark.parametrize("alpha", [1000.0, 50.0, 0.0, None])
def test_theta_grows_by_alpha(tmp_path: Path, alpha: float | None) -> None:
    scaling = {"alpha": alpha, "factor": 2.0, "type": "dynamic"}
    config = read(tmp_path, rope_scaling=scaling)
    theirs = HunYuanDenseV1RotaryEmbedding(HunYuanDenseV1Config.from_pretrained(tmp_path)).inv_freq
    torch.testing.assert_close(inverse_frequencies(config.rope, 128), theirs)
    assert config.rope.kind == ("default" if alpha else "dynamic")


def test_alpha_does_not_depend_on_the_length(tmp_path: Path) -> None:
    usual, longer = read(tmp_path), read(tmp_path, 262144)
    assert (usual.max_position, longer.max_position) == (32768, 262144)
    assert usual.rope == longer.rope


@pytest.mark.parametrize("alpha", [-1.0, "a", True])
def test_impossible_alphas_are_refused(tmp_path: Path, alpha: Any) -> None:
    with pytest.raises(CorruptModelError, match="alpha"):
        read(tmp_path, rope_scaling={"alpha": alpha, "factor": 1.0, "type": "dynamic"})


@pytest.mark.parametrize("changes", [{"use_cla": True}, {"use_qk_norm": False}])
def test_other_arithmetic_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(changes))):
        read(tmp_path, **changes)


WITH_EXPERTS: dict[str, Any] = {  # the form of tencent/Hunyuan-A13B-Instruct
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "intermediate_size": 3072,
    "model_type": "hunyuan_v1_moe",
    "moe_intermediate_size": [3072] * 32,
    "moe_layer_num_skipped": 0,
    "moe_topk": [8] * 32,
    "norm_topk_prob": True,
    "num_experts": 64,
    "num_shared_expert": [1] * 32,
    "use_mixed_mlp_moe": True,
}


def test_experts_are_those_of_config_json(tmp_path: Path) -> None:
    experts = read(tmp_path, **WITH_EXPERTS).experts
    assert experts is not None and experts.renormalises
    assert (experts.count, experts.top_k, experts.inner_size) == (64, 8, 3072)
    assert (experts.shared_size, experts.dense_layers) == (3072, ())


@pytest.mark.parametrize("key", ["moe_topk", "num_experts", "num_shared_expert"])
def test_layers_that_differ_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{key}' differs between layers"):
        read(tmp_path, **WITH_EXPERTS | {key: [1, *[2] * 31]})


@pytest.mark.parametrize("value", [[], ["8"] * 32, [0] * 32, "8"])
def test_impossible_numbers_of_experts_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CorruptModelError, match="moe_topk"):
        read(tmp_path, **WITH_EXPERTS | {"moe_topk": value})
