"""Tests of benchmarks/random_checkpoint.py: what it writes has the sizes given, and runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFReader
from transformers import AutoConfig

from benchmarks import random_checkpoint
from nanoengine import LLM, SamplingParams
from nanoengine.loading.model_config import read_model_config

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


@pytest.mark.parametrize("name", random_checkpoint.SHAPES)
def test_every_size_has_a_name_that_transformers_knows(name: str) -> None:
    """It takes any name, so the size of a misspelt one would be its default."""
    kind, sizes = random_checkpoint.SHAPES[name]
    default = AutoConfig.for_model(kind)
    assert [key for key in sizes if key != "head_dim" and not hasattr(default, key)] == []


def test_numbers_and_codes_of_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, sizes = random_checkpoint.SHAPES["lfm2-1.2b"]
    monkeypatch.setitem(random_checkpoint.SHAPES, "lfm2-1.2b", (kind, sizes | SMALL))
    folder, path = tmp_path / "numbers", tmp_path / "codes.gguf"
    random_checkpoint.main(["lfm2-1.2b", str(folder), "--gguf", str(path)])
    config = read_model_config(folder)
    assert (config.hidden_size, config.num_heads, config.num_kv_heads) == (64, 4, 2)
    assert (config.vocab_size, config.num_layers) == (300, sizes["num_hidden_layers"])
    types = {tensor.name: tensor.tensor_type for tensor in GGUFReader(path).tensors}
    assert types["blk.0.shortconv.in_proj.weight"] == GGMLQuantizationType.Q4_0
    assert types["blk.0.shortconv.conv.weight"] == GGMLQuantizationType.F32
    for model in (folder, path):
        with LLM(str(model), device="cpu", num_gpu_blocks=4) as llm:
            params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
            (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
