"""What only Gemma 1, Gemma 2 and VaultGemma have: their keys in config.json, softcaps of scores and
logits, windows in alternate layers.

Logits and ids in fp32 and bfloat16, on every tier, are tested with the other architectures' (TINY).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference, reference_logits
from marks import needs_compiler
from tiers import LAYOUTS, PROMPTS, run
from tiny_models import TINY
from transformers import AutoConfig

from nanoengine import LLM, ConfigError, SamplingParams
from nanoengine.config.model import ModelConfig
from nanoengine.errors import CorruptModelError, UnsupportedModelError
from nanoengine.loading.model_config import read_model_config


@needs_compiler
@pytest.mark.parametrize("layout", ["stream", "in place"])
def test_heads_of_256_as_every_published_gemma_has(tmp_path: Path, layout: str) -> None:
    """The caps of published models, of scores that are far above them. transformers' own float32 is
    1e-4 from its float64 there.
    """
    sizes = {"head_dim": 256, "query_pre_attn_scalar": 1, "attn_logit_softcapping": 50.0}
    replace(TINY["gemma2"], settings=TINY["gemma2"].settings | sizes)(tmp_path)
    _, ids, logits = run(tmp_path, "float32", **LAYOUTS[layout])
    for prompt, tokens, ours in zip(PROMPTS, ids, logits, strict=True):
        wanted = reference_logits(reference(tmp_path), tokens)[len(prompt) - 1 : -1]
        torch.testing.assert_close(ours, wanted, atol=3e-4, rtol=0)
        assert tokens[len(prompt) :] == wanted.argmax(-1).tolist()


def test_a_checkpoint_without_caps(tmp_path: Path) -> None:
    """As null in config.json; a missing key is Gemma 2's own cap."""
    settings = TINY["gemma2"].settings | {"attn_logit_softcapping": None}
    replace(TINY["gemma2"], settings=settings)(tmp_path)
    config = read_model_config(tmp_path)
    assert config.attn_logit_softcap is None and config.attention.softcap is None
    _, ids, logits = run(tmp_path, "float32", **LAYOUTS["resident"])
    for prompt, tokens, ours in zip(PROMPTS, ids, logits, strict=True):
        wanted = reference_logits(reference(tmp_path), tokens)[len(prompt) - 1 : -1]
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", ["torch", pytest.param("c", marks=needs_compiler)])
def test_the_plan_names_a_backend_that_caps(tiny: Callable[[str], Path], backend: str) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_gpu_blocks": 8}
    with LLM(tiny("gemma2"), attention_backend=backend, **settings) as llm:
        assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2), use_tqdm=False)
    with pytest.raises(ConfigError, match="sdpa needs layers that see all keys"):
        LLM(tiny("gemma2"), attention_backend="sdpa", **settings)


# -- config.json

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "vocab_size": 300,
}
CLASSES = {
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "vaultgemma": "VaultGemmaForCausalLM",
}
LEFT_OUT = ("vocab_size", "num_attention_heads", "num_key_value_heads")


def read(folder: Path, model_type: str, **changes: Any) -> ModelConfig:
    """Of SIZES with changes; a value ... leaves its key out."""
    content = {"architectures": [CLASSES[model_type]], "model_type": model_type} | SIZES | changes
    content = {key: value for key, value in content.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(content))
    return read_model_config(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict.fromkeys(LEFT_OUT, ...),
        {"head_dim": 32, "rope_theta": 5e4, "tie_word_embeddings": False},
        {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
    ],
    ids=["defaults", "fewer keys", "other values", "as at the hub"],
)
@pytest.mark.parametrize("model_type", CLASSES)
def test_keys_are_read_as_transformers_does(
    tmp_path: Path, model_type: str, changes: dict[str, Any]
) -> None:
    ours = read(tmp_path, model_type, **changes)
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert (ours.head_dim, ours.num_heads) == (theirs.head_dim, theirs.num_attention_heads)
    assert (ours.num_kv_heads, ours.vocab_size) == (theirs.num_key_value_heads, theirs.vocab_size)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    if model_type == "gemma":
        assert ours.windows == () and ours.attention.softcap is None
        return
    assert ours.query_pre_attn_scalar == theirs.query_pre_attn_scalar
    assert ours.attention.softcap == theirs.attn_logit_softcapping == 50
    assert ours.final_logit_softcap == theirs.final_logit_softcapping == 30
    kinds = [kind == "sliding_attention" for kind in theirs.layer_types]
    assert ours.windows == tuple(theirs.sliding_window if has else None for has in kinds)
    assert kinds == [True, False, True, False, True]


def test_gelu_of_gemma_1_is_its_formula_with_tanh(tmp_path: Path) -> None:
    """As the first checkpoints name it."""
    TINY["gemma"](tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": "gelu"}))
    _, ids, logits = run(tmp_path, "float32", **LAYOUTS["resident"])
    for prompt, tokens, ours in zip(PROMPTS, ids, logits, strict=True):
        wanted = reference_logits(reference(tmp_path), tokens)[len(prompt) - 1 : -1]
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "changes", "match"),
    [
        ("gemma", {"hidden_act": "silu"}, "'hidden_act' is 'silu'"),
        ("gemma", {"hidden_activation": "gelu"}, "'hidden_activation' is 'gelu'"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"hidden_activation": "silu"}, "'hidden_activation' is 'silu'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"sliding_window": None}, "'sliding_window' of None"),
        ("vaultgemma", {"layer_types": ["full_attention"]}, "for 5 layers"),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, model_type: str, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        read(tmp_path, model_type, **changes)


@pytest.mark.parametrize("value", [0, -50.0, "50", float("nan")])
@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_a_cap_that_cannot_be_is_refused(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(CorruptModelError, match=key):
        read(tmp_path, "gemma2", **{key: value})
