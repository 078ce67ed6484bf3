"""Laguna's metadata of a GGUF file as keys of config.json: heads, windows, rotations, experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoengine.errors import UnsupportedModelError
from nanoengine.loading.gguf.experts import SIGMOID
from nanoengine.loading.gguf.metadata import Metadata
from nanoengine.loading.gguf.rope_scaling import rope_scaling
from nanoengine.loading.layer_kinds import FULL, SLIDING
from nanoengine.loading.layer_shapes import HEADS

INTERVAL = 4  # of layers that see all keys, of which the first is one: older files do not say it


def laguna_settings(
    metadata: Metadata, stored: Mapping[str, Any], num_layers: int, head_dim: int
) -> dict[str, Any]:
    """Keys of config.json that override those of other architectures. stored: the file's tensors,
    by name. Raises CorruptModelError and UnsupportedModelError.
    """
    heads = metadata.of_layers("attention.head_count", num_layers)
    _check_gate(metadata, stored, heads[0])
    scores = metadata.number("expert_gating_func", SIGMOID)
    if scores != SIGMOID:
        raise UnsupportedModelError(
            f"{metadata.path}: 'laguna.expert_gating_func' is {scores}; only {SIGMOID}, the "
            "sigmoid, is supported"
        )
    is_sparse = [f"blk.{i}.ffn_gate_inp.weight" in stored for i in range(num_layers)]
    window = metadata.count("attention.sliding_window")
    return {
        "intermediate_size": metadata.number("feed_forward_length"),
        "num_key_value_heads": metadata.number("attention.head_count_kv"),
        "head_dim": head_dim,
        HEADS: heads,
        "layer_types": _kinds(metadata, num_layers) if window else [FULL] * num_layers,
        "sliding_window": window or None,
        "rope_parameters": _rotations(metadata, stored, head_dim),
        "rope_scaling": None,
        "mlp_layer_types": ["sparse" if sparse else "dense" for sparse in is_sparse],
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.number("expert_shared_feed_forward_length"),
        "moe_routed_scaling_factor": metadata.real("expert_weights_scale", 1.0),
        "norm_topk_prob": metadata.flag("expert_weights_norm"),
    }


def _check_gate(metadata: Metadata, stored: Mapping[str, Any], num_heads: int) -> None:
    """Raise UnsupportedModelError for a gate for each number of a head, as Laguna M has them."""
    gate = stored.get("blk.0.attn_gate.weight")
    if gate is not None and int(gate.shape[-1]) > num_heads:
        raise UnsupportedModelError(
            f"{metadata.path}: tensor 'blk.0.attn_gate.weight' has {int(gate.shape[-1])} rows for "
            f"{num_heads} heads; a gate for each number of a head is not supported"
        )


def _kinds(metadata: Metadata, num_layers: int) -> list[str]:
    if metadata.has("laguna.attention.sliding_window_pattern"):
        has_window = metadata.have_windows(num_layers)
    else:
        has_window = [i % INTERVAL > 0 for i in range(num_layers)]
    return [SLIDING if has else FULL for has in has_window]


def _rotations(
    metadata: Metadata, stored: Mapping[str, Any], head_dim: int
) -> dict[str, dict[str, Any]]:
    """Of layers that see all keys, and of those with a window."""
    theta = metadata.real("rope.freq_base", 10000.0)
    full = rope_scaling(metadata, stored, theta, head_dim) or {"rope_type": "default"}
    # The model's own factor, which llama.cpp replaces by YaRN's.
    if full["rope_type"] == "yarn" and metadata.has("laguna.rope.scaling.yarn_attn_factor"):
        full["attention_factor"] = metadata.real("rope.scaling.yarn_attn_factor")
    full["rope_theta"] = theta
    sliding = {
        "rope_type": "default",
        "rope_theta": metadata.real("rope.freq_base_swa", theta),
    }
    turned = metadata.number("rope.dimension_count", head_dim)
    turned_in_windows = metadata.number("rope.dimension_count_swa", turned)
    return {
        FULL: full | {"partial_rotary_factor": turned / head_dim},
        SLIDING: sliding | {"partial_rotary_factor": turned_in_windows / head_dim},
    }
