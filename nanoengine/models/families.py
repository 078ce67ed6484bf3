"""What the architectures of a family share: parts of rows of ARCHITECTURES."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from nanoengine.models.architecture import ExpertNames, NormNames

# config.json of Qwen3-Next and of Qwen 3.5, which differ in the order of projections.
HYBRID: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "head_dim": 256,
    "num_attention_heads": 16,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
}
# In the order of a GGUF, whose codes cannot move: RecurrentConfig.out_tiles. Conversions say so.
OUT_IS_TILED = "linear_out_proj_is_tiled"
HYBRID_READS = (
    "partial_rotary_factor",
    OUT_IS_TILED,
    *(key for key in HYBRID if key.startswith("linear_")),
)
HYBRID_REQUIRES: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu", "swish"),
    "attn_output_gate": (None, True),
    "mamba_ssm_dtype": (None, "float32"),
}
HYBRID_ROW: dict[str, Any] = {
    "norm_offset": 1.0,
    "qk_norm": "head",
    "output_gate": True,
    "mtp": "mtp",
    "reads": HYBRID_READS,
    "requires": HYBRID_REQUIRES,
}
HYBRID_EXPERTS = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}

# Apertus.
APERTUS: dict[str, Any] = {
    "norms": NormNames(before_attention="attention_layernorm", before_mlp="feedforward_layernorm"),
    "qk_norm": "head",
    "activation": "xielu",
    "is_gated": False,
    "requires": {
        "hidden_act": (None, "xielu"),
        "mlp_bias": (None, False),
        "post_norm": (None, False),
        "qk_norm": (None, True),
    },
    "defaults": {
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
}
# Cohere's, without norms of q and k.
COHERE: dict[str, Any] = {
    "norms": NormNames(before_mlp=""),
    "layer_norm": True,
    "is_parallel": True,
    "pairs_take_turns": True,
    "reads": ("logit_scale",),
    "requires": {
        "hidden_act": (None, "silu", "swish"),
        "position_embedding_type": (None, "rope_gptj"),
        "rotary_pct": (None, 1),
        "use_gated_activation": (None, True),
        "use_parallel_block": (None, True),
        "use_qk_norm": (None, False),
    },
}
COHERE_DEFAULTS: dict[str, Any] = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
# ERNIE 4.5.
ERNIE: dict[str, Any] = {
    "pairs_take_turns": True,
    "requires": {
        "hidden_act": (None, "silu", "swish"),
        "use_bias": (None, False),
        "moe_norm_min": (None, 1e-12),  # in models/experts.py it is 1e-20
    },
}
ERNIE_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}
GEMMA_NORMS = NormNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
GEMMA_4: dict[str, Any] = {
    "norms": GEMMA_NORMS,
    "norm_offset": 0.0,
    "qk_norm": "head",
    "v_norm": True,
    "activation": "gelu_pytorch_tanh",
    "scales_embeddings": True,
    "windows": "pattern",
    "ropes_by_kind": True,
    "shapes_by_layer": True,
    "layer_scalar": True,
    "reads": ("final_logit_softcapping", "query_pre_attn_scalar"),
    "requires": {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "query_pre_attn_scalar": (1,),
        # Images alone are seen in both directions.
        "use_bidirectional_attention": (None, False, "vision"),
    },
}
GEMMA_4_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 1,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
    },
}
# Dense GLM.
GLM: dict[str, Any] = {
    "fused": ("gate_up",),
    "out_bias": False,
    "pairs_take_turns": True,
    "reads": ("partial_rotary_factor",),
    "defaults": {
        "attention_bias": True,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
    },
}
SCORES_BY_SIGMOID = ExpertNames(
    scoring="sigmoid", has_choice_bias=True, group_best=2, shared="shared_experts"
)
# dots.llm1.
DOTS: dict[str, Any] = {
    "qk_norm": "head",
    "windows": "layer_types",
    "experts": SCORES_BY_SIGMOID,
    "requires": {
        "hidden_act": (None, "silu"),
        "scoring_func": (None, "sigmoid", "noaux_tc"),
        "topk_method": (None, "noaux_tc"),
    },
    "defaults": {
        "first_k_dense_replace": 0,
        "max_window_layers": 62,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "use_sliding_window": True,
    },
}
# transformers reads neither key; the code that came with DeepSeek-V3 and vLLM do.
CHOOSES_BY_SIGMOID = {"scoring_func": (None, "sigmoid"), "topk_method": (None, "noaux_tc")}
LATENT_REQUIRES = {
    "hidden_act": (None, "silu"),
    "attention_bias": (None, False),
    "moe_layer_freq": (None, 1),
}
LATENT: dict[str, Any] = {
    "latent": True,
    "mtp": "layer",
    "requires": LATENT_REQUIRES | CHOOSES_BY_SIGMOID,
}
LATENT_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
# Kimi Linear.
KIMI: dict[str, Any] = {
    "latent": True,
    "kimi": True,
    "recurrent": ("q", "k", "v", "b", "f_a", "g_a"),
    "experts": replace(SCORES_BY_SIGMOID, block="block_sparse_moe", parts=("w1", "w3", "w2")),
    "requires": LATENT_REQUIRES
    | {"mla_use_nope": (None, True), "moe_router_activation_func": (None, "sigmoid")},
    "own_code": ("modeling_kimi.KimiLinearModel", "modeling_kimi.KimiLinearForCausalLM"),
    "defaults": LATENT_DEFAULTS
    | {
        "first_k_dense_replace": 1,
        "linear_conv_kernel_dim": 4,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "max_position_embeddings": 1048576,
        "moe_intermediate_size": 1024,
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.446,
        "topk_group": 1,
    },
}
# Of the scores, the embeddings, what is added to the residual stream, and (divided by) the logits.
GRANITE_MULTIPLIERS = (
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
GRANITE_EXPERTS = ExpertNames(
    "intermediate_size",
    True,
    "block_sparse_moe",
    router="router",
    shared="shared_expert",
    shared_size="shared_intermediate_size",
)
NO_LIMIT = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])
# Granite 4.
GRANITE_HYBRID: dict[str, Any] = {
    "mixers": True,
    "reads": GRANITE_MULTIPLIERS,
    "experts": GRANITE_EXPERTS,
    "requires": {
        "hidden_act": (None, "silu", "swish"),
        "mamba_conv_bias": (None, True),
        "mamba_proj_bias": (None, False),
        "time_step_limit": NO_LIMIT,
    },
    "defaults": {
        "mamba_d_conv": 4,
        "mamba_d_head": "auto",
        "mamba_d_state": 256,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "shared_intermediate_size": 1024,
    },
}
# Falcon-H1. A list of multipliers is read if there is one.
FALCON_H1: dict[str, Any] = {
    "norms": NormNames(before_mlp="pre_ff_layernorm"),
    "both_mixers": True,
    "reads": ("embedding_multiplier", "lm_head_multiplier"),
    "requires": {
        "hidden_act": (None, "silu", "swish"),
        "mamba_conv_bias": (None, True),
        "time_step_limit": NO_LIMIT,
    },
    "defaults": {
        "mamba_d_conv": 4,
        "mamba_d_head": "auto",
        "mamba_d_ssm": 1024,
        "mamba_d_state": 256,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
        "mamba_norm_before_gate": True,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
    },
}
# LFM2.
LFM2: dict[str, Any] = {
    "norms": NormNames(before_attention="operator_norm", before_mlp="ffn_norm"),
    "qk_norm": "head",
    "norms_of_heads": ("q_layernorm", "k_layernorm"),
    "short_convs": True,
}
LFM2_DEFAULTS: dict[str, Any] = {
    "vocab_size": 65536,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
NORMS_AFTER = NormNames("", "post_attention_layernorm", "", "post_feedforward_layernorm")
HUNYUAN: dict[str, Any] = {
    "qk_norm": "head",
    "norms_of_heads": ("query_layernorm", "key_layernorm"),
    "norms_turned": True,
    "requires": {
        "hidden_act": (None, "silu", "swish"),
        "mlp_bias": (None, False),
        "moe_layer_num_skipped": (None, 0),
        "norm_topk_prob": (None, True),
        "use_cla": (None, False),
        "use_qk_norm": (None, True),
    },
    "defaults": {
        "max_position_embeddings": 2048,
        "moe_topk": 1,
        "num_experts": 1,
        "num_shared_expert": 1,
        "rms_norm_eps": 1e-5,
    },
}
# OLMo 2 and 3.
OLMO: dict[str, Any] = {
    "norms": NORMS_AFTER,
    "norm_offset": 0.0,
    "qk_norm": "all heads",
    "requires": {"hidden_act": (None, "silu")},
}
# MiniMax-M2.
MINIMAX: dict[str, Any] = {
    "qk_norm": "all heads",
    "experts": ExpertNames(
        "intermediate_size",
        True,
        "block_sparse_moe",
        ("w1", "w3", "w2"),
        scoring="sigmoid",
        has_choice_bias=True,
    ),
    "reads": ("partial_rotary_factor", "rotary_dim"),
    "requires": {
        "hidden_act": (None, "silu"),
        "attention_bias": (None, False),
        "qk_norm_type": (None, "per_layer"),
        "scoring_func": (None, "sigmoid"),
        "shared_intermediate_size": (None, 0),
        "use_qk_norm": (None, True),
        "use_routing_bias": (None, True),
    },
    "own_code": ("modeling_minimax_m2.MiniMaxM2ForCausalLM",),
    "defaults": {
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "rope_theta": 5e6,
    },
}
