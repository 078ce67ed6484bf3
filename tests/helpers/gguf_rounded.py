"""A checkpoint whose numbers a GGUF's conversion keeps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

# Of Falcon-H1: a weight that they multiply keeps its mantissa.
POWERS_OF_TWO = {
    "attention_in_multiplier": 0.5,
    "attention_out_multiplier": 2.0,
    "embedding_multiplier": 8.0,
    "key_multiplier": 0.25,
    "lm_head_multiplier": 0.5,
    "mlp_multipliers": [2.0, 0.25],
    "ssm_in_multiplier": 0.5,
    "ssm_multipliers": [0.5, 4.0, 2.0, 0.25, 1.0],
    "ssm_out_multiplier": 0.5,
}


def rounded(source: Path, folder: Path) -> Path:
    """The checkpoint with numbers that bfloat16 holds, but the bias of a choice, in float32."""
    shutil.copytree(source, folder)
    stored = load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        if not name.endswith(("e_score_correction_bias", "expert_bias")):
            stored[name] = tensor.bfloat16().float()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if config["architectures"] == ["Qwen3NextForCausalLM"]:
        config["norm_topk_prob"] = True  # as llama.cpp has it in its code
    if config["architectures"] == ["FalconH1ForCausalLM"]:
        config |= POWERS_OF_TWO
    if config["architectures"] == ["Lfm2MoeForCausalLM"]:
        config["routed_scaling_factor"] = 1.0  # no key of a file says it
    if config["architectures"] == ["Cohere2MoeForCausalLM"]:
        config["expert_selection_fn"] = "sigmoid"  # the only one that files have
    if "text_config" in config:
        config["text_config"]["post_norm_eps"] = 1e-8  # as llama.cpp has it in its code
    if {"kv_lora_rank", "rope_parameters"} <= config.keys():
        # So has it these: pairs are neighbours, YaRN has one mscale.
        config["rope_interleave"] = True
        rope = config["rope_parameters"]
        rope |= {"mscale": rope["mscale_all_dim"]} if "mscale" in rope else {}
    path.write_text(json.dumps(config))
    return folder
