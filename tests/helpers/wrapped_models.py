"""Tiny models for images and text, by the names of their classes."""

from __future__ import annotations

from tiny_model import COMMON, HYBRID, HYBRID_EXPERTS, TinyModel
from tiny_models import TINY

APERTUS_1_5 = {"model_type": "apertus1p5_text", "vocab_size": 280, "output_vocab_size": 260}
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
    "Apertus1p5ForConditionalGeneration": TinyModel(
        "apertus1p5",
        {
            "text_config": COMMON | APERTUS_1_5,
            "vision_config": {
                "codebook_size": 8,
                "embed_dim": 8,
                "latent_channels": 8,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "attn_resolutions": [],
                "resolution": 28,
            },
            "audio_config": {"model_type": "wavtokenizer_encoder", "codebook_size": 8},
            "image_token_id": 262,
            "audio_token_id": 263,
            "image_token_offset": 264,
            "audio_token_offset": 272,
        },
    ),
    "AyaVisionForConditionalGeneration": TinyModel(
        "aya_vision",
        {
            "text_config": COMMON | TINY["cohere2"].settings | {"model_type": "cohere2"},
            "vision_config": SIGLIP,
        },
    ),
    "AyaVisionForConditionalGeneration, cohere": TinyModel(
        "aya_vision",
        {
            "text_config": COMMON | TINY["cohere"].settings | {"model_type": "cohere"},
            "vision_config": SIGLIP,
        },
    ),
    "Cohere2VisionForConditionalGeneration": TinyModel(
        "cohere2_vision",
        {
            "text_config": COMMON | TINY["cohere2"].settings | {"model_type": "cohere2"},
            "vision_config": SIGLIP,
            "alignment_intermediate_size": 32,
        },
    ),
    "Cohere2VisionForConditionalGeneration, cohere2_moe": TinyModel(
        "cohere2_vision",
        {
            "text_config": COMMON | TINY["cohere2-moe"].settings | {"model_type": "cohere2_moe"},
            "vision_config": SIGLIP,
            "alignment_intermediate_size": 32,
        },
    ),
    "Exaone4_5_ForConditionalGeneration": TinyModel(
        "exaone4_5",
        {
            "text_config": COMMON | TINY["exaone4"].settings | {"model_type": "exaone4"},
            "vision_config": QWEN_VISION | {"num_key_value_heads": 1},
        },
    ),
    "Gemma3ForConditionalGeneration": TinyModel(
        "gemma3",
        {"text_config": GEMMA, "vision_config": VISION, "mm_tokens_per_image": 4},
    ),
    "Gemma4ForConditionalGeneration": TinyModel(
        "gemma4",
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
    "Glm46VForConditionalGeneration": TinyModel(
        "glm46v",
        {
            "text_config": COMMON | {"model_type": "glm4v_text", "rope_parameters": HALF_TURNED},
            "vision_config": GLM_VISION | {"model_type": "glm4v_vision"},
        },
    ),
    "Glm4vForConditionalGeneration": TinyModel(
        "glm4v",
        {"text_config": COMMON | {"rope_parameters": HALF_TURNED}, "vision_config": GLM_VISION},
    ),
    "Glm4vMoeForConditionalGeneration": TinyModel(
        "glm4v_moe",
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
        "idefics3",
        {"text_config": COMMON | {"model_type": "llama"}, "vision_config": VISION},
    ),
    "InternVLForConditionalGeneration": TinyModel(
        "internvl",
        {
            "text_config": COMMON | {"model_type": "qwen2"},
            "vision_config": VISION | {"patch_size": [14, 14], "image_size": [28, 28]},
        },
    ),
    "InternVLForConditionalGeneration, qwen3_moe": TinyModel(
        "internvl",
        {
            "text_config": COMMON | TINY["qwen3-moe"].settings | {"model_type": "qwen3_moe"},
            "vision_config": VISION | {"patch_size": [14, 14], "image_size": [28, 28]},
            "tie_word_embeddings": False,
        },
    ),
    "Lfm2VlForConditionalGeneration": TinyModel(
        "lfm2_vl",
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
    "Lfm3VlForConditionalGeneration": TinyModel(
        "lfm3_vl",
        {
            "text_config": COMMON | TINY["lfm3"].settings | {"model_type": "lfm3"},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
            },
            "projector_hidden_size": 32,
        },
    ),
    "LlavaForConditionalGeneration": TinyModel(
        "llava",
        {
            "text_config": COMMON | {"model_type": "llama"},
            "vision_config": VISION | {"model_type": "clip_vision_model"},
        },
    ),
    "LlavaNextForConditionalGeneration": TinyModel(
        "llava_next",
        {
            "text_config": COMMON | {"model_type": "mistral", "sliding_window": 13},
            "vision_config": VISION | {"model_type": "clip_vision_model"},
        },
    ),
    "LlavaNextForConditionalGeneration, granite": TinyModel(
        "llava_next",
        {
            "text_config": COMMON | TINY["granite"].settings | {"model_type": "granite"},
            "vision_config": SIGLIP,
        },
    ),
    "LlavaOnevisionForConditionalGeneration": TinyModel(
        "llava_onevision",
        {
            "text_config": COMMON | {"model_type": "qwen2"},
            "vision_config": SIGLIP,
        },
    ),
    "MiniCPMV4_6ForConditionalGeneration": TinyModel(
        "minicpmv4_6",
        {
            "text_config": COMMON | HYBRID | {"model_type": "qwen3_5_text"},
            "vision_config": VISION,
        },
    ),
    "MuseGlimmerForConditionalGeneration": TINY["muse-glimmer"],
    "Qwen2VLForConditionalGeneration": TinyModel(
        "qwen2_vl",
        {"text_config": QWEN_TEXT, "vision_config": {"depth": 1, "embed_dim": 32, "num_heads": 2}},
    ),
    "Qwen2_5_VLForConditionalGeneration": TinyModel(
        "qwen2_5_vl",
        {"text_config": QWEN_TEXT, "vision_config": QWEN_VISION},
    ),
    "Qwen3_5ForConditionalGeneration": TinyModel(
        "qwen3_5",
        {
            "text_config": COMMON | HYBRID | {"model_type": "qwen3_5_text"},
            "vision_config": QWEN_VISION,
        },
    ),
    "Qwen3_5MoeForConditionalGeneration": TinyModel(
        "qwen3_5_moe",
        {
            "text_config": COMMON | HYBRID | HYBRID_EXPERTS | {"model_type": "qwen3_5_moe_text"},
            "vision_config": QWEN_VISION,
        },
    ),
    "Qwen3VLForConditionalGeneration": TinyModel(
        "qwen3_vl",
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
        "qwen3_vl_moe",
        {
            "text_config": COMMON
            | TINY["qwen3-moe"].settings
            | {"rope_parameters": QWEN_TEXT["rope_parameters"] | {"mrope_interleaved": True}},
            "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]},
        },
    ),
    "SmolVLMForConditionalGeneration": TinyModel(
        "smolvlm",
        {"text_config": COMMON | {"model_type": "llama"}, "vision_config": VISION},
    ),
    # Its head is not tied to its embeddings.
    "Mistral3ForConditionalGeneration": TinyModel(
        "mistral3",
        {
            "text_config": COMMON | {"model_type": "mistral", "sliding_window": None},
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 16},
            "tie_word_embeddings": False,
        },
    ),
    "Mistral3ForConditionalGeneration, ministral3": TinyModel(
        "mistral3",
        {
            "text_config": COMMON | TINY["ministral3"].settings | {"model_type": "ministral3"},
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 16},
            "tie_word_embeddings": False,
        },
    ),
    "Mistral3ForConditionalGeneration, mistral4": TINY["mistral4"],
}
