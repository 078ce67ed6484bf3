"""A checkpoint of a real model's shape with random weights, for speeds: `bench.py compare --model`.

    python -m benchmarks.random_checkpoint qwen3.6-27b FOLDER [--gguf FILE]

transformers makes it, with a few layers, and with as much less of the vocabulary: so the head takes
the part of a step that it takes in the whole model. There is no tokenizer. FILE is the same model
as Q4_0, for engines that read GGUF.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

LAYERS = 4
# model_type of transformers and what its configuration is told. Qwen3.6-27B: 64 layers, 248320
# tokens; Qwen3-30B-A3B: 48 layers, 151936; Qwen3.5-2B: 24, 248320; Granite 4.0 H Tiny: 40, 100352;
# LFM2-1.2B: 16, 65536; Laguna XS: 40, 100352, and Ling mini 2.0: 20, 157184, the first layers of
# which have no experts.
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
QWEN_2B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True,
    "vocab_size": 248320 // 3,
}
GRANITE_H_TINY: dict[str, Any] = {
    "hidden_size": 1536,
    "intermediate_size": 512,
    "shared_intermediate_size": 1024,
    "num_hidden_layers": 8,
    "layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "position_embedding_type": "nope",
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
    "tie_word_embeddings": True,
    "vocab_size": 100352 // 5,
}
LFM2_1B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 12288,
    "block_auto_adjust_ff_dim": True,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "num_hidden_layers": 8,
    "layer_types": ["conv", "conv", "full_attention"] * 2 + ["conv", "full_attention"],
    "conv_L_cache": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "vocab_size": 65536 // 2,
}
LAGUNA_XS: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_routed_scaling_factor": 2.5,
    "mlp_layer_types": ["sparse"] * LAYERS,
    "layer_types": ["full_attention", *["sliding_attention"] * (LAYERS - 1)],
    "sliding_window": 512,
    "num_attention_heads": 48,
    "num_attention_heads_per_layer": [48, *[64] * (LAYERS - 1)],
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn",
            "rope_theta": 5e5,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 64.0,
            "partial_rotary_factor": 0.5,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "vocab_size": 100352 // 10,
}
LING_MINI_2: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 0,
    "use_qk_norm": True,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 6e5, "partial_rotary_factor": 0.5},
    "vocab_size": 157184 // 5,
}
COMMON = {
    "num_hidden_layers": LAYERS,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
SHAPES = {
    "qwen3.6-27b": ("qwen3_5_text", QWEN_27B),
    "qwen3-30b-a3b": ("qwen3_moe", QWEN_30B_A3B),
    "qwen3.5-2b": ("qwen3_5_text", QWEN_2B),
    "granite-h-tiny": ("granitemoehybrid", GRANITE_H_TINY),
    "lfm2-1.2b": ("lfm2", LFM2_1B),
    "laguna-xs": ("laguna", LAGUNA_XS),
    "ling-mini-2": ("sarvam_moe", LING_MINI_2),
}
# Of published models, where transformers' class is another one's.
CLASSES = {"ling-mini-2": "BailingMoeV2ForCausalLM"}
# What llama.cpp keeps in float32: small, and multiplied by nothing or by a router's rows.
IN_FLOAT32 = ("conv.conv", "conv1d", "norm", "ffn_gate_inp", "ssm_a", "ssm_beta", "ssm_d")


def write(name: str, folder: Path) -> int:
    """Write a model of SHAPES in bfloat16; its number of parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = SHAPES[name]
    config = AutoConfig.for_model(kind, **(COMMON | sizes))
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    if name in CLASSES:
        path = folder / "config.json"
        content = json.loads(path.read_text()) | {"architectures": [CLASSES[name]]}
        path.write_text(json.dumps(content))
    return int(model.num_parameters())


def write_q4_0(folder: Path, path: Path) -> None:
    """Write the GGUF of a checkpoint, whose matrices are Q4_0."""
    import gguf
    from gguf_model import GGUFModel

    model = GGUFModel(folder)
    model.settings["general.file_type"] = int(gguf.LlamaFileType.MOSTLY_Q4_0)
    for name, tensor in model.tensors.items():
        if tensor.ndim > 1 and not any(part in name for part in IN_FLOAT32):
            model.types[name] = gguf.GGMLQuantizationType.Q4_0
    model.write(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Write one, and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    made = write(args.shape, args.folder)
    if args.gguf:
        write_q4_0(args.folder, args.gguf)
    print(json.dumps({"folder": str(args.folder), "parameters": made}))


if __name__ == "__main__":
    main()
