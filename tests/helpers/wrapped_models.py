"""Tiny models for images and text, by the names of their classes."""

from __future__ import annotations

from tiny_model import COMMON, HYBRID, HYBRID_EXPERTS, TinyModel
from tiny_models import TINY
from transformers import (
    AyaVisionConfig,
    AyaVisionForConditionalGeneration,
    Cohere2VisionConfig,
    Cohere2VisionForConditionalGeneration,
    Exaone4_5_Config,
    Exaone4_5_ForConditionalGeneration,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    Lfm2VlConfig,
    Lfm2VlForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA = COMMON | {"query_pre_attn_scalar": 24, "sliding_window": 13, "pad_token_id": None}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
SIGLIP = VISION | {"model_type": "siglip_vision_model", "vision_use_head": False}
GLM_VISION = {
    **{"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32},
    **{"out_hidden_size": 64, "image_size": 28, "patch_size": 14},
}
HALF_TURNED = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "mrope_section": [1, 1, 2],
}
QWEN_TEXT = COMMON | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
}
WRAPPED = {
    "AyaVisionForConditionalGeneration": TinyModel(
        AyaVisionConfig,
        AyaVisionForConditionalGeneration,
        {
            "text_config": COMMON | TINY["cohere2"].settings | {"model_type": "cohere2"},
            "vision_config": SIGLIP,
        },
    ),
    "Cohere2VisionForConditionalGeneration": TinyModel(
        Cohere2VisionConfig,
        Cohere2VisionForConditionalGeneration,
        {
            "text_config": COMMON | TINY["cohere2"].settings | {"model_type": "cohere2"},
            "vision_config": SIGLIP,
            "alignment_intermediate_size": 32,
        },
    ),
    "Exaone4_5_ForConditionalGeneration": TinyModel(
        Exaone4_5_Config,
        Exaone4_5_ForConditionalGeneration,
        {
            "text_config": COMMON | TINY["exaone4"].settings | {"model_type": "exaone4"},
            "vision_config": QWEN_VISION | {"num_key_value_heads": 1},
        },
    ),
    "Gemma3ForConditionalGeneration": TinyModel(
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        {"text_config": GEMMA, "vision_config": VISION, "mm_tokens_per_image": 4},
    ),
    "Gemma4ForConditionalGeneration": TinyModel(
        Gemma4Config,
        Gemma4ForConditionalGeneration,
        {
            "text_config": COMMON
            | TINY["gemma4-shared"].settings
            | {"model_type": "gemma4_text", "pad_token_id": 0},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "position_embedding_size": 64,
            },
            "audio_config": None,
        },
    ),
    "Glm4vForConditionalGeneration": TinyModel(
        Glm4vConfig,
        Glm4vForConditionalGeneration,
        {"text_config": COMMON | {"rope_parameters": HALF_TURNED}, "vision_config": GLM_VISION},
    ),
    "Glm4vMoeForConditionalGeneration": TinyModel(
        Glm4vMoeConfig,
        Glm4vMoeForConditionalGeneration,
        {
            "text_config": COMMON
            | {
                "rope_parameters": HALF_TURNED,
                "n_routed_experts": 6,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 24,
                "routed_scaling_factor": 1.7,
            },
            "vision_config": GLM_VISION,
        },
    ),
    "Idefics3ForConditionalGeneration": TinyModel(
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        {"text_config": COMMON | {"model_type": "llama"}, "vision_config": VISION},
    ),
    "InternVLForConditionalGeneration": TinyModel(
        InternVLConfig,
        InternVLForConditionalGeneration,
        {
            "text_config": COMMON | {"model_type": "qwen2"},
            "vision_config": VISION | {"patch_size": [14, 14], "image_size": [28, 28]},
        },
    ),
    "InternVLForConditionalGeneration, qwen3_moe": TinyModel(
        InternVLConfig,
        InternVLForConditionalGeneration,
        {
            "text_config": COMMON | TINY["qwen3-moe"].settings | {"model_type": "qwen3_moe"},
            "vision_config": VISION | {"patch_size": [14, 14], "image_size": [28, 28]},
            "tie_word_embeddings": False,
        },
    ),
    "Lfm2VlForConditionalGeneration": TinyModel(
        Lfm2VlConfig,
        Lfm2VlForConditionalGeneration,
        {
            "text_config": COMMON
            | TINY["lfm2"].settings
            | {"model_type": "lfm2", "tie_word_embeddings": True},
            "vision_config": {
                "model_type": "siglip2_vision_model",
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_patches": 16,
            },
            "projector_hidden_size": 32,
        },
    ),
    "LlavaForConditionalGeneration": TinyModel(
        LlavaConfig,
        LlavaForConditionalGeneration,
        {
            "text_config": COMMON | {"model_type": "llama"},
            "vision_config": VISION | {"model_type": "clip_vision_model"},
        },
    ),
    "LlavaNextForConditionalGeneration": TinyModel(
        LlavaNextConfig,
        LlavaNextForConditionalGeneration,
        {
            "text_config": COMMON | {"model_type": "mistral", "sliding_window": 13},
            "vision_config": VISION | {"model_type": "clip_vision_model"},
        },
    ),
    "LlavaOnevisionForConditionalGeneration": TinyModel(
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        {
            "text_config": COMMON | {"model_type": "qwen2"},
            "vision_config": SIGLIP,
        },
    ),
    "Qwen2VLForConditionalGeneration": TinyModel(
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        {"text_config": QWEN_TEXT, "vision_config": {"depth": 1, "embed_dim": 32, "num_heads": 2}},
    ),
    "Qwen2_5_VLForConditionalGeneration": TinyModel(
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        {"text_config": QWEN_TEXT, "vision_config": QWEN_VISION},
    ),
    "Qwen3_5ForConditionalGeneration": TinyModel(
        Qwen3_5Config,
        Qwen3_5ForConditionalGeneration,
        {
            "text_config": COMMON | HYBRID | {"model_type": "qwen3_5_text"},
            "vision_config": QWEN_VISION,
        },
    ),
    "Qwen3_5MoeForConditionalGeneration": TinyModel(
        Qwen3_5MoeConfig,
        Qwen3_5MoeForConditionalGeneration,
        {
            "text_config": COMMON | HYBRID | HYBRID_EXPERTS | {"model_type": "qwen3_5_moe_text"},
            "vision_config": QWEN_VISION,
        },
    ),
    "Qwen3VLForConditionalGeneration": TinyModel(
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        {
            "text_config": COMMON
            | {
                "model_type": "qwen3_vl_text",
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 5e6,
                    "mrope_section": [4, 2, 2],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]},
        },
    ),
    "Qwen3VLMoeForConditionalGeneration": TinyModel(
        Qwen3VLMoeConfig,
        Qwen3VLMoeForConditionalGeneration,
        {
            "text_config": COMMON
            | TINY["qwen3-moe"].settings
            | {"rope_parameters": QWEN_TEXT["rope_parameters"] | {"mrope_interleaved": True}},
            "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]},
        },
    ),
    "SmolVLMForConditionalGeneration": TinyModel(
        SmolVLMConfig,
        SmolVLMForConditionalGeneration,
        {"text_config": COMMON | {"model_type": "llama"}, "vision_config": VISION},
    ),
    # Its head is not tied to its embeddings.
    "Mistral3ForConditionalGeneration": TinyModel(
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        {
            "text_config": COMMON | {"model_type": "mistral", "sliding_window": None},
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 16},
            "tie_word_embeddings": False,
        },
    ),
    "Mistral3ForConditionalGeneration, ministral3": TinyModel(
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        {
            "text_config": COMMON | TINY["ministral3"].settings | {"model_type": "ministral3"},
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 16},
            "tie_word_embeddings": False,
        },
    ),
}
