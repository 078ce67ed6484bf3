"""What only Granite has: factors of embeddings, scores, sums and logits.

Logits and ids in fp32, on every tier, are tested with the other architectures' (TINY).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import COMMON, reference, reference_greedy
from driver import GREEDY, Driver, small_engine
from marks import needs_compiler

from nanoengine.config.model import Factors
from nanoengine.errors import CorruptModelError
from nanoengine.kernels.cpu_linear import CpuLinear
from nanoengine.loading.model_config import read_model_config


@needs_compiler
@pytest.mark.usefixtures("our_products")
def test_sums_stay_fused_with_products(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    fused = CpuLinear.after_attention
    monkeypatch.setattr(
        CpuLinear, "after_attention", lambda *parts: made.append(parts) or fused(*parts)
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
