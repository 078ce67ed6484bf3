"""What the architectures of a family share: parts of rows of ARCHITECTURES."""

from __future__ import annotations

from typing import Any

from nanoengine.models.architecture import ExpertNames, NormNames

# In the order of a GGUF, whose codes cannot move: RecurrentConfig.out_tiles. Conversions say so.
OUT_IS_TILED = "linear_out_proj_is_tiled"
# Cohere's, without norms of q and k.
COHERE: dict[str, Any] = {
    "norms": NormNames(before_mlp=""),
    "layer_norm": True,
    "is_parallel": True,
    "pairs_take_turns": True,
    "keys": {"rms_norm_eps": "layer_norm_eps"},
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
# LayerNorm with biases.
LAYER_NORM: dict[str, Any] = {"layer_norm": True, "norm_bias": True}
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
# Gemma 1 and 2, and VaultGemma; Gemma 3 has most of it.
GEMMA: dict[str, Any] = {
    "norm_offset": 1.0,
    "activation": "gelu_pytorch_tanh",
    "scales_embeddings": True,
}
# With windows in alternate layers and softcaps.
GEMMA_2: dict[str, Any] = GEMMA | {
    "windows": "pattern",
    "reads": ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
    "requires": {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (None, False),
    },
}
GEMMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256000,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
GEMMA_2_DEFAULTS: dict[str, Any] = GEMMA_DEFAULTS | {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
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
# transformers reads neither key; the code that came with DeepSeek-V3 and vLLM do.
CHOOSES_BY_SIGMOID = {"scoring_func": (None, "sigmoid"), "topk_method": (None, "noaux_tc")}
# What Ling calls tensors, of all of its versions.
LING_NAMES = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.": ".attention.",
    ".o_proj.": ".dense.",
    ".shared_head.norm.": ".final_layernorm.",
}
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
# Of the scores, the embeddings, what is added to the residual stream, and (divided by) the logits.
GRANITE_MULTIPLIERS = (
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
MINICPM: dict[str, Any] = {"reads": (*GRANITE_MULTIPLIERS[1:], "scale_depth")}
# Granite with windows and sinks.
GRANITE_SWA: dict[str, Any] = {
    "windows": "pattern",
    "sinks": True,
    "reads": (*GRANITE_MULTIPLIERS, "layer_rope_theta", "no_rope_layers"),
}
GRANITE_EXPERTS = ExpertNames(
    "intermediate_size",
    True,
    "block_sparse_moe",
    router="router",
    shared="shared_expert",
    shared_size="shared_intermediate_size",
)
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
