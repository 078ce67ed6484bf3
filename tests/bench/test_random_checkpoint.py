"""Tests of benchmarks/random_checkpoint.py: what it writes has the sizes that were given."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import random_checkpoint
from nanoengine import LLM, SamplingParams
from nanoengine.loading.model_config import read_model_config

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "moe_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "vocab_size": 120,
}


@pytest.mark.parametrize("name", random_checkpoint.SHAPES)
def test_it_has_the_sizes_that_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """transformers takes any name, so the size of a misspelt one would be its default."""
    kind, sizes = random_checkpoint.SHAPES[name]
    small = sizes | {key: SMALL[key] for key in sizes if key in SMALL}
    monkeypatch.setitem(random_checkpoint.SHAPES, name, (kind, small))
    assert random_checkpoint.write(name, tmp_path) > 0
    config = read_model_config(tmp_path)
    found = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    if config.recurrent is not None:
        assert config.recurrent_layers == (0, 1, 2)
        found |= {
            "linear_num_key_heads": config.recurrent.num_key_heads,
            "linear_num_value_heads": config.recurrent.num_value_heads,
            "linear_key_head_dim": config.recurrent.key_dim,
            "linear_value_head_dim": config.recurrent.value_dim,
        }
    if config.experts is not None:
        found |= {
            "num_experts": config.experts.count,
            "num_experts_per_tok": config.experts.top_k,
            "moe_intermediate_size": config.experts.inner_size,
        }
    assert found == {key: SMALL[key] for key in sizes if key in SMALL}
    with LLM(str(tmp_path), device="cpu", num_gpu_blocks=4) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
