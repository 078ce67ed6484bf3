"""The table of architectures: how each differs from Llama's."""

from __future__ import annotations

from nanoengine.models.architecture import Architecture, ExpertNames, NormNames
from nanoengine.models.families import (
    COHERE,
    COHERE_DEFAULTS,
    ERNIE,
    ERNIE_DEFAULTS,
    GEMMA,
    GEMMA_2,
    GEMMA_2_DEFAULTS,
    GEMMA_4,
    GEMMA_4_DEFAULTS,
    GEMMA_DEFAULTS,
    GEMMA_NORMS,
    GLM,
    GRANITE_MULTIPLIERS,
    GRANITE_SWA,
    HUNYUAN,
    LATENT_DEFAULTS,
    LATENT_REQUIRES,
    LAYER_NORM,
    NORMS_AFTER,
    OLMO,
)
from nanoengine.models.hybrids import HYBRIDS
from nanoengine.models.mixtures import MIXTURES

_DENSE = {  # with attention in all layers
    "ApertusForCausalLM": Architecture(
        "Apertus (8B, 70B)",
        norms=NormNames(before_attention="attention_layernorm", before_mlp="feedforward_layernorm"),
        qk_norm="head",
        activation="xielu",
        is_gated=False,
        requires={
            "hidden_act": (None, "xielu"),
            "mlp_bias": (None, False),
            "post_norm": (None, False),
            "qk_norm": (None, True),
        },
        defaults={
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-5,
            "rope_theta": 12e6,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 12e6,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "ArceeForCausalLM": Architecture(
        "Arcee AFM (4.5B)",
        activation="relu2",
        is_gated=False,
        requires={"hidden_act": (None, "relu2")},
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
    "Cohere2ForCausalLM": Architecture(
        "Command R7B, Command A",
        **COHERE,
        windows="pattern",
        ropes_in_windows=True,
        defaults=COHERE_DEFAULTS | {"sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "CohereForCausalLM": Architecture(
        "Command R, Aya", **COHERE, defaults=COHERE_DEFAULTS | {"rope_theta": 5e5}
    ),
    "CwmForCausalLM": Architecture(
        "CWM (32B)",
        windows="pattern",
        requires={"hidden_act": (None, "silu"), "attention_bias": (None, False)},
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e6,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "sliding_window": 8192,
        },
    ),
    "Ernie4_5ForCausalLM": Architecture(
        "ERNIE 4.5 (0.3B)",
        **ERNIE,
        defaults=ERNIE_DEFAULTS | {"head_dim": 128, "num_key_value_heads": 2},
    ),
    "Exaone4ForCausalLM": Architecture(
        "EXAONE 4 (1.2B, 32B)",
        norms=NORMS_AFTER,
        qk_norm="head",
        windows="pattern",
        ropes_in_windows=True,
        defaults={
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
    "Gemma2ForCausalLM": Architecture(
        "Gemma 2 (2B, 9B, 27B)", **GEMMA_2, norms=GEMMA_NORMS, defaults=GEMMA_2_DEFAULTS
    ),
    "Gemma3ForCausalLM": Architecture(
        "Gemma 3 (270M to 27B)",
        **GEMMA,
        norms=GEMMA_NORMS,
        qk_norm="head",
        windows="pattern",
        ropes_by_kind=True,
        reads=("final_logit_softcapping", "query_pre_attn_scalar"),
        requires={
            "hidden_activation": ("gelu_pytorch_tanh",),
            # transformers' class of Gemma 3 ignores this key, other engines do not.
            "attn_logit_softcapping": (None,),
            "use_bidirectional_attention": (None, False),
        },
        defaults={
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "hidden_activation": "gelu_pytorch_tanh",
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
    ),
    "Gemma4ForCausalLM": Architecture(
        "Gemma 4 (E2B, E4B, 26B-A4B, 31B)",
        **GEMMA_4,
        layer_inputs=True,
        experts=ExpertNames(
            renormalises=True,
            block="",
            router="router.proj",
            top_k="top_k_experts",
            switch="enable_moe_block",
            beside=(
                "post_feedforward_layernorm_1",
                "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_2",
            ),
        ),
        defaults=GEMMA_4_DEFAULTS | {"hidden_size_per_layer_input": 256},
    ),
    "Gemma4UnifiedForCausalLM": Architecture(
        "Gemma 4 (12B)",
        **GEMMA_4,
        defaults=GEMMA_4_DEFAULTS | {"max_position_embeddings": 262144, "sliding_window": 1024},
    ),
    "GemmaForCausalLM": Architecture(
        "Gemma 1 (2B, 7B)",
        **GEMMA,
        requires={
            # To transformers "gelu" is its formula with tanh here.
            "hidden_act": ("gelu_pytorch_tanh", "gelu"),
            "hidden_activation": (None, "gelu_pytorch_tanh"),
            "use_bidirectional_attention": (None, False),
        },
        defaults=GEMMA_DEFAULTS
        | {
            "hidden_act": "gelu_pytorch_tanh",
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
        },
    ),
    "Glm4ForCausalLM": Architecture(
        "GLM 4 (9B, 32B of April 2025)",
        norms=NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
        **GLM,
    ),
    "GlmForCausalLM": Architecture("GLM 4 (9B of 2024 in transformers' form)", **GLM),
    "GraniteForCausalLM": Architecture("Granite 3 (dense, 2B, 8B)", reads=GRANITE_MULTIPLIERS),
    "GraniteSWAForCausalLM": Architecture(
        "Granite with windows and sinks (2B)",
        **GRANITE_SWA,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 128, "tie_word_embeddings": True},
    ),
    "HeliumForCausalLM": Architecture(
        "Helium 1 (2B)",
        norm_offset=0.0,
        out_bias=False,
        pairs_take_turns=True,
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "num_key_value_heads": 20,
            "rms_norm_eps": 1e-8,
            "rope_theta": 1e5,
        },
    ),
    "HunYuanDenseV1ForCausalLM": Architecture("Hunyuan (dense, 0.5B to 7B, also MT)", **HUNYUAN),
    "HyperCLOVAXForCausalLM": Architecture(
        "HyperCLOVA X SEED Think (14B)",
        norms=NormNames(after_attention="post_norm1", after_mlp="post_norm2"),
        keys={"logit_scale": "logits_scaling"},  # they are multiplied by it
        reads=(
            "attention_multiplier",
            "embedding_multiplier",
            "residual_multiplier",
            "logit_scale",
        ),
        requires={"hidden_act": (None, "silu"), "use_post_norm": (None, True)},
        defaults={
            "attention_multiplier": None,
            "embedding_multiplier": 1.0,
            "logit_scale": 1.0,
            "residual_multiplier": 1.0,
        },
    ),
    "InternLM3ForCausalLM": Architecture(
        "InternLM3 (8B)",
        keys={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
        },
    ),
    "IQuestCoderForCausalLM": Architecture(
        "IQuest-Coder (7B, 14B, 40B)",
        requires={
            "hidden_act": (None, "silu"),
            "clip_qkv": (None,),
            "use_sliding_window": (None, False),
        },
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
        },
    ),
    "Jais2ForCausalLM": Architecture(
        "Jais 2 (8B, 70B)",
        **LAYER_NORM,
        activation="relu2",
        is_gated=False,
        keys={"rms_norm_eps": "layer_norm_eps"},
        requires={"hidden_act": (None, "relu2")},
        defaults={
            "attention_bias": True,
            "max_position_embeddings": 8192,
            "mlp_bias": True,
            "rms_norm_eps": 1e-5,
        },
    ),
    "LlamaForCausalLM": Architecture(
        "Llama 2 to 3.3 and models of its shape, as SmolLM2 and TinyLlama"
    ),
    "Ministral3ForCausalLM": Architecture(
        "Ministral 3 (3B, 8B, 14B) and Devstral 2 (24B, 123B)",
        windows="every layer",
        scales_queries=True,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "MinistralForCausalLM": Architecture(
        "Ministral (8B of 2024)",
        windows="pattern",
        requires={"hidden_act": (None, "silu"), "attention_bias": (None, False)},
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "MistralForCausalLM": Architecture(
        "Mistral 7B, Nemo and Small (24B)",
        windows="every layer",
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    # transformers has no such class, but for images: see WRAPPERS.
    "MuseGlimmerForCausalLM": Architecture(
        "Muse Glimmer (30B)",
        norms=GEMMA_NORMS,
        norm_offset=1.0,
        last_norm_offset=0.0,
        norms_embeddings=True,
        qk_norm="head",
        norms_of_heads=(),
        windows="pattern",
        gate_proj=True,
        names={"self_attn.g_proj": "self_attn.gate_proj"},
        reads=(
            "final_logit_softcapping",
            "layer_rope_theta",
            "no_rope_layers",
            "output_multiplier",
            "post_norm_eps",
            "qk_scale_factor",
        ),
        requires={"hidden_activation": (None, "silu")},
        needs=("layer_rope_theta", "layer_types"),
        defaults={
            "final_logit_softcapping": 20.0,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "output_multiplier": 26**-0.5,
            "post_norm_eps": 1e-8,
            "qk_scale_factor": 3.87,
            "rms_norm_eps": 1e-5,
            "sliding_window": 2048,
        },
    ),
    "NemotronForCausalLM": Architecture(
        "Nemotron and Minitron (dense, 4B to 340B)",
        **LAYER_NORM,
        norm_offset=1.0,
        activation="relu2",
        is_gated=False,
        keys={"rms_norm_eps": "norm_eps"},
        reads=("partial_rotary_factor",),
        requires={"hidden_act": (None, "relu2")},
        defaults={
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
        },
    ),
    "Olmo2ForCausalLM": Architecture(
        "OLMo 2 (1B to 32B)",
        **OLMO,
        defaults={"rms_norm_eps": 1e-5},
    ),
    "Olmo3ForCausalLM": Architecture(
        "OLMo 3 (7B, 32B)",
        **OLMO,
        windows="pattern",
        ropes_by_kind=True,
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_local_base_freq": 500000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
    "Phi3ForCausalLM": Architecture(
        "Phi-3 and Phi-3.5 (mini, medium), Phi-4 (text)",
        fused=("qkv", "gate_up"),
        windows="every layer",
        reads=("partial_rotary_factor",),
        defaults={
            "rms_norm_eps": 1e-5,
            "original_max_position_embeddings": 4096,
            "sliding_window": None,
        },
    ),
    "Qwen2ForCausalLM": Architecture(
        "Qwen 1.5 to 2.5 (dense, 0.5B to 110B)",
        qkv_bias=True,
        windows="layer_types",
        defaults={"use_sliding_window": False},
    ),
    "Qwen3ForCausalLM": Architecture(
        "Qwen 3 (dense, 0.6B to 32B)",
        qk_norm="head",
        windows="layer_types",
        defaults={"head_dim": 128},
    ),
    "SeedOssForCausalLM": Architecture(
        "Seed-OSS (36B)",
        out_bias=False,
        requires={"hidden_act": (None, "silu"), "attention_out_bias": (None, False)},
        defaults={
            "attention_bias": True,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "num_key_value_heads": 8,
        },
    ),
    "SmolLM3ForCausalLM": Architecture(
        "SmolLM3 (3B)",
        reads=("no_rope_layers",),
        defaults={
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "num_key_value_heads": 4,
            "use_sliding_window": False,
        },
    ),
    "StableLmForCausalLM": Architecture(
        "StableLM (3B, 2 of 1.6B)",
        **LAYER_NORM,
        out_bias=False,
        keys={"attention_bias": "use_qkv_bias", "rms_norm_eps": "layer_norm_eps"},
        reads=("partial_rotary_factor",),
        requires={
            "hidden_act": (None, "silu"),
            # As in StableLM 2 12B.
            "qk_layernorm": (None, False),
            "use_parallel_residual": (None, False),
        },
        defaults={
            "max_position_embeddings": 4096,
            "num_key_value_heads": 32,
            "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-5,
        },
    ),
    "Starcoder2ForCausalLM": Architecture(
        "StarCoder 2 (3B to 15B)",
        **LAYER_NORM,
        activation="gelu_pytorch_tanh",
        is_gated=False,
        windows="every layer",
        keys={
            "attention_bias": "use_bias",
            "mlp_bias": "use_bias",
            "rms_norm_eps": "norm_epsilon",
        },
        names={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
        requires={"hidden_act": (None, "gelu_pytorch_tanh")},
        defaults={
            "attention_bias": True,
            "max_position_embeddings": 4096,
            "mlp_bias": True,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "tie_word_embeddings": True,
        },
    ),
    "YoutuForCausalLM": Architecture(
        "Youtu-LLM (2B)",
        latent=True,
        requires=LATENT_REQUIRES | {"mlp_bias": (None, False)},
        defaults=LATENT_DEFAULTS
        | {"q_lora_rank": 1536, "num_key_value_heads": 16, "tie_word_embeddings": True},
    ),
    "VaultGemmaForCausalLM": Architecture(
        "VaultGemma (1B)",
        **GEMMA_2,
        norms=NormNames(before_mlp="pre_feedforward_layernorm"),
        defaults=GEMMA_2_DEFAULTS,
    ),
}
ARCHITECTURES = dict(sorted((_DENSE | MIXTURES | HYBRIDS).items()))
# How checkpoints at the hub spell classes that transformers calls otherwise.
SPELLINGS = {
    "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM",
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
}
