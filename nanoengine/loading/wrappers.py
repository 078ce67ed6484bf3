"""Checkpoints of models for images and text, of which the text model alone is loaded.

Tables of names; reads no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# Classes in config.json's `architectures`, each with the text models that it may wrap: the
# `model_type` of its `text_config`, and the architecture that this is.
WRAPPERS: Mapping[str, Mapping[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
    "Lfm2VlForConditionalGeneration": {"lfm2": "Lfm2ForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
    "Mistral3ForConditionalGeneration": {
        "ministral3": "Ministral3ForCausalLM",
        "mistral": "MistralForCausalLM",
    },
}
# Keys of config.json that count for the text model, too; they override those of `text_config`.
OUTER_KEYS = ("auto_map", "eos_token_id", "quantization_config", "tie_word_embeddings")
# Names of the text model's tensors begin in one of these ways, by the version of transformers
# that saved them, and with the second part in a checkpoint of the text model alone.
PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
    ("mtp.", "mtp."),
)


def text_config(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config.json that the text model would have alone; None if it is not there."""
    inner = content.get("text_config")
    if not isinstance(inner, dict):
        return None
    return inner | {key: content[key] for key in OUTER_KEYS if key in content}


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
