"""The settings of LFM2 in a GGUF file, by the names of Hugging Face (llama.cpp's
conversion/lfm2.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoengine.errors import UnsupportedModelError
from nanoengine.loading.gguf.experts import SIGMOID
from nanoengine.loading.gguf.metadata import Metadata
from nanoengine.loading.gguf.structure import MAX_COUNT
from nanoengine.loading.layer_kinds import CONV, FULL
from nanoengine.loading.short_convs import ADJUSTS

LFM2 = ("lfm2", "lfm2moe")


def kv_heads(metadata: Metadata, num_layers: int) -> int:
    """Of layers with attention; the file has a list with 0 for each of the others. Raises
    UnsupportedModelError.
    """
    key = f"{metadata.architecture}.attention.head_count_kv"
    listed = metadata.get(key, list)
    found = {num for num in listed if num != 0}
    num = found.pop() if len(found) == 1 else None
    if len(listed) != num_layers or type(num) is not int or not 0 < num <= MAX_COUNT:
        raise UnsupportedModelError(
            f"{metadata.path}: {key!r} is {listed[:9]!r}... for {num_layers} layers; it must be 0 "
            "for layers with a convolution, and one number for all others"
        )
    return num


def short_conv_settings(
    metadata: Metadata, stored: Mapping[str, Any], num_layers: int
) -> dict[str, Any]:
    """Convolutions are in the layers that have their tensors. Raises UnsupportedModelError for
    scores of experts that no LFM2 has.
    """
    convs = [f"blk.{i}.shortconv.conv.weight" in stored for i in range(num_layers)]
    settings: dict[str, Any] = {
        ADJUSTS: False,
        "conv_L_cache": metadata.number("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in stored),
        "layer_types": [CONV if is_conv else FULL for is_conv in convs],
        "norm_eps": metadata.real("attention.layer_norm_rms_epsilon"),
    }
    if metadata.architecture == "lfm2":
        return settings
    scores = metadata.number("expert_gating_func", SIGMOID)
    if scores != SIGMOID:
        raise UnsupportedModelError(
            f"{metadata.path}: 'lfm2moe.expert_gating_func' is {scores}; only {SIGMOID}, the "
            "sigmoid, is supported"
        )
    return settings | {
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "norm_topk_prob": True,  # as llama.cpp has it in its code
        "num_dense_layers": metadata.count("leading_dense_block_count"),
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in stored),
    }
