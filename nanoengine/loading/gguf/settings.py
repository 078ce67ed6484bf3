"""The metadata of a GGUF file as a Hugging Face configuration, or the reason why there is none.

Reads no weight: of the tensors it takes names and shapes, and the divisors of the RoPE. What the
tensors become, convert.py knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nanoengine.errors import CorruptModelError, UnsupportedModelError
from nanoengine.loading.gguf.experts import (
    QWEN_EXPERTS,
    SCALED_EXPERTS,
    WITH_EXPERTS,
    experts_settings,
)
from nanoengine.loading.gguf.families import (
    GRANITE_KEYS,
    KIMIS,
    MINICPM,
    cohere_settings,
    exaone_settings,
    gemma2_settings,
    gemma3_settings,
    granite_settings,
    kimi_settings,
    mellum_settings,
    mistral_settings,
    muse_settings,
    olmo_settings,
    phi3_settings,
    recurrent_settings,
)
from nanoengine.loading.gguf.gemma4 import gemma4_settings
from nanoengine.loading.gguf.laguna import laguna_settings
from nanoengine.loading.gguf.latent import LATENTS, latent_settings
from nanoengine.loading.gguf.mamba import HYBRIDS_OF_MAMBA, NEMOTRONS, mamba_settings
from nanoengine.loading.gguf.metadata import Metadata
from nanoengine.loading.gguf.rope_scaling import ROPE_FREQS, TEMPERATURE, rope_scaling
from nanoengine.loading.gguf.short_convs import LFM2, kv_heads, short_conv_settings
from nanoengine.loading.refused import about_architecture

ARCHITECTURES = {
    "afmoe": "AfmoeForCausalLM",
    "apertus": "ApertusForCausalLM",
    "arcee": "ArceeForCausalLM",
    "bailingmoe2": "BailingMoeV2ForCausalLM",
    "bailingmoe3": "BailingMoeV3ForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "cohere2moe": "Cohere2MoeForCausalLM",
    "command-r": "CohereForCausalLM",
    "deepseek2": "DeepseekV2ForCausalLM",  # DeepSeek-V3, GLM 4.7 Flash and Youtu-LLM, too
    "dots1": "Dots1ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5-moe": "Ernie4_5_MoeForCausalLM",
    "exaone": "ExaoneForCausalLM",
    "exaone-moe": "ExaoneMoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "falcon-h1": "FalconH1ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",  # Solar Open, too
    "gpt-oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitehybrid": "GraniteMoeHybridForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "hunyuan-dense": "HunYuanDenseV1ForCausalLM",
    "hunyuan-moe": "HunYuanMoEV1ForCausalLM",
    "jais2": "Jais2ForCausalLM",
    "kimi-linear": "KimiLinearForCausalLM",
    "laguna": "LagunaForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
    "llama": "LlamaForCausalLM",  # Mistral and Mixtral, too
    "mellum": "MellumForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
    MINICPM: "GraniteForCausalLM",  # whose factors it has
    "mistral3": "Ministral3ForCausalLM",
    "muse-glimmer": "MuseGlimmerForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "nemotron_h_moe": "NemotronHForCausalLM",
    "olmo2": "Olmo2ForCausalLM",  # OLMo 3, too
    "olmoe": "OlmoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    # Of models for images: RoPE turns a token of a text by one position in all its sections.
    "qwen2vl": "Qwen2ForCausalLM",
    "qwen3vl": "Qwen3ForCausalLM",
    "qwen3vlmoe": "Qwen3MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    # llama.cpp separates what Qwen3-Next has in one tensor, and then both are the same.
    "qwen3next": "Qwen3_5MoeForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
# What no key of a GGUF says: llama.cpp has it in its code.
FIXED_SETTINGS: dict[str, dict[str, Any]] = {
    "afmoe": {"mup_enabled": True},
    "apertus": {"hidden_act": "xielu"},
    "arcee": {"hidden_act": "relu2"},
    "bailingmoe2": {"model_type": "sarvam_moe"},
    "bailingmoe3": {"model_type": "bailing_hybrid"},
    "cohere2moe": {"model_type": "cohere2_moe"},
    "command-r": {"model_type": "cohere"},
    "deepseek2": {"model_type": "deepseek_v2"},
    "ernie4_5-moe": {"model_type": "ernie4_5_moe"},
    "exaone-moe": {"model_type": "exaone_moe"},
    "gemma": {"hidden_act": "gelu_pytorch_tanh"},
    "glm4moe": {"model_type": "glm4_moe"},
    "gpt-oss": {"model_type": "gpt_oss"},
    "hunyuan-dense": {"model_type": "hunyuan_v1_dense"},
    "hunyuan-moe": {"model_type": "hunyuan_v1_moe"},
    "jais2": {"hidden_act": "relu2"},
    "kimi-linear": {"model_type": "kimi_linear"},
    "lfm2moe": {"model_type": "lfm2_moe"},
    "mellum": {"norm_topk_prob": True},
    "minimax-m2": {"model_type": "minimax_m2"},
    "mistral3": {"model_type": "ministral3"},
    "muse-glimmer": {"model_type": "muse_glimmer_text", "post_norm_eps": 1e-8},
    "nemotron": {"hidden_act": "relu2"},
    "olmoe": {"norm_topk_prob": False},
    "qwen2moe": {"model_type": "qwen2_moe", "norm_topk_prob": False},
    "qwen2vl": {"model_type": "qwen2"},
    "qwen35": {"model_type": "qwen3_5_text"},
    "qwen35moe": {"model_type": "qwen3_5_moe_text"},
    "qwen3moe": {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "qwen3vl": {"model_type": "qwen3"},
    "qwen3vlmoe": {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "qwen3next": {"model_type": "qwen3_5_moe_text"},
    "seed_oss": {"model_type": "seed_oss", "attention_bias": True},
    "smollm3": {"no_rope_layer_interval": 4},
    "starcoder2": {"hidden_act": "gelu_pytorch_tanh"},
}
ROTATE_IN_WINDOWS = ("afmoe", "exaone-moe", "exaone4")
HYBRIDS = ("qwen35", "qwen35moe", "qwen3next")
MAY_TURN_A_PART = (
    *("bailingmoe2", "glm4", "glm4moe", "laguna", "minimax-m2"),
    *("nemotron", "phi3", "stablelm", *HYBRIDS),
)
WITH_WINDOWS = (
    *("cohere2", *ROTATE_IN_WINDOWS, "gemma2", "gemma3", "gemma4", "gpt-oss", "llama", "olmo2"),
    *("cohere2moe", "laguna", "mellum", "muse-glimmer", "phi3"),
)
GRANITES = ("granite", "granitehybrid", "granitemoe", MINICPM)
COHERES = ("cohere2", "cohere2moe", "command-r")
LAYER_NORMS = ("jais2", "nemotron", "stablelm", "starcoder2")
# Of generation_config.json: its key in a GGUF.
SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def check_supported(metadata: Metadata) -> None:
    """Raises UnsupportedModelError for an architecture or a setting that cannot be run."""
    architecture = metadata.architecture
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(f"{metadata.path}: {about_architecture(architecture)}")
    experts = f"{architecture}.expert_count"
    if architecture not in WITH_EXPERTS and metadata.count("expert_count"):
        about = about_architecture(f"{architecture}-moe")
        raise UnsupportedModelError(f"{metadata.path}: {experts!r} is set: {about}")
    scaled = () if architecture in SCALED_EXPERTS else ("expert_weights_scale",)
    tempered = () if architecture == "mistral3" else (TEMPERATURE,)
    refused = {*GRANITE_KEYS} if architecture not in GRANITES else set()
    if architecture in (*COHERES, "muse-glimmer"):
        refused -= {"logit_scale"}
    for key in (*refused, *scaled, *tempered):
        full_key = f"{architecture}.{key}"
        if metadata.has(full_key) and metadata.get(full_key, float):
            raise UnsupportedModelError(f"{metadata.path}: {full_key!r} is set and not supported")
    if not metadata.flag("attention.causal", default=True):
        raise UnsupportedModelError(
            f"{metadata.path}: '{architecture}.attention.causal' is false: the model generates no "
            "text"
        )
    if metadata.has("glm4.rope.dimension_sections"):
        raise UnsupportedModelError(
            f"{metadata.path}: 'glm4.rope.dimension_sections' is set, as of a model for images, "
            "which is not supported"
        )
    if metadata.window() and architecture not in WITH_WINDOWS:
        raise UnsupportedModelError(
            f"{metadata.path}: '{architecture}.attention.sliding_window' is set and not supported"
        )


def model_config(metadata: Metadata, stored: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the model, in the spelling that every transformers release reads.

    Raises CorruptModelError and UnsupportedModelError.
    """
    num_heads = _num_heads(metadata)
    hidden_size = metadata.number("embedding_length")
    head_dim = metadata.number("attention.key_length", max(hidden_size // num_heads, 1))
    turned = metadata.number("rope.dimension_count", head_dim)
    of_head = ("attention.value_length", "rope.dimension_count")
    for key in () if metadata.architecture in LATENTS else of_head:
        may_turn_a_part = metadata.architecture in MAY_TURN_A_PART
        may_differ = may_turn_a_part and key.startswith("rope") and turned < head_dim
        # Nothing is turned: the converter takes the width of the stream instead of head_dim.
        may_differ |= metadata.architecture in NEMOTRONS and key.startswith("rope")
        if metadata.number(key, head_dim) != head_dim and not may_differ:
            raise UnsupportedModelError(
                f"{metadata.path}: {key} is {metadata.number(key)}, the head size {head_dim}; "
                "only equal sizes are supported"
            )
    if "token_embd.weight" not in stored:
        raise CorruptModelError(f"{metadata.path} has no tensor 'token_embd.weight'")
    # Without those at the end that guess a token further, which the model does not need.
    num_layers = metadata.number("block_count") - metadata.count("nextn_predict_layers")
    if not 0 < num_layers <= len(stored):
        raise CorruptModelError(f"{metadata.path}: {num_layers} layers of {len(stored)} tensors")
    settings = dict(FIXED_SETTINGS.get(metadata.architecture, {}))
    biased = "q" if metadata.architecture in ("glm4", "stablelm") else "output"
    if metadata.architecture in MAY_TURN_A_PART:
        settings["partial_rotary_factor"] = turned_part(turned, head_dim)
    if metadata.architecture == "gemma2":
        settings |= gemma2_settings(metadata, hidden_size // num_heads, head_dim)
    if metadata.architecture == "gemma3":
        settings |= gemma3_settings(metadata, hidden_size // num_heads, head_dim)
    if metadata.architecture in GRANITES:
        settings |= granite_settings(metadata, head_dim)
    if metadata.architecture in COHERES:
        settings |= cohere_settings(metadata, num_layers)
    elif metadata.architecture in LAYER_NORMS:
        settings["rms_norm_eps"] = metadata.real("attention.layer_norm_epsilon")
        settings["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in stored
    else:
        settings["rms_norm_eps"] = metadata.real("attention.layer_norm_rms_epsilon")
    return {
        "architectures": [ARCHITECTURES[metadata.architecture]],
        "model_type": metadata.architecture,
        "vocab_size": int(stored["token_embd.weight"].shape[-1]),
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.number("context_length"),
        "attention_bias": f"blk.0.attn_{biased}.bias" in stored,
        "mlp_bias": "blk.0.ffn_up.bias" in stored,
        "tie_word_embeddings": "output.weight" not in stored,
        "torch_dtype": "bfloat16",
        **settings,
        **_layer_settings(metadata, stored, num_layers, num_heads, head_dim),
        **_own_settings(metadata, stored, num_layers),
    }


def _num_heads(metadata: Metadata) -> int:
    """Of a layer: Laguna's differ, so of its first one."""
    if metadata.architecture != "laguna":
        return metadata.number("attention.head_count")
    return metadata.of_layers("attention.head_count", metadata.number("block_count"))[0]


def sampling_config(metadata: Metadata) -> dict[str, Any]:
    """What the file says of sampling, with the keys of generation_config.json."""
    found: dict[str, Any] = {}
    for name, key in SAMPLING.items():
        if metadata.has(key):
            found[name] = metadata.get(key, int) if name == "top_k" else metadata.float32(key)
    return found


def _layer_settings(
    metadata: Metadata, stored: Mapping[str, Any], num_layers: int, num_heads: int, head_dim: int
) -> dict[str, Any]:
    """The sizes of a layer and its RoPE, as far as all layers have the same."""
    if metadata.architecture == "gemma4":
        return gemma4_settings(metadata, stored, stored.get(ROPE_FREQS))
    if metadata.architecture in HYBRIDS_OF_MAMBA:
        return mamba_settings(metadata, stored, num_layers, head_dim)
    if metadata.architecture == "laguna":
        return laguna_settings(metadata, stored, num_layers, head_dim)
    theta = metadata.real("rope.freq_base", 10000.0)
    # Of a model whose layers all have experts, it is of no layer.
    inner_size = None
    if metadata.architecture in QWEN_EXPERTS:
        inner_size = metadata.number("expert_feed_forward_length")
    if metadata.architecture in LFM2:
        num_kv_heads = kv_heads(metadata, num_layers)
    elif metadata.architecture in LATENTS:  # one row, which is of all heads
        num_kv_heads = num_heads
    else:
        num_kv_heads = metadata.number("attention.head_count_kv", num_heads)
    settings = {
        "intermediate_size": metadata.number("feed_forward_length", inner_size),
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rope_theta": theta,
        "rope_scaling": rope_scaling(metadata, stored, theta, head_dim),
    }
    if metadata.architecture in LATENTS:
        settings |= latent_settings(metadata, num_heads)
    return settings


def _own_settings(metadata: Metadata, stored: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """What is not of all architectures: original positions, experts, recurrent layers, windows."""
    if metadata.architecture == "phi3":
        return phi3_settings(metadata)
    if metadata.architecture in ("gemma4", "laguna", *HYBRIDS_OF_MAMBA):
        return {}
    if metadata.architecture == "olmo2":
        return olmo_settings(metadata, num_layers)
    if metadata.architecture in LFM2:
        return short_conv_settings(metadata, stored, num_layers)
    settings: dict[str, Any] = {}
    if metadata.architecture in HYBRIDS:
        settings = recurrent_settings(metadata, stored, num_layers)
    if metadata.architecture in KIMIS:
        settings = kimi_settings(metadata, stored, num_layers)
    if metadata.architecture == "muse-glimmer":
        return muse_settings(metadata, stored, num_layers)
    if metadata.architecture == "mellum":
        settings = mellum_settings(metadata, num_layers)
    if metadata.architecture in ROTATE_IN_WINDOWS:
        settings = exaone_settings(metadata, num_layers)
    if metadata.architecture == "deepseek2" and not metadata.count("expert_count"):
        return {"architectures": ["YoutuForCausalLM"], "model_type": "youtu"}
    if metadata.count("expert_count"):
        return settings | experts_settings(metadata, stored, num_layers)
    if metadata.window() and metadata.architecture not in (
        *("cohere2", "exaone4", "gemma2", "gemma3"),
    ):
        return mistral_settings(metadata, stored)
    return settings


def turned_part(turned: int, head_dim: int) -> float:
    """Of the head_dim values of a head those that RoPE turns, as a quotient."""
    part = turned / head_dim
    if int(head_dim * part) != turned:  # the quotient was rounded down
        part = math.nextafter(part, 1.0)
    return part
