"""What llama.cpp's converters make of models with Mamba-2 layers: Mamba2Model in its mamba.py,
GraniteHybridModel in its granite.py, NemotronHModel in its nemotron.py and FalconH1Model in its
falcon_h1.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
NEMOTRONS = ("nemotron_h", "nemotron_h_moe")
FALCON = "falcon-h1"
WITH_MAMBA = (FALCON, "granitehybrid", *NEMOTRONS)


def nemotron_kind(config: dict[str, Any]) -> str:
    return NEMOTRONS["moe" in config["layers_block_type"]]


def mamba_changed(config: dict[str, Any], name: str, values: Array) -> dict[str, Array]:
    """A tensor by Hugging Face's name and in its form -> those that the converter makes of it."""
    groups = config.get("n_groups") or config.get("mamba_n_groups")
    if name.endswith(".A_log"):
        values = -np.exp(values)
    if name.endswith((".A_log", "mamba.D", "mixer.D")):
        values = values.reshape(-1, 1)
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        values = values.reshape(groups, -1)
    if name.endswith("conv1d.weight"):
        values = values.squeeze(1)
    prefix, found, last = name.partition("shared_mlp.")
    if not found:
        return {name: values}
    end = "shared_mlp" if config["num_local_experts"] else "mlp"
    if last == "output_linear.weight":
        return {f"{prefix}{end}.down_proj.weight": values}
    gate, up = np.split(values, 2)
    return {f"{prefix}{end}.gate_proj.weight": gate, f"{prefix}{end}.up_proj.weight": up}


def with_multipliers(config: dict[str, Any], name: str, values: Array) -> Array:
    """A matrix of Falcon-H1 as its converter multiplies it."""
    part = name.split(".")[-2]
    if part == "in_proj":
        inner, heads = config["mamba_d_ssm"], config["mamba_n_heads"]
        keys = config["mamba_n_groups"] * config["mamba_d_state"]
        rows = np.repeat(config["ssm_multipliers"], (inner, inner, keys, keys, heads))
        factors = config["ssm_in_multiplier"] * rows[:, None]
        return (values * factors).astype(values.dtype)
    taken = config["attention_in_multiplier"]
    gate, down = config["mlp_multipliers"]
    factor = {
        "q_proj": taken,
        "k_proj": taken * config["key_multiplier"],
        "v_proj": taken,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "gate_proj": gate,
        "down_proj": down,
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
    }.get(part, 1.0)
    return (values * factor).astype(values.dtype)


def usual_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Keys that other models have, too, and Nemotron-H does not."""
    return {
        "num_hidden_layers": len(config["layers_block_type"]),
        "rms_norm_eps": config["layer_norm_epsilon"],
        "rope_parameters": {"rope_theta": 10000.0},
    }


def mamba_file_settings(config: dict[str, Any], arch: str) -> dict[str, Any]:
    """Metadata that differs from other models'; None: there is none."""
    if arch == FALCON:
        return {f"{arch}.{key}": value for key, value in _falcon_settings(config).items()}
    if arch == "granitehybrid":
        settings = _granite_settings(config)
    else:
        settings = _nemotron_settings(config, arch)
    width = config["hidden_size"] // config["num_attention_heads"]
    settings |= {"rope.dimension_count": width, "rope.scaling.finetuned": False}
    settings["context_length"] = 2**20
    if config.get("position_embedding_type") == "rope":  # as of Bamba
        settings |= {"rope.scaling.finetuned": True, "context_length": 512}
    return {f"{arch}.{key}": value for key, value in settings.items()}


def _granite_settings(config: dict[str, Any]) -> dict[str, Any]:
    heads, experts = config["mamba_n_heads"], config["num_local_experts"]
    kv_heads = config["num_key_value_heads"]
    kinds = config["layer_types"]
    return {
        "attention.head_count_kv": [kv_heads * (kind == "full_attention") for kind in kinds],
        # Published models without experts have one size under both keys.
        "feed_forward_length": config[
            "intermediate_size" if experts else "shared_intermediate_size"
        ],
        "expert_count": experts,
        "expert_used_count": config["num_experts_per_tok"] if experts else 0,
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.time_step_rank": heads,
    }


def _falcon_settings(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope.dimension_count": None,
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": config["mamba_d_ssm"],
        "ssm.time_step_rank": config["mamba_n_heads"],
    }


def _nemotron_settings(config: dict[str, Any], arch: str) -> dict[str, Any]:
    kinds, kv_heads = config["layers_block_type"], config["num_key_value_heads"]
    heads, is_moe = config["mamba_num_heads"], arch == "nemotron_h_moe"
    inner, behind = config["moe_intermediate_size" if is_moe else "intermediate_size"], "mlp"
    of_experts = {
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": inner,
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "moe_latent_size": config["moe_latent_size"],
        "expert_gating_func": None,
        "leading_dense_block_count": None,
    }
    if is_moe:
        behind = "moe"
    else:
        of_experts = dict.fromkeys(of_experts)
    return of_experts | {
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "attention.head_count_kv": [kv_heads * (kind == "full_attention") for kind in kinds],
        "feed_forward_length": [inner * (kind == behind) for kind in kinds],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.inner_size": heads * config["mamba_head_dim"],
        "ssm.time_step_rank": heads,
    }
