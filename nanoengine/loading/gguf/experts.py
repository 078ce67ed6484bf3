"""The settings of experts in a GGUF file, by the names of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoengine.errors import UnsupportedModelError
from nanoengine.loading.gguf.metadata import Metadata

QWEN_EXPERTS = ("mellum", "qwen2moe", "qwen35moe", "qwen3moe", "qwen3next", "qwen3vlmoe")
NONE_SHARED = ("mellum", "qwen3moe", "qwen3vlmoe")  # of these
SCALED_EXPERTS = (
    *("afmoe", "bailingmoe2", "bailingmoe3", "deepseek2", "dots1", "exaone-moe"),
    *("glm4moe", "kimi-linear", "laguna", "nemotron_h_moe"),
)
WITH_EXPERTS = (
    "cohere2moe",
    *("ernie4_5-moe", "gemma4", "gpt-oss", "granitehybrid", "granitemoe", "hunyuan-moe"),
    *("lfm2moe", "llama", "minimax-m2", "olmoe", *QWEN_EXPERTS, *SCALED_EXPERTS),
)
SOFTMAX, SIGMOID = 1, 2  # gguf.ExpertGatingFuncType


def experts_settings(
    metadata: Metadata, stored: Mapping[str, Any], num_layers: int
) -> dict[str, Any]:
    """How many experts, how they are chosen, and which layers have none. Raises CorruptModelError
    and UnsupportedModelError.
    """
    settings: dict[str, Any] = {
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
    }
    dense = [i for i in range(num_layers) if f"blk.{i}.ffn_gate_inp.weight" not in stored]
    if metadata.architecture in QWEN_EXPERTS:
        settings |= {
            "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
            "mlp_only_layers": dense,
        }
        if metadata.architecture not in NONE_SHARED:
            shared = metadata.number("expert_shared_feed_forward_length")
            settings["shared_expert_intermediate_size"] = shared
        return settings
    if metadata.architecture in SCALED_EXPERTS:
        return settings | _deepseek_settings(metadata, stored, dense)
    if metadata.architecture == "gpt-oss":
        return settings | {
            "num_local_experts": settings["num_experts"],
            "sliding_window": metadata.window(),
            "sliding_window_pattern": 2,
        }
    if metadata.architecture == "cohere2moe":
        return settings | _cohere_settings(metadata, stored, num_layers)
    if metadata.architecture == "minimax-m2":
        _check_scores(metadata, metadata.number("expert_gating_func", SIGMOID), (SIGMOID,))
        return settings | {"num_local_experts": settings["num_experts"]}
    if metadata.architecture == "granitemoe":
        return settings | _granite_settings(metadata)
    if metadata.architecture == "olmoe":
        return settings
    if metadata.architecture == "hunyuan-moe":
        return {
            "intermediate_size": metadata.number("expert_feed_forward_length"),
            "moe_topk": settings["num_experts_per_tok"],
            "num_experts": settings["num_experts"],
            "num_shared_expert": metadata.number("expert_shared_count", 1),
        }
    if metadata.architecture == "ernie4_5-moe":
        return _ernie_settings(metadata, [i for i in range(num_layers) if i not in dense])
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": settings.pop("num_experts"),
        "sliding_window": metadata.window(),
        **settings,
    }


def _cohere_settings(
    metadata: Metadata, stored: Mapping[str, Any], num_layers: int
) -> dict[str, Any]:
    _check_scores(metadata, metadata.number("expert_gating_func", SIGMOID), (SIGMOID,))
    is_sparse = [f"blk.{i}.ffn_gate_inp.weight" in stored for i in range(num_layers)]
    return {
        "expert_selection_fn": "sigmoid",
        "intermediate_size": metadata.number("expert_feed_forward_length"),
        "mlp_layer_types": ["sparse" if sparse else "dense" for sparse in is_sparse],
        "norm_topk_prob": metadata.flag("expert_weights_norm"),
        "num_shared_experts": metadata.count("expert_shared_count"),
        "prefix_dense_intermediate_size": metadata.number("feed_forward_length"),
    }


def _ernie_settings(metadata: Metadata, sparse: list[int]) -> dict[str, Any]:
    return {
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "moe_k": metadata.number("expert_used_count"),
        "moe_layer_end_index": max(sparse, default=0),
        "moe_layer_interval": metadata.number("interleave_moe_layer_step", 1),
        "moe_layer_start_index": min(sparse, default=1),
        "moe_num_experts": metadata.number("expert_count"),
        "moe_num_shared_experts": metadata.count("expert_shared_count"),
    }


def _granite_settings(metadata: Metadata) -> dict[str, Any]:
    """With a feed-forward beside the experts it is another architecture."""
    shared: dict[str, Any] = {}
    if metadata.has("granitemoe.expert_shared_feed_forward_length"):
        shared = {
            "architectures": ["GraniteMoeSharedForCausalLM"],
            "model_type": "granitemoeshared",
            "shared_intermediate_size": metadata.number("expert_shared_feed_forward_length"),
        }
    return {"num_local_experts": metadata.number("expert_count"), **shared}


def _deepseek_settings(
    metadata: Metadata, stored: Mapping[str, Any], dense: list[int]
) -> dict[str, Any]:
    """DeepSeek's experts, which GLM and dots.llm1 have, too. Raises UnsupportedModelError for
    scores of a kind that no model of the architecture has.
    """
    of_glm = metadata.architecture != "deepseek2"
    by_sigmoid = of_glm or any(name.endswith("exp_probs_b.bias") for name in stored)
    # Older files do not say it.
    scores = metadata.number("expert_gating_func", SIGMOID if by_sigmoid else SOFTMAX)
    # llama.cpp has Kimi's in its code.
    renormalises = metadata.flag("expert_weights_norm") or metadata.architecture == "kimi-linear"
    _check_scores(metadata, scores, (SIGMOID,) if of_glm or renormalises else (SIGMOID, SOFTMAX))
    of_kind: dict[str, Any] = {}
    if metadata.architecture == "afmoe":
        of_kind = {"route_norm": renormalises}
    if scores == SOFTMAX:
        of_kind = {"topk_method": "group_limited_greedy"}  # of one group: greedy
    elif not of_glm:
        of_kind = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return of_kind | {
        "attention_bias": any(f"blk.0.attn_{part}.bias" in stored for part in ("q", "qkv")),
        "first_k_dense_replace": len(dense),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "n_group": metadata.number("expert_group_count", 1),
        "n_routed_experts": metadata.number("expert_count"),
        "n_shared_experts": metadata.number("expert_shared_count"),
        "norm_topk_prob": renormalises,
        "routed_scaling_factor": metadata.real("expert_weights_scale", 1.0),
        "topk_group": metadata.number("expert_group_used_count", 1),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in stored,
    }


def _check_scores(metadata: Metadata, scores: int, supported: tuple[int, ...]) -> None:
    if scores not in supported:
        raise UnsupportedModelError(
            f"{metadata.path}: '{metadata.architecture}.expert_gating_func' is {scores}; only "
            f"{SIGMOID}, the sigmoid, is supported"
            + f", and {SOFTMAX}, the softmax, without 'expert_weights_norm'"
            * (metadata.architecture == "deepseek2")
        )
