"""Ranks have the bits of one process at the widths of real models, by the machine's own products: a
few layers with random weights, of models whose layers differ.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from marks import needs_compiler

from nanoengine import LLM, SamplingParams

pytestmark = [needs_compiler, pytest.mark.slow, pytest.mark.usefixtures("threads_as_before")]

COMMON = {"vocab_size": 8192, "max_position_embeddings": 4096}
HYBRID = COMMON | {"architectures": ["Qwen3_5ForCausalLM"], "head_dim": 256}
KINDS = ["linear_attention", "full_attention"]
WIDTHS: dict[str, dict[str, Any]] = {
    "Qwen3.5 0.8B": HYBRID
    | {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "layer_types": [KINDS[0]] * 3 + KINDS[1:],
    },
    "Qwen3.5 4B": HYBRID
    | {
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "layer_types": KINDS,
    },
    "Gemma 4 E2B": COMMON
    | {
        "architectures": ["Gemma4ForCausalLM"],
        "vocab_size_per_layer_input": 8192,
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "OLMo 2 1B": COMMON
    | {
        "architectures": ["Olmo2ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
}


def scores(folder: Path, dtype: str, size: int) -> list[list[list[tuple[int, float]]]]:
    source = random.Random(0)
    prompts = [[source.randrange(5, 8000) for _ in range(num)] for num in (3, 130, 40, 17, 300)]
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=5, prompt_logprobs=2)
    settings = {"load_format": "dummy", "dtype": dtype, "num_gpu_blocks": 64}
    settings |= {"kvcache_block_size": 16, "max_model_len": 1024, "max_num_seqs": 8}
    with LLM(folder, tensor_parallel_size=size, num_threads=size, **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    rows = [[*(o.prompt_logprobs or []), *(o.outputs[0].logprobs or [])] for o in outputs]
    assert all(len(each) > 10 for each in rows)
    return [[[(i, f.logprob) for i, f in (row or {}).items()] for row in each] for each in rows]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", WIDTHS)
def test_ranks_have_the_bits_of_one_process(tmp_path: Path, name: str, dtype: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WIDTHS[name]), encoding="utf-8")
    expected = scores(tmp_path, dtype, 1)
    for size in (2, 4):
        assert scores(tmp_path, dtype, size) == expected
