"""Models with Mamba-2 layers in a GGUF file: their metadata as keys of config.json, and names.

llama.cpp's converters (GraniteHybridModel, NemotronHModel) write a list of KV heads, which are 0 in
a layer without attention, and for Nemotron-H one of the sizes of feed-forwards. FalconH1Model
multiplies weights with all multipliers, so a file has none; where the head is the embeddings, its
logits are too large by a factor that no key says, in llama.cpp as here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nanoengine.errors import CorruptModelError, UnsupportedModelError
from nanoengine.loading.gguf.families import recurrent_sizes
from nanoengine.loading.gguf.metadata import Metadata
from nanoengine.loading.gguf.rope_scaling import rope_scaling
from nanoengine.loading.mixers import ATTENTION, EXPERTS, MAMBA, MLP

NEMOTRONS = ("nemotron_h", "nemotron_h_moe")
FALCON = "falcon-h1"
HYBRIDS_OF_MAMBA = (FALCON, "granitehybrid", *NEMOTRONS)
# Of a Mamba-2 layer. Numbers of heads and the norm have a dimension more in the file.
MAMBA_NAMES = {
    "ssm_a": "A_log",
    "ssm_conv1d.bias": "conv1d.bias",
    "ssm_conv1d.weight": "conv1d.weight",
    "ssm_d": "D",
    "ssm_dt.bias": "dt_bias",
    "ssm_in.weight": "in_proj.weight",
    "ssm_norm.weight": "norm.weight",
    "ssm_out.weight": "out_proj.weight",
}
# They are few, and a decay is as exact as they are.
KEPT_IN_FP32 = ("A_log", "D", "dt_bias")
NEMOTRON_NAMES = {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}


def mamba_settings(
    metadata: Metadata, stored: Mapping[str, Any], num_layers: int, head_dim: int
) -> dict[str, Any]:
    """Keys of config.json that override those of other architectures.

    Raises CorruptModelError and UnsupportedModelError.
    """
    key = "attention.head_count_kv"
    kv_heads = _of_layers(metadata, key, num_layers)
    biased = (f"blk.{i}.attn_{part}.bias" for i in range(num_layers) for part in ("q", "output"))
    settings: dict[str, Any] = {
        "num_key_value_heads": _one_of(metadata, key, kv_heads),
        "head_dim": head_dim,
        "attention_bias": any(name in stored for name in biased),
    }
    if metadata.architecture in NEMOTRONS:
        return settings | _nemotron_settings(metadata, stored, kv_heads)
    theta = metadata.real("rope.freq_base", 10000.0)
    scaling = rope_scaling(metadata, stored, theta, head_dim)
    settings |= {"rope_theta": theta, "rope_scaling": scaling} | _mixer_settings(metadata)
    if metadata.architecture == FALCON:
        return settings | _falcon_settings(metadata, stored)
    return settings | _granite_settings(metadata, kv_heads)


def _mixer_settings(metadata: Metadata) -> dict[str, Any]:
    """Of a Mamba-2 layer, in the words of Granite 4 and Falcon-H1."""
    groups, heads, value_dim = recurrent_sizes(metadata)
    return {
        "mamba_n_groups": groups,
        "mamba_n_heads": heads,
        "mamba_d_head": value_dim,
        "mamba_d_state": metadata.number("ssm.state_size"),
        "mamba_d_conv": metadata.number("ssm.conv_kernel"),
    }


def _falcon_settings(metadata: Metadata, stored: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp's norm, where there is one, comes after the gate."""
    return {
        "model_type": "falcon_h1",
        "intermediate_size": metadata.number("feed_forward_length"),
        "mamba_d_ssm": metadata.number("ssm.inner_size"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in stored,
        "mamba_norm_before_gate": False,
    }


def _granite_settings(metadata: Metadata, kv_heads: Sequence[int]) -> dict[str, Any]:
    inner_size, num_experts = metadata.number("feed_forward_length"), metadata.count("expert_count")
    # To llama.cpp this key is a switch for RoPE.
    has_rope = metadata.flag("rope.scaling.finetuned", default=True)
    settings = {
        "model_type": "granitemoehybrid",
        "layer_types": ["attention" if num else "mamba" for num in kv_heads],
        "position_embedding_type": "rope" if has_rope else "nope",
        "intermediate_size": inner_size,
        "shared_intermediate_size": inner_size,
        "num_local_experts": num_experts,
    }
    if num_experts:
        settings |= {
            "num_experts_per_tok": metadata.number("expert_used_count"),
            "shared_intermediate_size": metadata.number("expert_shared_feed_forward_length"),
        }
    return settings


def _nemotron_settings(
    metadata: Metadata, stored: Mapping[str, Any], kv_heads: Sequence[int]
) -> dict[str, Any]:
    key = "feed_forward_length"
    inner_sizes = _of_layers(metadata, key, len(kv_heads))
    pattern = ""
    for layer, (num, size) in enumerate(zip(kv_heads, inner_sizes, strict=True)):
        if num and size:
            raise CorruptModelError(
                f"{metadata.path}: layer {layer} has {num} KV heads and a feed-forward of {size}; "
                "a layer of Nemotron-H is one of both"
            )
        behind = EXPERTS if f"blk.{layer}.ffn_gate_inp.weight" in stored else MLP
        pattern += ATTENTION if num else behind if size else MAMBA
    groups, heads, value_dim = recurrent_sizes(metadata)
    settings = {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": pattern,
        "layer_norm_epsilon": metadata.real("attention.layer_norm_rms_epsilon"),
        "intermediate_size": _one_of(metadata, key, inner_sizes),
        "n_groups": groups,
        "mamba_num_heads": heads,
        "mamba_head_dim": value_dim,
        "ssm_state_size": metadata.number("ssm.state_size"),
        "conv_kernel": metadata.number("ssm.conv_kernel"),
    }
    return settings | (_nemotron_experts(metadata) if metadata.count("expert_count") else {})


def _nemotron_experts(metadata: Metadata) -> dict[str, Any]:
    return {
        "moe_latent_size": metadata.count("moe_latent_size") or None,
        "n_routed_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": metadata.number("expert_shared_feed_forward_length"),
        "n_group": metadata.number("expert_group_count", 1),
        "topk_group": metadata.number("expert_group_used_count", 1),
        "norm_topk_prob": metadata.flag("expert_weights_norm"),
        "routed_scaling_factor": metadata.real("expert_weights_scale", 1.0),
    }


def _of_layers(metadata: Metadata, key: str, num_layers: int) -> list[int]:
    """A size of each layer, 0 where it has none. The file's list is of drafting layers, too."""
    return metadata.of_layers(key, metadata.number("block_count"), at_least=0)[:num_layers]


def _one_of(metadata: Metadata, key: str, sizes: Sequence[int]) -> int:
    """The size of the layers that have one."""
    found = {*sizes} - {0}
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{metadata.path}: '{metadata.architecture}.{key}' is {list(sizes)}; only 0 and one "
            "other size are supported"
        )
    return found.pop()
