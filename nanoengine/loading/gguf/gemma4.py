"""Gemma 4's metadata of a GGUF file as keys of config.json: what differs from layer to layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nanoengine.errors import UnsupportedModelError
from nanoengine.loading.gguf.metadata import Metadata
from nanoengine.loading.gguf.rope_scaling import rope_scaling
from nanoengine.loading.layer_kinds import FULL, SLIDING

UNTURNED = 1e20  # divisors of pairs that are not turned are far above it


def gemma4_settings(metadata: Metadata, stored: Mapping[str, Any], divisors: Any) -> dict[str, Any]:
    """Keys of config.json that override those of other architectures.

    divisors: of the RoPE of the layers that see all keys, [head_dim / 2]; None: all are 1.
    Raises CorruptModelError and UnsupportedModelError.
    """
    num_layers, full_dim = metadata.number("block_count"), metadata.number("attention.key_length")
    is_sliding = metadata.have_windows(num_layers)
    num_shared = metadata.count("attention.shared_kv_layers")
    kv_heads = metadata.of_layers("attention.head_count_kv", num_layers)
    inner_sizes = metadata.of_layers("feed_forward_length", num_layers)
    usual = dict(zip(is_sliding, kv_heads, strict=True)).get(True, kv_heads[0])
    own = range(num_layers - num_shared)
    window_dim = metadata.number("attention.key_length_swa", full_dim)
    _check_rope(metadata, window_dim)
    return {
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [SLIDING if sliding else FULL for sliding in is_sliding],
        "sliding_window": metadata.number("attention.sliding_window"),
        "head_dim": window_dim,
        "num_key_value_heads": usual,
        "per_layer_config": {
            str(layer): {"head_dim": full_dim, "num_key_value_heads": kv_heads[layer]}
            for layer in range(num_layers)
            if not is_sliding[layer]
        },
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in stored for i in own),
        "num_kv_shared_layers": num_shared,
        "intermediate_size": inner_sizes[0],
        "use_double_wide_mlp": _are_wide(metadata, inner_sizes, len(own)),
        "hidden_size_per_layer_input": metadata.count("embedding_length_per_layer_input"),
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 30.0) or None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": metadata.real("rope.freq_base", 10000.0),
                "partial_rotary_factor": _turned(metadata, divisors, full_dim),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": metadata.real("rope.freq_base_swa", 10000.0),
            },
        },
        "rope_scaling": None,
        **_experts(metadata),
    }


def _check_rope(metadata: Metadata, window_dim: int) -> None:
    """Raises UnsupportedModelError for one that is scaled, or partial in layers with a window."""
    turned = metadata.number("rope.dimension_count_swa", window_dim)
    if turned != window_dim or rope_scaling(metadata, {}, 1.0, window_dim):
        raise UnsupportedModelError(
            f"{metadata.path}: a RoPE of Gemma 4 that is scaled, or turns {turned} of {window_dim} "
            "numbers of a head in layers with a window, is not supported"
        )


def _are_wide(metadata: Metadata, sizes: Sequence[int], num_own: int) -> bool:
    """Whether the feed-forwards of the layers that share KV are twice as wide."""
    usual, shared = set(sizes[:num_own]), set(sizes[num_own:])
    if len(usual) > 1 or not shared <= {sizes[0], 2 * sizes[0]} or len(shared) > 1:
        raise UnsupportedModelError(
            f"{metadata.path}: 'gemma4.feed_forward_length' is {list(sizes)}; it may differ in the "
            "layers that share keys and values alone, and be twice as much there"
        )
    return shared == {2 * sizes[0]}


def _turned(metadata: Metadata, divisors: Any, head_dim: int) -> float:
    """The part of the pairs that is turned."""
    if divisors is None:
        return 1.0
    values = np.array(divisors.data, dtype=np.float32).reshape(-1)
    num_turned = int((values == 1).sum())
    is_right = (values[:num_turned] == 1).all() and (values[num_turned:] > UNTURNED).all()
    if len(values) != head_dim // 2 or not num_turned or not is_right:
        raise UnsupportedModelError(
            f"{metadata.path}: the divisors of Gemma 4's RoPE must be 1 for the first pairs and "
            "beyond all measure for the others"
        )
    return 2 * num_turned / head_dim


def _experts(metadata: Metadata) -> dict[str, Any]:
    if not metadata.count("expert_count"):
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": metadata.number("expert_count"),
        "top_k_experts": metadata.number("expert_used_count"),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
    }
