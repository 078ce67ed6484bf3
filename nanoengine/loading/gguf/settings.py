"""The metadata of a GGUF file as a Hugging Face configuration, or the reason why there is none.

Reads no weight: of the tensors it takes names and shapes, and the divisors of the RoPE. What the
tensors become, convert.py knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nanoengine.errors import CorruptModelError, UnsupportedModelError
from nanoengine.loading.gguf.gemma4 import gemma4_settings
from nanoengine.loading.gguf.latent import latent_settings
from nanoengine.loading.gguf.metadata import Metadata
from nanoengine.loading.gguf.rope_scaling import (
    ROPE_FREQS,
    TEMPERATURE,
    original_length,
    rope_scaling,
)
from nanoengine.loading.layer_kinds import FULL, RECURRENT, SLIDING
from nanoengine.loading.refused import about_architecture

ARCHITECTURES = {
    "deepseek2": "DeepseekV2ForCausalLM",  # DeepSeek-V3 and GLM 4.7 Flash, too
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5-moe": "Ernie4_5_MoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "hunyuan-dense": "HunYuanDenseV1ForCausalLM",
    "hunyuan-moe": "HunYuanMoEV1ForCausalLM",
    "llama": "LlamaForCausalLM",  # Mistral and Mixtral, too
    "mistral3": "Ministral3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    # llama.cpp separates what Qwen3-Next has in one tensor, and then both are the same.
    "qwen3next": "Qwen3_5MoeForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
# What no key of a GGUF says: llama.cpp has it in its code.
FIXED_SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek2": {"model_type": "deepseek_v2"},
    "ernie4_5-moe": {"model_type": "ernie4_5_moe"},
    "glm4moe": {"model_type": "glm4_moe"},
    "gpt-oss": {"model_type": "gpt_oss"},
    "hunyuan-dense": {"model_type": "hunyuan_v1_dense"},
    "hunyuan-moe": {"model_type": "hunyuan_v1_moe"},
    "mistral3": {"model_type": "ministral3"},
    "olmoe": {"norm_topk_prob": False},
    "qwen2moe": {"model_type": "qwen2_moe", "norm_topk_prob": False},
    "qwen35": {"model_type": "qwen3_5_text"},
    "qwen35moe": {"model_type": "qwen3_5_moe_text"},
    "qwen3moe": {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "qwen3next": {"model_type": "qwen3_5_moe_text"},
    "seed_oss": {"model_type": "seed_oss", "attention_bias": True},
    "smollm3": {"no_rope_layer_interval": 4},
}
HYBRIDS = ("qwen35", "qwen35moe", "qwen3next")
QWEN_EXPERTS = ("qwen2moe", "qwen35moe", "qwen3moe", "qwen3next")
SCALED_EXPERTS = ("deepseek2", "glm4moe")
WITH_EXPERTS = (
    "ernie4_5-moe",
    "gemma4",
    *SCALED_EXPERTS,
    "gpt-oss",
    "granitemoe",
    "hunyuan-moe",
    "llama",
    "olmoe",
    *QWEN_EXPERTS,
)
MAY_TURN_A_PART = ("glm4", "glm4moe", "phi3", *HYBRIDS)
WITH_WINDOWS = ("exaone4", "gemma3", "gemma4", "gpt-oss", "llama", "phi3")
SOFTMAX, SIGMOID = 1, 2  # gguf.ExpertGatingFuncType
EXAONE_INTERVAL = 4
GEMMA_INTERVAL, GEMMA_LOCAL_THETA, GEMMA_27B_LAYERS = 6, 10000.0, 62
# Settings that change the arithmetic, and Hugging Face's keys for them, which Granite alone has.
GRANITES = ("granite", "granitemoe")
GRANITE_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def check_supported(metadata: Metadata) -> None:
    """Raises UnsupportedModelError for an architecture or a setting that cannot be run."""
    architecture = metadata.architecture
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(f"{metadata.path}: {about_architecture(architecture)}")
    experts = f"{architecture}.expert_count"
    if architecture not in WITH_EXPERTS and metadata.has(experts) and metadata.get(experts, int):
        about = about_architecture(f"{architecture}-moe")
        raise UnsupportedModelError(f"{metadata.path}: {experts!r} is set: {about}")
    scaled = () if architecture in SCALED_EXPERTS else ("expert_weights_scale",)
    tempered = () if architecture == "mistral3" else (TEMPERATURE,)
    refused = () if architecture in GRANITES else GRANITE_KEYS
    for key in (*refused, *scaled, *tempered):
        full_key = f"{architecture}.{key}"
        if metadata.has(full_key) and metadata.get(full_key, float):
            raise UnsupportedModelError(f"{metadata.path}: {full_key!r} is set and not supported")
    if metadata.has("glm4.rope.dimension_sections"):
        raise UnsupportedModelError(
            f"{metadata.path}: 'glm4.rope.dimension_sections' is set, as of a model for images, "
            "which is not supported"
        )
    if _window(metadata) and architecture not in WITH_WINDOWS:
        raise UnsupportedModelError(
            f"{metadata.path}: '{architecture}.attention.sliding_window' is set and not supported"
        )


def model_config(metadata: Metadata, stored: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the model, in the spelling that every transformers release reads.

    Raises CorruptModelError and UnsupportedModelError.
    """
    num_heads = metadata.number("attention.head_count")
    hidden_size = metadata.number("embedding_length")
    head_dim = metadata.number("attention.key_length", max(hidden_size // num_heads, 1))
    turned = metadata.number("rope.dimension_count", head_dim)
    of_head = ("attention.value_length", "rope.dimension_count")
    for key in () if metadata.architecture == "deepseek2" else of_head:
        may_turn_a_part = metadata.architecture in MAY_TURN_A_PART
        may_differ = may_turn_a_part and key.startswith("rope") and turned < head_dim
        if metadata.number(key, head_dim) != head_dim and not may_differ:
            raise UnsupportedModelError(
                f"{metadata.path}: {key} is {metadata.number(key)}, the head size {head_dim}; "
                "only equal sizes are supported"
            )
    if "token_embd.weight" not in stored:
        raise CorruptModelError(f"{metadata.path} has no tensor 'token_embd.weight'")
    num_layers = metadata.number("block_count") - _num_drafting(metadata)
    if not 0 < num_layers <= len(stored):
        raise CorruptModelError(f"{metadata.path}: {num_layers} layers of {len(stored)} tensors")
    settings = dict(FIXED_SETTINGS.get(metadata.architecture, {}))
    biased = "q" if metadata.architecture == "glm4" else "output"
    if metadata.architecture in MAY_TURN_A_PART:
        settings["partial_rotary_factor"] = turned_part(turned, head_dim)
    if metadata.architecture == "gemma3":
        settings |= _gemma_settings(metadata, hidden_size // num_heads, head_dim)
    if metadata.architecture in GRANITES:
        settings |= _granite_settings(metadata, head_dim)
    return {
        "architectures": [ARCHITECTURES[metadata.architecture]],
        "model_type": metadata.architecture,
        "vocab_size": int(stored["token_embd.weight"].shape[-1]),
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.number("context_length"),
        "rms_norm_eps": metadata.real("attention.layer_norm_rms_epsilon"),
        "attention_bias": f"blk.0.attn_{biased}.bias" in stored,
        "mlp_bias": "blk.0.ffn_up.bias" in stored,
        "tie_word_embeddings": "output.weight" not in stored,
        "torch_dtype": "bfloat16",
        **settings,
        **_layer_settings(metadata, stored, num_heads, head_dim),
        **_own_settings(metadata, stored, num_layers),
    }


def _layer_settings(
    metadata: Metadata, stored: Mapping[str, Any], num_heads: int, head_dim: int
) -> dict[str, Any]:
    """The sizes of a layer and its RoPE, as far as all layers have the same."""
    if metadata.architecture == "gemma4":
        return gemma4_settings(metadata, stored, stored.get(ROPE_FREQS))
    theta = metadata.real("rope.freq_base", 10000.0)
    # Of a model whose layers all have experts, it is of no layer.
    inner_size = None
    if metadata.architecture in QWEN_EXPERTS:
        inner_size = metadata.number("expert_feed_forward_length")
    settings = {
        "intermediate_size": metadata.number("feed_forward_length", inner_size),
        "num_key_value_heads": metadata.number("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rope_theta": theta,
        "rope_scaling": rope_scaling(metadata, stored, theta, head_dim),
    }
    if metadata.architecture == "deepseek2":
        settings |= latent_settings(metadata, num_heads)
    return settings


def _own_settings(metadata: Metadata, stored: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """What is not of all architectures: original positions, experts, recurrent layers, windows."""
    if metadata.architecture == "phi3":
        return _phi3_settings(metadata)
    if metadata.architecture == "gemma4":
        return {}
    if metadata.architecture == "exaone4":
        return _exaone_settings(metadata, num_layers)
    settings: dict[str, Any] = {}
    if metadata.architecture in HYBRIDS:
        settings = _recurrent_settings(metadata, stored, num_layers)
    if _num_experts(metadata):
        return settings | _experts_settings(metadata, stored, num_layers)
    if _window(metadata) and metadata.architecture != "gemma3":
        return _mistral_settings(metadata, stored)
    return settings


def turned_part(turned: int, head_dim: int) -> float:
    """Of the head_dim values of a head those that RoPE turns, as a quotient."""
    part = turned / head_dim
    if int(head_dim * part) != turned:  # the quotient was rounded down
        part = math.nextafter(part, 1.0)
    return part


def _phi3_settings(metadata: Metadata) -> dict[str, Any]:
    return {
        "original_max_position_embeddings": original_length(metadata),
        "sliding_window": _window(metadata),
    }


def _mistral_settings(metadata: Metadata, stored: Mapping[str, Any]) -> dict[str, Any]:
    """A Llama with a window in every layer."""
    biased = sorted(name for name in stored if name.endswith(".bias"))
    if biased:
        raise UnsupportedModelError(
            f"{metadata.path}: a sliding window beside {biased[0]!r} is not supported"
        )
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": _window(metadata),
    }


def _num_experts(metadata: Metadata) -> int:
    return int(metadata.get(f"{metadata.architecture}.expert_count", int, 0))


def _num_drafting(metadata: Metadata) -> int:
    """Layers at the end that guess a token further, and that the model does not need."""
    return int(metadata.get(f"{metadata.architecture}.nextn_predict_layers", int, 0))


def _experts_settings(
    metadata: Metadata, stored: Mapping[str, Any], num_layers: int
) -> dict[str, Any]:
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
        if metadata.architecture != "qwen3moe":
            shared = metadata.number("expert_shared_feed_forward_length")
            settings["shared_expert_intermediate_size"] = shared
        return settings
    if metadata.architecture in SCALED_EXPERTS:
        return settings | _deepseek_settings(metadata, stored, dense)
    if metadata.architecture == "gpt-oss":
        return settings | {
            "num_local_experts": settings["num_experts"],
            "sliding_window": _window(metadata),
            "sliding_window_pattern": 2,
        }
    if metadata.architecture == "granitemoe":
        return settings | {"num_local_experts": settings["num_experts"]}
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
        "sliding_window": _window(metadata),
        **settings,
    }


def _ernie_settings(metadata: Metadata, sparse: list[int]) -> dict[str, Any]:
    arch = metadata.architecture
    return {
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "moe_k": metadata.number("expert_used_count"),
        "moe_layer_end_index": max(sparse, default=0),
        "moe_layer_interval": metadata.number("interleave_moe_layer_step", 1),
        "moe_layer_start_index": min(sparse, default=1),
        "moe_num_experts": metadata.number("expert_count"),
        "moe_num_shared_experts": metadata.get(f"{arch}.expert_shared_count", int, 0),
    }


def _deepseek_settings(
    metadata: Metadata, stored: Mapping[str, Any], dense: list[int]
) -> dict[str, Any]:
    """DeepSeek's experts, which GLM has, too. Raises UnsupportedModelError for scores of a kind
    that no model of the architecture has.
    """
    of_glm = metadata.architecture == "glm4moe"
    by_sigmoid = of_glm or any(name.endswith("exp_probs_b.bias") for name in stored)
    # Older files do not say it.
    scores = metadata.number("expert_gating_func", SIGMOID if by_sigmoid else SOFTMAX)
    renormalises = metadata.get(f"{metadata.architecture}.expert_weights_norm", bool, False)
    if scores != SIGMOID and (of_glm or scores != SOFTMAX or renormalises):
        raise UnsupportedModelError(
            f"{metadata.path}: '{metadata.architecture}.expert_gating_func' is {scores}; only "
            f"{SIGMOID}, the sigmoid, is supported"
            + f", and {SOFTMAX}, the softmax, without 'expert_weights_norm'"
            * (not of_glm)
        )
    of_kind: dict[str, Any] = {}
    if scores == SOFTMAX:
        of_kind = {"topk_method": "group_limited_greedy"}  # of one group: greedy
    elif not of_glm:
        of_kind = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return of_kind | {
        "attention_bias": "blk.0.attn_q.bias" in stored,
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


def _recurrent_settings(
    metadata: Metadata, stored: Mapping[str, Any], num_layers: int
) -> dict[str, Any]:
    """Gated delta rules are in the layers that have its tensors."""
    keys, heads = metadata.number("ssm.group_count"), metadata.number("ssm.time_step_rank")
    inner = metadata.number("ssm.inner_size")
    if heads % keys or inner % heads:
        raise CorruptModelError(
            f"{metadata.path}: {keys} key heads, {heads} value heads and {inner} values of a "
            "recurrent layer; each must be a multiple of the one before"
        )
    kinds = [RECURRENT if f"blk.{i}.ssm_a" in stored else FULL for i in range(num_layers)]
    return {
        "layer_types": kinds,
        "linear_conv_kernel_dim": metadata.number("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.number("ssm.state_size"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
    }


def _gemma_settings(metadata: Metadata, width_per_head: int, head_dim: int) -> dict[str, Any]:
    """The layers with a window, their RoPE and the scale of scores, as llama.cpp knows them.

    width_per_head: of the residual stream, by which the model of 27B scales its scores.
    """
    num_layers = metadata.number("block_count")
    interval = metadata.number("attention.sliding_window_pattern", GEMMA_INTERVAL)
    window = int(metadata.get("gemma3.attention.sliding_window", int, 0))
    kinds = [SLIDING if window and (i + 1) % interval else FULL for i in range(num_layers)]
    return {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": kinds,
        "sliding_window": window or 4096,
        "rope_local_base_freq": metadata.real("rope.freq_base_swa", GEMMA_LOCAL_THETA),
        "query_pre_attn_scalar": width_per_head if num_layers == GEMMA_27B_LAYERS else head_dim,
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 0.0) or None,
    }


def _exaone_settings(metadata: Metadata, num_layers: int) -> dict[str, Any]:
    """A window that no text is longer than counts, too: layers without one do not rotate. Older
    files do not say which layers have it.
    """
    window = int(metadata.get("exaone4.attention.sliding_window", int, 0)) or None
    has_window = [bool((i + 1) % EXAONE_INTERVAL) for i in range(num_layers)]
    if metadata.has("exaone4.attention.sliding_window_pattern"):
        has_window = metadata.have_windows(num_layers)
    kinds = [SLIDING if window and has else FULL for has in has_window]
    return {"sliding_window": window, "layer_types": kinds}


def _granite_settings(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    """To llama.cpp 0 is no factor, and scores are divided by the root of head_dim then."""
    usual = {"attention.scale": head_dim**-0.5}
    return {
        name: metadata.real(key, 0.0) or usual.get(key, 1.0) for key, name in GRANITE_KEYS.items()
    }


def _window(metadata: Metadata) -> int | None:
    """None without one. One that no text is longer than is none; 0 says that there is none."""
    window = int(metadata.get(f"{metadata.architecture}.attention.sliding_window", int, 0))
    return window if 0 < window < metadata.number("context_length") else None
