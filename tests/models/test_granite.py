"""What only Granite has: factors of embeddings, scores, sums and logits; Granite 4's config.json.

Logits and ids in fp32, on every tier, are tested with the other architectures' (TINY).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import reference, reference_greedy
from driver import GREEDY, Driver, assert_greedy, small_engine
from marks import needs_compiler
from tiny_model import COMMON
from tiny_models import TINY

from nanoengine.config.model import ExpertsConfig, Factors, RecurrentConfig
from nanoengine.errors import ConfigError, CorruptModelError, UnsupportedModelError
from nanoengine.kernels import cpu_ops
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.shard import Shard


@needs_compiler
@pytest.mark.usefixtures("our_products")
def test_sums_stay_fused_with_products(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    fused = cpu_ops.PackedAfterAttention
    monkeypatch.setattr(
        cpu_ops, "PackedAfterAttention", lambda *parts: made.append(parts) or fused(*parts)
    )
    small_engine(tiny("granite")).close()
    assert len(made) == COMMON["num_hidden_layers"]


@pytest.mark.parametrize("draft", ["ngram:3", "resident:2"])
def test_guesses_change_no_token(tiny: Callable[[str], Path], draft: str) -> None:
    path, prompt = tiny("granite"), [*range(5, 15)] * 4
    output = Driver(small_engine(path, speculative=draft)).run([prompt])[0]
    tokens = output.outputs[0].token_ids
    assert tokens == reference_greedy(reference(path), prompt, GREEDY.max_tokens or 0, tokens)


# -- config.json

PUBLISHED: dict[str, Any] = {  # of ibm-granite/granite-3.3-8b-instruct
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "logits_scaling": 16.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49159,
}
FACTORS = [name for name in PUBLISHED if name.endswith(("multiplier", "logits_scaling"))]


def read(folder: Path, **changes: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(PUBLISHED | changes))
    return read_model_config(folder)


def test_factors_are_those_of_config_json(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.attention.score_scale == 0.0078125
    assert (config.factors, config.rope.theta) == (Factors(12.0, 0.22, 16.0), 1e7)


def test_factors_that_are_left_out_are_one(tmp_path: Path) -> None:
    config = read(tmp_path, **dict.fromkeys(FACTORS))
    assert config.attention.score_scale == 1.0
    assert config.factors == Factors(1.0, 1.0, 1.0)


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("value", [0, -0.2, 1e-200, 1e20, "a", True])
def test_impossible_factors_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(CorruptModelError, match=name):
        read(tmp_path, **{name: value})


# As of ibm-granite/granite-4.0-h-tiny, whose layers are fewer here.
HYBRID: dict[str, Any] = PUBLISHED | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "hidden_size": 1536,
    "intermediate_size": 512,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "position_embedding_type": "nope",
    "shared_intermediate_size": 1024,
}


@pytest.mark.parametrize("head_dim", [64, "auto"])
def test_layers_are_mamba_or_attention_each_with_a_feed_forward(
    tmp_path: Path, head_dim: Any
) -> None:
    config = read(tmp_path, **HYBRID | {"mamba_d_head": head_dim})
    assert config.recurrent == RecurrentConfig((0, 1, 3), 1, 48, 128, 64, 4, rule="mamba")
    assert config.experts == ExpertsConfig(64, 6, 512, True, shared_size=1024)
    assert (config.no_rope_layers, config.bare_layers) == ((0, 1, 2, 3), ())
    assert (config.rms_norm_eps, config.factors) == (1e-5, Factors(12.0, 0.22, 16.0))


def test_without_experts_the_one_beside_them_is_the_feed_forward(tmp_path: Path) -> None:
    changes = {"num_local_experts": 0, "position_embedding_type": "rope"}
    config = read(tmp_path, **HYBRID | changes)
    assert (config.experts, config.intermediate_size, config.no_rope_layers) == (None, 1024, ())


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"layer_types": ["mamba"] * 4}, "no layer has attention"),
        ({"layer_types": None}, "'layer_types'"),
        ({"layer_types": ["attention"] * 3}, "for 4 layers"),
        ({"layer_types": ["attention", "mlp", "mamba", "mamba"]}, "'mamba' or 'attention'"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ({"mamba_n_heads": 45, "mamba_n_groups": 2}, "multiple of 'mamba_n_groups'"),
    ],
)
def test_what_does_not_run_is_refused(tmp_path: Path, changes: dict[str, Any], about: str) -> None:
    with pytest.raises(UnsupportedModelError, match=about):
        read(tmp_path, **HYBRID | changes)


def test_one_group_is_not_divided_among_ranks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"1 key heads of its recurrent layers; it can be 1$"):
        Shard(0, 2).check(read(tmp_path, **HYBRID))


def test_granite_4_micro_has_attention_in_all_layers(tmp_path: Path) -> None:
    """And so no state."""
    row = TINY["granite-hybrid-dense"]
    attention = {"layer_types": ["full_attention"] * 3}
    replace(row, settings=row.settings | attention)(tmp_path)
    prompts = [[*range(5, 25)], [7, 8]]
    engine = small_engine(tmp_path)
    assert_greedy(tmp_path, prompts, Driver(engine).run(prompts), 16)
    assert engine.plan.kv.recurrent is None


SHARED: dict[str, Any] = {  # the form of ibm-research/moe-7b-1b-active-shared-experts
    "architectures": ["GraniteMoeSharedForCausalLM"],
    "hidden_size": 1536,
    "intermediate_size": 512,
    "model_type": "granitemoeshared",
    "num_attention_heads": 24,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "num_local_experts": 62,
    "shared_intermediate_size": 1024,
}


@pytest.mark.parametrize("size", [1024, 0])
def test_a_feed_forward_may_stand_beside_the_experts(tmp_path: Path, size: int) -> None:
    text = json.dumps(PUBLISHED | SHARED | {"shared_intermediate_size": size})
    (tmp_path / "config.json").write_text(text)
    experts = read_model_config(tmp_path).experts
    assert experts is not None and experts.renormalises
    assert (experts.count, experts.top_k, experts.inner_size) == (62, 10, 512)
    assert experts.shared_size == size


SWA: dict[str, Any] = PUBLISHED | {  # the form of ibm-granite/granite-swash-2b
    "architectures": ["GraniteSWAForCausalLM"],
    "layer_types": ["full_attention", *["sliding_attention"] * 3] * 10,
    "model_type": "granite_swa",
    "sliding_window": 128,
}


@pytest.mark.parametrize(
    ("thetas", "no_rope", "theta"),
    [(None, (), 1e7), ([5e5] * 40, (), 5e5), ([0, 5e5, 5e5, 5e5] * 10, (*range(0, 40, 4),), 5e5)],
)
def test_layers_of_theta_0_do_not_turn(
    tmp_path: Path, thetas: Any, no_rope: tuple[int, ...], theta: float
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SWA | {"layer_rope_theta": thetas}))
    config = read_model_config(tmp_path)
    assert (config.no_rope_layers, config.rope.theta) == (no_rope, theta)
    assert config.windows == (None, 128, 128, 128) * 10


def test_a_rope_of_the_older_spelling_has_the_theta_of_the_layers(tmp_path: Path) -> None:
    thetas = {"layer_rope_theta": [0, 5e5, 5e5, 5e5] * 10, "rope_scaling": {"type": "default"}}
    (tmp_path / "config.json").write_text(json.dumps(SWA | thetas))
    config = read_model_config(tmp_path)
    assert (config.rope.theta, len(config.no_rope_layers)) == (5e5, 10)


@pytest.mark.parametrize("thetas", [[1e4, 5e5] * 20, [1e4] * 39, ["x"] * 40, [[]] * 40, 5])
def test_several_thetas_are_refused(tmp_path: Path, thetas: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SWA | {"layer_rope_theta": thetas}))
    with pytest.raises(UnsupportedModelError, match=r"'layer_rope_theta' is .*each of 40 layers"):
        read_model_config(tmp_path)
