"""What llama.cpp's converters write of families that this release of gguf does not know."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

MUSE = "muse-glimmer"


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
