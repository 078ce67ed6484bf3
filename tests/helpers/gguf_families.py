"""What llama.cpp's converters write of families that this release of gguf does not know."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FULL = "full_attention"
MUSE, LING = "muse-glimmer", "bailingmoe3"


def of_cohere_experts(config: dict[str, Any]) -> dict[str, Any]:
    """Experts and norms of Cohere2Moe (Cohere2MoeModel in conversion/command_r.py, and of the width
    its base.py).
    """
    inner, num_shared = config["intermediate_size"], config["num_shared_experts"]
    settings = {
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "expert_feed_forward_length": inner,
        "expert_gating_func": 2,
        "expert_weights_norm": config["norm_topk_prob"],
        "feed_forward_length": config["prefix_dense_intermediate_size"] or inner,
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
    }
    if num_shared:
        settings |= {
            "expert_shared_count": num_shared,
            "expert_shared_feed_forward_length": inner * num_shared,
        }
    return {f"cohere2moe.{key}": value for key, value in settings.items()}


def of_muse(config: dict[str, Any]) -> dict[str, Any]:
    """Factors and windows of Muse Glimmer (conversion/muse_glimmer.py)."""
    settings = {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [
            kind == "sliding_attention" for kind in config["layer_types"]
        ],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "logit_scale": config["output_multiplier"],
    }
    return {f"{MUSE}.{key}": value for key, value in settings.items()}


def norms_of_muse(config: dict[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
    """The norms that the converter makes of `qk_scale_factor`."""
    ones = np.ones(config["head_dim"], np.float32)
    factors = {"q": ones * np.float32(config["qk_scale_factor"]), "k": ones}
    return {
        f"blk.{layer}.attn_{part}_norm.weight": values
        for layer in range(config["num_hidden_layers"])
        for part, values in factors.items()
    }


def of_ling(config: dict[str, Any]) -> dict[str, Any]:
    """Ling 3.0's two kinds of layers and its experts (conversion/bailingmoe3.py)."""
    rank, turned, inner = (
        config[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "moe_intermediate_size")
    )
    settings = {
        "attention.head_count_kv": [int(kind == FULL) for kind in config["layer_types"]],
        "attention.q_lora_rank": config.get("q_lora_rank"),
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + turned,
        "attention.key_length_mla": config["qk_nope_head_dim"] + turned,
        "attention.value_length_mla": config["v_head_dim"],
        "expert_feed_forward_length": inner,
        "expert_shared_feed_forward_length": inner * config["num_shared_experts"],
        "expert_weights_norm": config["moe_renormalize"],
        "kda.gate_lower_bound": config["kda_lower_bound"],
        "kda.head_dim": config["linear_head_dim"],
        "kda.safe_gate": config["kda_safe_gate"],
        "rope.dimension_count": turned,
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
    }
    return {f"{LING}.{key}": value for key, value in settings.items() if value is not None}


def usual_name_of_ling(config: dict[str, Any], name: str) -> str:
    """That of Kimi Linear for the same tensor, or llama.cpp's where this release has none."""
    name = name.replace("word_embeddings", "embed_tokens").replace(".attention.", ".self_attn.")
    name = name.replace("forget_gate.", "").replace(".dense.", ".o_proj.")
    name = name.replace("gate.expert_bias", "gate.e_score_correction_bias")
    if not name.startswith("model.layers."):
        return name
    layer = int(name.split(".")[2])  # the head for guesses is behind the last one
    is_full = layer >= len(config["layer_types"]) or config["layer_types"][layer] == FULL
    gate = "self_attn.gate_proj" if is_full else "self_attn.g_a_proj"
    return name.replace("self_attn.g_proj", gate).replace("self_attn.f_proj", "self_attn.f_a_proj")
