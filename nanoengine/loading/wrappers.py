"""Checkpoints of models for images and text, of which the text model alone is loaded.

Tables of names; reads no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# Classes in config.json's `architectures`, each with the text models that it may wrap: the
# `model_type` of its `text_config`, and the architecture that this is. Qwen2-VL's first checkpoints
# have the text model's keys beside those for images, and one `model_type` for both.
WRAPPERS: Mapping[str, Mapping[str, str]] = {
    "Apertus1p5ForConditionalGeneration": {"apertus1p5_text": "ApertusForCausalLM"},
    "AyaVisionForConditionalGeneration": {
        "cohere": "CohereForCausalLM",
        "cohere2": "Cohere2ForCausalLM",
    },
    "Cohere2VisionForConditionalGeneration": {
        "cohere2": "Cohere2ForCausalLM",
        "cohere2_moe": "Cohere2MoeForCausalLM",
    },
    "Exaone4_5_ForConditionalGeneration": {
        "exaone4": "Exaone4ForCausalLM",
        "exaone4_5_text": "Exaone4ForCausalLM",
    },
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
    "Glm46VForConditionalGeneration": {"glm4v_text": "Glm4ForCausalLM"},
    "Glm4vForConditionalGeneration": {"glm4v_text": "Glm4ForCausalLM"},
    "Glm4vMoeForConditionalGeneration": {"glm4v_moe_text": "Glm4MoeForCausalLM"},
    "Idefics3ForConditionalGeneration": {"llama": "LlamaForCausalLM"},
    "InternVLForConditionalGeneration": {
        "llama": "LlamaForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
    },
    "Lfm2VlForConditionalGeneration": {"lfm2": "Lfm2ForCausalLM"},
    "Lfm3VlForConditionalGeneration": {"lfm3": "Lfm3ForCausalLM"},
    "LlavaForConditionalGeneration": {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
    },
    "LlavaNextForConditionalGeneration": {
        "granite": "GraniteForCausalLM",
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
    },
    "LlavaOnevisionForConditionalGeneration": {"qwen2": "Qwen2ForCausalLM"},
    "MiniCPMV4_6ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Mistral3ForConditionalGeneration": {
        "ministral3": "Ministral3ForCausalLM",
        "mistral": "MistralForCausalLM",
        "mistral4": "Mistral4ForCausalLM",
    },
    "MuseGlimmerForConditionalGeneration": {"muse_glimmer_text": "MuseGlimmerForCausalLM"},
    "Qwen2VLForConditionalGeneration": {
        "qwen2_vl": "Qwen2ForCausalLM",
        "qwen2_vl_text": "Qwen2ForCausalLM",
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "qwen2_5_vl": "Qwen2ForCausalLM",
        "qwen2_5_vl_text": "Qwen2ForCausalLM",
    },
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
    "Qwen3VLMoeForConditionalGeneration": {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"},
    "SmolVLMForConditionalGeneration": {"llama": "LlamaForCausalLM"},
}
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
)


def _sizes(*values: int) -> dict[str, Any]:
    """By the keys in SIZES."""
    return dict(zip(SIZES, values, strict=True))


_QWEN_2_VL = _sizes(8192, 29568, 80, 64, 8, 152064, 32768) | {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
# transformers leaves out of a `text_config` what its class has by default, sizes too: the values of
# these, where the architecture alone has none or others, by `model_type`.
TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "cohere": _sizes(8192, 22528, 40, 64, 64, 256000, 8192),
    "cohere2": _sizes(8192, 22528, 40, 64, 64, 256000, 8192),
    "granite": _sizes(4096, 11008, 32, 32, 32, 32000, 2048),
    "llama": _sizes(4096, 11008, 32, 32, 32, 32000, 2048),
    "mistral": _sizes(4096, 14336, 32, 32, 8, 32000, 131072),
    "mistral4": _sizes(4096, 12288, 36, 32, 32, 131072, 1048576),
    "qwen2": _sizes(4096, 22016, 32, 32, 32, 151936, 32768),
    "qwen2_5_vl": _QWEN_2_VL,
    "qwen2_5_vl_text": _QWEN_2_VL,
    "qwen2_vl": _QWEN_2_VL,
    "qwen2_vl_text": _QWEN_2_VL,
    "qwen3": _sizes(4096, 22016, 32, 32, 32, 151936, 32768),
    "qwen3_moe": _sizes(2048, 6144, 24, 32, 4, 151936, 32768),
    "qwen3_vl_moe_text": _sizes(2048, 5632, 24, 16, 16, 151936, 128000)
    | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    | {"norm_topk_prob": True, "rope_theta": 5e5},
    "qwen3_vl_text": _sizes(4096, 22016, 32, 32, 32, 151936, 128000) | {"rope_theta": 5e5},
}
# Keys of config.json that count for the text model, too; they override those of `text_config`.
TIED = "tie_word_embeddings"
OUTER_KEYS = ("auto_map", "eos_token_id", "quantization_config", TIED)
# Names of the text model's tensors begin in one of these ways, by the version of transformers
# that saved them, and with the second part in a checkpoint of the text model alone.
PREFIXES = (
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("model.embed_tokens.", "model.embed_tokens."),
    ("model.layers.", "model.layers."),
    ("model.norm.", "model.norm."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
    ("mtp.", "mtp."),
)


def text_config(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config.json that the text model would have alone, with what transformers left out; None
    if it is not there.
    """
    inner = content.get("text_config", content if "vision_config" in content else None)
    if not isinstance(inner, dict):
        return None
    kind = inner.get("model_type")
    defaults = TEXT_DEFAULTS.get(kind, {}) if isinstance(kind, str) else {}
    outer = {key: content[key] for key in OUTER_KEYS if key in content}
    if inner.get(TIED) is True:  # as in transformers, to which one of the two is enough
        outer.pop(TIED, None)
    return {**defaults, **inner} | outer


def text_names(stored: Iterable[str]) -> dict[str, str]:
    """The text model's tensors: the names that they would have alone -> those in the checkpoint."""
    found: dict[str, str] = {}
    for name in stored:
        for theirs, ours in PREFIXES:
            if name.startswith(theirs):
                found.setdefault(ours + name.removeprefix(theirs), name)
                break
    return found


def about_others(wrapper: str, others: Iterable[str]) -> str:
    """Which tensors of a checkpoint are not the text model's, for the plan."""
    names = [name.removeprefix("model.") for name in others]
    parts = ", ".join(sorted({name.split(".")[0] for name in names})) or "none"
    return (
        f"the text model of a {wrapper}; its other {len(names)} tensors ({parts}) are not loaded, "
        "so it takes no images"
    )
