"""What only Cohere's models have: LayerNorm, and a feed-forward beside attention.

Logits and ids in fp32, on every tier and on ranks are tested with the other architectures' (TINY).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference, reference_greedy
from driver import GREEDY, Driver, small_engine
from marks import needs_compiler
from published import bytes_in_bf16, read_published
from step_bytes import step_bytes
from transformers import Cohere2Config
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm, Cohere2RotaryEmbedding

from nanoengine.config.model import ModelConfig
from nanoengine.errors import CorruptModelError, UnsupportedModelError
from nanoengine.models.layer_ops import TorchOps
from nanoengine.models.products import Norm
from nanoengine.models.rope import inverse_frequencies
from nanoengine.startup import parts


@pytest.mark.parametrize("draft", ["ngram:3", "resident:2"])
def test_guesses_change_no_token(tiny: Callable[[str], Path], draft: str) -> None:
    path, prompt = tiny("cohere2"), [*range(5, 15)] * 4
    output = Driver(small_engine(path, speculative=draft)).run([prompt])[0]
    tokens = output.outputs[0].token_ids
    assert tokens == reference_greedy(reference(path), prompt, GREEDY.max_tokens or 0, tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [24, 64, 333])
def test_norm_is_transformers_own(size: int, dtype: torch.dtype) -> None:
    """Each row by itself: it has the same bits beside others."""
    theirs = Cohere2LayerNorm(size, eps=0.02).to(dtype)
    torch.nn.init.normal_(theirs.weight)
    x = (torch.randn(37, size) * 3 + 5).to(dtype)
    norm = Norm(theirs.weight.detach(), 0.02)
    found = TorchOps().layer_norm(x, norm)
    torch.testing.assert_close(found, theirs(x).detach())
    for i in range(0, 37, 6):
        assert torch.equal(TorchOps().layer_norm(x[i : i + 1].clone(), norm)[0], found[i])


# -- config.json

PUBLISHED: dict[str, Any] = {  # the form of CohereLabs/c4ai-command-r7b-12-2024
    "architectures": ["Cohere2ForCausalLM"],
    "attention_bias": False,
    "cache_implementation": "hybrid",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "layer_norm_eps": 1e-05,
    "layer_switch": 4,
    "logit_scale": 0.25,
    "max_position_embeddings": 132096,
    "model_type": "cohere2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "rope_theta": 50000,
    "rotary_pct": 1.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": False,
    "vocab_size": 256000,
}
COMMAND_R: dict[str, Any] = {  # the form of CohereLabs/c4ai-command-r-v01
    "architectures": ["CohereForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "model_max_length": 131072,
    "model_type": "cohere",
    "num_attention_heads": 64,
    "num_hidden_layers": 40,
    "num_key_value_heads": 64,
    "rope_theta": 8000000.0,
    "use_qk_norm": False,
    "vocab_size": 256000,
}


def read(folder: Path, published: dict[str, Any] = PUBLISHED, **changes: Any) -> ModelConfig:
    return read_published(folder, published, **changes)


@pytest.mark.parametrize(
    ("published", "billions"), [(PUBLISHED, 8.03), (COMMAND_R, 34.98)], ids=["R7B", "R"]
)
def test_the_published_shape_has_the_published_size(
    tmp_path: Path, published: dict[str, Any], billions: float
) -> None:
    config = read(tmp_path, published)
    found = bytes_in_bf16(config)
    assert round(found.held / 2e9, 2) == billions
    assert config.tie_word_embeddings and config.rms_norm_eps == 1e-5


def test_layers_with_a_window_alone_rotate(tmp_path: Path) -> None:
    config, rows = read(tmp_path), range(3, 32, 4)
    assert config.no_rope_layers == (*rows,)
    assert config.windows == tuple(None if i in rows else 4096 for i in range(32))
    theirs = Cohere2Config.from_pretrained(tmp_path)
    assert theirs.layer_types == [
        "full_attention" if i in rows else "sliding_attention" for i in range(32)
    ]
    listed = read(tmp_path, layer_types=theirs.layer_types, sliding_window_pattern="left out")
    assert listed == config
    assert read(tmp_path, COMMAND_R).no_rope_layers == ()


@pytest.mark.parametrize("old", [True, False], ids=["rope_theta", "rope_parameters"])
def test_rope_is_read_as_transformers_reads_it(tmp_path: Path, old: bool) -> None:
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 50000}}
    config = read(tmp_path, **({} if old else new | {"rope_theta": "left out"}))
    theirs = Cohere2RotaryEmbedding(Cohere2Config.from_pretrained(tmp_path)).inv_freq
    torch.testing.assert_close(inverse_frequencies(config.rope, 128), theirs)


def test_logits_are_multiplied(tmp_path: Path) -> None:
    assert read(tmp_path).factors.logits == 4
    assert read(tmp_path, logit_scale="left out").factors.logits == 16


@pytest.mark.parametrize("scale", [0, -1.0, 1e9, "a"])
def test_impossible_factors_are_refused(tmp_path: Path, scale: Any) -> None:
    with pytest.raises(CorruptModelError, match="logit_scale"):
        read(tmp_path, logit_scale=scale)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_qk_norm": True},
        {"use_parallel_block": False},
        {"use_gated_activation": False},
        {"rotary_pct": 0.5},
        {"position_embedding_type": "rope"},
        {"hidden_act": "gelu"},
        {"sliding_window": None},
    ],
    ids=str,
)
def test_other_arithmetic_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(changes))):
        read(tmp_path, **changes)


@needs_compiler
@pytest.mark.parametrize("in_c", [True, False], ids=["C", "PyTorch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_a_step_takes_is_planned(
    in_c: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside what the largest step holds, by counting."""
    small = {"hidden_size": 256, "intermediate_size": 896, "num_hidden_layers": 4, "head_dim": 32}
    read(tmp_path, **small, num_attention_heads=8, num_key_value_heads=2, vocab_size=512)
    if not in_c:
        monkeypatch.setattr(parts, "find_kernels", lambda *_: (None, "not here"))
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "dtype": dtype}
    estimated, measured = step_bytes(tmp_path, monkeypatch, load_format="dummy", **settings)
    assert measured <= estimated <= 1.8 * measured
