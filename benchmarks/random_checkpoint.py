"""A checkpoint of a real model's shape with random weights, for speeds: `bench.py compare --model`.

    python -m benchmarks.random_checkpoint qwen3.6-27b FOLDER

transformers makes it, with a few layers, and with as much less of the vocabulary: so the head takes
the part of a step that it takes in the whole model. There is no tokenizer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

LAYERS = 4
# model_type of transformers and what its configuration is told. Qwen3.6-27B: 64 layers, 248320
# tokens; Qwen3-30B-A3B: 48 layers, 151936.
QWEN_27B: dict[str, Any] = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "vocab_size": 248320 // 16,
}
QWEN_30B_A3B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936 // 12,
}
COMMON = {
    "num_hidden_layers": LAYERS,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
SHAPES = {"qwen3.6-27b": ("qwen3_5_text", QWEN_27B), "qwen3-30b-a3b": ("qwen3_moe", QWEN_30B_A3B)}


def write(name: str, folder: Path) -> int:
    """Write a model of SHAPES in bfloat16; its number of parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = SHAPES[name]
    config = AutoConfig.for_model(kind, **(COMMON | sizes))
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return int(model.num_parameters())


def main(argv: Sequence[str] | None = None) -> None:
    """Write one, and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    print(json.dumps({"folder": str(args.folder), "parameters": write(args.shape, args.folder)}))


if __name__ == "__main__":
    main()
