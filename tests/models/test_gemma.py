"""What only Gemma 3 has: its norm, its keys in config.json, and norms after attention and MLP.

Logits and ids in fp32, on every tier, are tested with the other architectures' (TINY).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference, reference_logits
from tiers import LAYOUTS, PROMPTS, run
from tiny_models import TINY
from transformers import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from nanoengine.config.model import ModelConfig
from nanoengine.errors import CorruptModelError, UnsupportedModelError
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.layer_ops import TorchOps
from nanoengine.models.products import Norm


def test_heads_of_256_as_every_published_gemma_has(tmp_path: Path) -> None:
    settings = TINY["gemma3"].settings | {"head_dim": 256, "query_pre_attn_scalar": 256}
    replace(TINY["gemma3"], settings=settings)(tmp_path)
    _, ids, logits = run(tmp_path, "float32", **LAYOUTS["stream"])
    for prompt, tokens, ours in zip(PROMPTS, ids, logits, strict=True):
        wanted = reference_logits(reference(tmp_path), tokens)[len(prompt) - 1 : -1]
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0)
        assert tokens[len(prompt) :] == wanted.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_transformers_to_the_bit(dtype: torch.dtype) -> None:
    """With weights that bfloat16 would lose beside 1; of tokens, and of heads in a fused tensor."""
    generator = torch.Generator().manual_seed(0)
    theirs = Gemma3RMSNorm(48).to(dtype)
    theirs.weight.data = (torch.randn(48, generator=generator) * 1e-3).to(dtype)
    ours = Norm(theirs.weight.float() + 1, 1e-6)
    x = torch.randn(9, 5, 48, generator=generator).to(dtype)
    for rows in (x[:, 0], x[:, 1:4]):
        assert torch.equal(TorchOps().rms_norm(rows, ours), theirs(rows))


# -- config.json

# As it was written before transformers 5.
OLD: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 7,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 168,
    "rope_local_base_freq": 5000,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "rope_theta": 2000000,
    "sliding_window": 512,
    "sliding_window_pattern": 3,
    "vocab_size": 300,
}


LEFT_OUT = (
    *("rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window"),
    *("sliding_window_pattern", "query_pre_attn_scalar", "num_key_value_heads"),
)


def read(folder: Path, **changes: Any) -> ModelConfig:
    """Of OLD with changes; a value ... leaves its key out."""
    content = {key: value for key, value in (OLD | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(content))
    return read_model_config(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": None, "sliding_window_pattern": 1},
        dict.fromkeys(LEFT_OUT, ...),
        {"layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 5]},
        {
            "rope_scaling": ...,
            "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
        },
    ],
    ids=["old keys", "no window", "defaults", "layer_types", "a part of rope_parameters"],
)
def test_keys_are_read_as_transformers_does(tmp_path: Path, changes: dict[str, Any]) -> None:
    ours = read(tmp_path, **changes)
    theirs = Gemma3TextConfig.from_pretrained(tmp_path)
    assert ours.query_pre_attn_scalar == theirs.query_pre_attn_scalar
    assert (ours.head_dim, ours.num_kv_heads) == (theirs.head_dim, theirs.num_key_value_heads)
    assert ours.tie_word_embeddings and ours.max_position == theirs.max_position_embeddings
    windows = [
        theirs.sliding_window if kind == "sliding_attention" else None
        for kind in theirs.layer_types
    ]
    assert ours.windows == (tuple(windows) if any(windows) else ())
    for rope, kind in ((ours.rope, "full_attention"), (ours.local_rope, "sliding_attention")):
        wanted = theirs.rope_parameters[kind]
        assert rope is not None
        assert (rope.kind, rope.theta) == (wanted["rope_type"], wanted["rope_theta"])
        assert rope.factor == wanted.get("factor", 1.0)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architectures": ["Gemma3nForConditionalGeneration"]}, "Gemma3nForConditionalGeneration"),
        ({"hidden_activation": "silu"}, "'hidden_activation' is 'silu'"),
        ({"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' is 50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "'full_attention'"),
        ({"layer_types": ["full_attention"]}, "for 7 layers"),
        ({"layer_types": ["chunked_attention"] * 7}, "chunked_attention"),
        ({"sliding_window": None}, "'sliding_window' of None"),
        ({"sliding_window_pattern": 0}, "'sliding_window_pattern' of 0"),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"full_attention": [1]}},
        {"rope_scaling": 8.0},
        {"rope_local_base_freq": -1},
        {"query_pre_attn_scalar": 0},
        {"final_logit_softcapping": "30"},
        {"final_logit_softcapping": 0},
    ],
)
def test_wrong_values_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptModelError, match=next(iter(changes))):
        read(tmp_path, **changes)
