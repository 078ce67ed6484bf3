"""The metadata of a GGUF file as a Hugging Face configuration, or the reason why there is none.

Reads no weight: of the tensors it takes names and shapes, and the divisors of the RoPE. What the
tensors become, convert.py knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nanoengine.errors import CorruptModelError, UnsupportedModelError
from nanoengine.loading.gguf.metadata import Metadata
from nanoengine.loading.refused import about_architecture
from nanoengine.models.rope import yarn_attention_factor

ARCHITECTURES = {
    "gemma3": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",  # Mistral and Mixtral, too
    "olmoe": "OlmoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
# What no key of a GGUF says: llama.cpp has it in its code.
FIXED_SETTINGS: dict[str, dict[str, Any]] = {
    "olmoe": {"norm_topk_prob": False},
    "qwen3moe": {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "smollm3": {"no_rope_layer_interval": 4},
}
WITH_EXPERTS = ("llama", "olmoe", "qwen3moe")
GEMMA_INTERVAL, GEMMA_LOCAL_THETA, GEMMA_27B_LAYERS = 6, 10000.0, 62
# Settings that change the arithmetic and that no Hugging Face config of these architectures can
# say.
REFUSED_KEYS = (
    "attention.scale",
    "expert_weights_scale",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
)
# The same of a RoPE scaling.
REFUSED_ROPE_KEYS = ("rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor")
_ROPE_FREQS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = frozenset({_ROPE_FREQS, _LONG_FACTORS, _SHORT_FACTORS})


def check_supported(metadata: Metadata) -> None:
    """Raises UnsupportedModelError for an architecture or a setting that cannot be run."""
    architecture = metadata.architecture
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(f"{metadata.path}: {about_architecture(architecture)}")
    experts = f"{architecture}.expert_count"
    if architecture not in WITH_EXPERTS and metadata.has(experts) and metadata.get(experts, int):
        about = about_architecture(f"{architecture}-moe")
        raise UnsupportedModelError(f"{metadata.path}: {experts!r} is set: {about}")
    for key in REFUSED_KEYS:
        full_key = f"{architecture}.{key}"
        if metadata.has(full_key) and metadata.get(full_key, float):
            raise UnsupportedModelError(f"{metadata.path}: {full_key!r} is set and not supported")
    if _window(metadata) and architecture not in ("gemma3", "llama", "phi3"):
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
    for key in ("attention.value_length", "rope.dimension_count"):
        may_differ = (
            metadata.architecture == "phi3" and key.startswith("rope") and turned < head_dim
        )
        if metadata.number(key, head_dim) != head_dim and not may_differ:
            raise UnsupportedModelError(
                f"{metadata.path}: {key} is {metadata.number(key)}, the head size {head_dim}; "
                "only equal sizes are supported"
            )
    if "token_embd.weight" not in stored:
        raise CorruptModelError(f"{metadata.path} has no tensor 'token_embd.weight'")
    if metadata.number("block_count") > len(stored):
        raise CorruptModelError(
            f"{metadata.path}: {metadata.number('block_count')} layers of {len(stored)} tensors"
        )
    theta = metadata.real("rope.freq_base", 10000.0)
    settings = FIXED_SETTINGS.get(metadata.architecture, {})
    if metadata.architecture == "phi3":
        settings = phi3_settings(metadata, turned, head_dim)
    elif metadata.architecture == "gemma3":
        settings = _gemma_settings(metadata, hidden_size // num_heads, head_dim)
    elif _num_experts(metadata):
        settings = settings | _experts_settings(metadata, stored)
    elif _window(metadata):
        settings = _mistral_settings(metadata, stored)
    return {
        "architectures": [ARCHITECTURES[metadata.architecture]],
        "model_type": metadata.architecture,
        "vocab_size": int(stored["token_embd.weight"].shape[-1]),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.number("feed_forward_length"),
        "num_hidden_layers": metadata.number("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.number("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.number("context_length"),
        "rms_norm_eps": metadata.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(metadata, stored, theta, head_dim),
        "attention_bias": "blk.0.attn_output.bias" in stored,
        "mlp_bias": "blk.0.ffn_up.bias" in stored,
        "tie_word_embeddings": "output.weight" not in stored,
        "torch_dtype": "bfloat16",
    } | settings


def phi3_settings(metadata: Metadata, turned: int, head_dim: int) -> dict[str, Any]:
    """turned: how many of the head_dim values of a head RoPE turns."""
    part = turned / head_dim
    if int(head_dim * part) != turned:  # the quotient was rounded down
        part = math.nextafter(part, 1.0)
    return {
        "partial_rotary_factor": part,
        "original_max_position_embeddings": _original_length(metadata),
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


def _experts_settings(metadata: Metadata, stored: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
    }
    if metadata.architecture == "qwen3moe":
        layers = range(metadata.number("block_count"))
        return settings | {
            "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
            "mlp_only_layers": [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" not in stored],
        }
    if metadata.architecture == "olmoe":
        return settings
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": settings.pop("num_experts"),
        "sliding_window": _window(metadata),
        **settings,
    }


def _gemma_settings(metadata: Metadata, width_per_head: int, head_dim: int) -> dict[str, Any]:
    """The layers with a window, their RoPE and the scale of scores, as llama.cpp knows them.

    width_per_head: of the residual stream, by which the model of 27B scales its scores.
    """
    num_layers = metadata.number("block_count")
    interval = metadata.number("attention.sliding_window_pattern", GEMMA_INTERVAL)
    window = int(metadata.get("gemma3.attention.sliding_window", int, 0))
    kinds = ["sliding" if window and (i + 1) % interval else "full" for i in range(num_layers)]
    return {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [f"{kind}_attention" for kind in kinds],
        "sliding_window": window or 4096,
        "rope_local_base_freq": metadata.real("rope.freq_base_swa", GEMMA_LOCAL_THETA),
        "query_pre_attn_scalar": width_per_head if num_layers == GEMMA_27B_LAYERS else head_dim,
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 0.0) or None,
    }


def _window(metadata: Metadata) -> int | None:
    """None without one. One that no text is longer than is none; 0 says that there is none."""
    window = int(metadata.get(f"{metadata.architecture}.attention.sliding_window", int, 0))
    return window if 0 < window < metadata.number("context_length") else None


def _original_length(metadata: Metadata) -> int:
    length = metadata.number("context_length")
    return metadata.number("rope.scaling.original_context_length", length)


def _rope_scaling(
    metadata: Metadata, stored: Mapping[str, Any], theta: float, head_dim: int
) -> dict[str, Any] | None:
    kind = metadata.get(f"{metadata.architecture}.rope.scaling.type", str, "none")
    attention_factor = metadata.real("rope.scaling.attn_factor", 1.0)
    for key in REFUSED_ROPE_KEYS:
        if metadata.has(f"{metadata.architecture}.{key}"):
            raise UnsupportedModelError(f"{metadata.path}: {key!r} is set and not supported")
    given = stored.keys() & ROPE_TENSORS
    if kind in ("none", "longrope") and given == {_LONG_FACTORS, _SHORT_FACTORS}:
        return {
            "rope_type": "longrope",
            "long_factor": _factors(stored[_LONG_FACTORS]),
            "short_factor": _factors(stored[_SHORT_FACTORS]),
            "attention_factor": attention_factor,
            "original_max_position_embeddings": _original_length(metadata),
        }
    if kind == "yarn" and not given:
        return _yarn_scaling(metadata, attention_factor)
    if attention_factor == 1.0:
        if kind == "none" and given == {_ROPE_FREQS}:
            return _llama3_scaling(metadata.path, stored[_ROPE_FREQS], theta, head_dim)
        if kind == "none" and not given:
            return None
        if kind == "linear" and not given:
            return {"rope_type": "linear", "factor": metadata.real("rope.scaling.factor")}
    raise UnsupportedModelError(
        f"{metadata.path}: RoPE scaling {kind!r} with attention factor {attention_factor} and "
        f"tensors {sorted(given)} is not supported; supported: none, linear, llama3, yarn, longrope"
    )


def _factors(stored: Any) -> list[float]:
    return [float(str(value)) for value in np.array(stored.data, dtype=np.float32).reshape(-1)]


def _yarn_scaling(metadata: Metadata, attention_factor: float) -> dict[str, Any]:
    """llama.cpp multiplies YaRN's own attention factor with the one in the file."""
    factor = metadata.real("rope.scaling.factor")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": _original_length(metadata),
        "attention_factor": yarn_attention_factor(factor) * attention_factor,
        "beta_fast": metadata.real("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.real("rope.scaling.yarn_beta_slow", 1.0),
    }


def _llama3_scaling(path: Path, freqs: Any, theta: float, head_dim: int) -> dict[str, Any]:
    """llama.cpp stores Llama 3's rule as one divisor per frequency; find the rule they come
    from."""
    divisors = np.array(freqs.data, dtype=np.float64).reshape(-1)
    factor = float(divisors.max())
    low, high, original = 1.0, 4.0, 8192  # the same in every Llama 3
    # [head_dim / 2]: 1 for short waves, `factor` for long ones, blended between.
    turns = original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - blend) / factor + blend)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise UnsupportedModelError(f"{path}: {_ROPE_FREQS!r} does not follow Llama 3's rule")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
