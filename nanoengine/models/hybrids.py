"""The rows of ARCHITECTURES with recurrent layers beside attention, and what they share."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from nanoengine.models.architecture import Architecture, ExpertNames, NormNames
from nanoengine.models.families import (
    GRANITE_EXPERTS,
    GRANITE_MULTIPLIERS,
    LATENT_DEFAULTS,
    LATENT_REQUIRES,
    OLMO,
    OUT_IS_TILED,
    SCORES_BY_SIGMOID,
)

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
    "hybrid": "delta",
    "mtp": "mtp",
    "reads": HYBRID_READS,
    "requires": HYBRID_REQUIRES,
}
HYBRID_EXPERTS = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
NO_LIMIT = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])
LFM2: dict[str, Any] = {
    "norms": NormNames(before_attention="operator_norm", before_mlp="ffn_norm"),
    "qk_norm": "head",
    "norms_of_heads": ("q_layernorm", "k_layernorm"),
    "hybrid": "convs",
    # Of older files; in a newer one they are null.
    "keys": {"intermediate_size": "block_ff_dim", "tie_word_embeddings": "tie_embedding"},
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

HYBRIDS = {
    "BambaForCausalLM": Architecture(
        "Bamba (9B)",
        norms=NormNames(before_mlp="pre_ff_layernorm"),
        hybrid="mixers",
        reads=("attn_layer_indices", "partial_rotary_factor"),
        requires={
            "hidden_act": (None, "silu", "swish"),
            "mamba_conv_bias": (None, True),
            "mamba_proj_bias": (None, False),
            "time_step_limit": NO_LIMIT,
        },
        defaults={
            "vocab_size": 128000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "mamba_d_conv": 4,
            "mamba_d_head": "auto",
            "mamba_d_state": 256,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
            "mamba_n_heads": 128,
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "position_embedding_type": "rope",  # Granite 4's key
            "rms_norm_eps": 1e-5,
        },
    ),
    "FalconH1ForCausalLM": Architecture(
        # A list of multipliers is read if there is one.
        "Falcon-H1 (0.5B to 34B, also H1R)",
        norms=NormNames(before_mlp="pre_ff_layernorm"),
        hybrid="beside",
        reads=("embedding_multiplier", "lm_head_multiplier"),
        requires={
            "hidden_act": (None, "silu", "swish"),
            "mamba_conv_bias": (None, True),
            "time_step_limit": NO_LIMIT,
        },
        defaults={
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
    ),
    "GraniteMoeHybridForCausalLM": Architecture(
        "Granite 4.0 (Micro, H Micro, H Tiny, H Small)",
        hybrid="mixers",
        reads=GRANITE_MULTIPLIERS,
        experts=GRANITE_EXPERTS,
        requires={
            "hidden_act": (None, "silu", "swish"),
            "mamba_conv_bias": (None, True),
            "mamba_proj_bias": (None, False),
            "time_step_limit": NO_LIMIT,
        },
        defaults={
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
    ),
    "KimiLinearForCausalLM": Architecture(
        "Kimi Linear (48B-A3B)",
        latent=True,
        hybrid="kimi",
        projections=("q", "k", "v", "b", "f_a", "g_a"),
        experts=replace(SCORES_BY_SIGMOID, block="block_sparse_moe", parts=("w1", "w3", "w2")),
        requires=LATENT_REQUIRES
        | {"mla_use_nope": (None, True), "moe_router_activation_func": (None, "sigmoid")},
        keys={
            "max_position_embeddings": "model_max_length",
            "n_group": "num_expert_group",
            "n_shared_experts": "num_shared_experts",
            "norm_topk_prob": "moe_renormalize",
            "num_experts_per_tok": "num_experts_per_token",
        },
        own_code=("modeling_kimi.KimiLinearModel", "modeling_kimi.KimiLinearForCausalLM"),
        defaults=LATENT_DEFAULTS
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
    ),
    "Lfm2ForCausalLM": Architecture(
        "LFM2 and LFM2.5 (350M to 2.6B)",
        **LFM2,
        reads=("block_auto_adjust_ff_dim",),
        defaults=LFM2_DEFAULTS
        | {
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        },
    ),
    "Lfm2MoeForCausalLM": Architecture(
        "LFM2 with experts (8B-A1B, 24B-A2B)",
        **LFM2,
        experts=ExpertNames(
            block="feed_forward",
            parts=("w1", "w3", "w2"),
            scoring="sigmoid",
            has_choice_bias=True,
            least_sum=1e-6,
        ),
        defaults=LFM2_DEFAULTS
        | {
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
        },
    ),
    "Lfm3ForCausalLM": Architecture(
        "LFM3 (1.7B)",
        norms=NormNames(
            before_attention="operator_norm",
            after_attention="post_operator_norm",
            before_mlp="ffn_norm",
            after_mlp="post_ffn_norm",
        ),
        qk_norm="head",
        head_gate="sigmoid",
        hybrid="convs",
        windows="pattern",
        ropes_by_kind=True,
        requires={
            "hidden_act": (None, "silu", "swish"),
            "attention_bias": (None, False),
            "use_attention_gate": (None, True),
            "use_sandwich_norm": (None, True),
        },
        defaults={
            "vocab_size": 128000,
            "hidden_size": 2048,
            "intermediate_size": 7680,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "conv_L_cache": 7,
            "max_position_embeddings": 128000,
            "norm_eps": 1e-5,
            "sliding_window": 256,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1e6,
                    "partial_rotary_factor": 0.5,
                },
            },
        },
    ),
    "NemotronHForCausalLM": Architecture(
        "Nemotron-H, Nemotron Nano v2 (9B, 12B), Nemotron 3 Nano (30B-A3B) and Super (120B-A12B)",
        norm_offset=0.0,
        activation="relu2",
        is_gated=False,
        hybrid="apart",
        experts=ExpertNames(
            scoring="sigmoid",
            has_choice_bias=True,
            group_best=2,
            shared="shared_experts",
            shared_size="moe_shared_expert_intermediate_size",
            latent_size="moe_latent_size",
        ),
        requires={
            "mlp_hidden_act": (None, "relu2"),
            "mamba_hidden_act": (None, "silu"),
            "mlp_bias": (None, False),
            "use_bias": (None, False),
            "mamba_proj_bias": (None, False),
            "use_conv_bias": (None, True),
            "mamba_conv_bias": (None, True),
            "residual_in_fp32": (None, False),
            "attention_bias": (None, False),
            "mamba_ssm_cache_dtype": (None, "float32"),
            "n_shared_experts": (None, 1),
        },
        own_code=("modeling_nemotron_h.NemotronHForCausalLM",),
        defaults={
            "vocab_size": 131072,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "intermediate_size": 21504,
            "layer_norm_epsilon": 1e-5,
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "conv_kernel": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "norm_topk_prob": True,
        },
    ),
    "OlmoHybridForCausalLM": Architecture(
        "OLMo Hybrid (7B)",
        **OLMO,
        recurrent_norms=NormNames(),
        rule_eps=1e-5,
        hybrid="delta",
        projections=("q", "k", "v", "z", "b", "a"),
        reads=("linear_allow_neg_eigval", "rope_theta"),
        defaults={
            "vocab_size": 100352,
            "hidden_size": 3840,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 30,
            "max_position_embeddings": 65536,
            "full_attention_interval": 4,
            "linear_allow_neg_eigval": True,
            "linear_conv_kernel_dim": 4,
        },
    ),
    "Qwen3NextForCausalLM": Architecture(
        "Qwen3-Next (80B-A3B, Coder)",
        **HYBRID_ROW,
        projections=("qkvz", "ba"),
        experts=ExpertNames(
            shared="shared_expert",
            shared_size="shared_expert_intermediate_size",
            has_shared_gate=True,
        ),
        defaults={
            **HYBRID,
            **HYBRID_EXPERTS,
            "intermediate_size": 5632,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
        },
    ),
    "Qwen3_5ForCausalLM": Architecture(
        "Qwen 3.5 and 3.6 (dense, 0.8B to 27B)",
        **HYBRID_ROW,
        projections=("qkv", "z", "b", "a"),
        defaults={**HYBRID, "num_key_value_heads": 4},
    ),
    "Qwen3_5MoeForCausalLM": Architecture(
        "Qwen 3.5 and 3.6 with experts (35B-A3B to 397B-A17B)",
        **HYBRID_ROW,
        projections=("qkv", "z", "b", "a"),
        experts=ExpertNames(
            renormalises=True,
            shared="shared_expert",
            shared_size="shared_expert_intermediate_size",
            has_shared_gate=True,
        ),
        defaults={
            **HYBRID,
            **HYBRID_EXPERTS,
            "intermediate_size": 512,  # of no layer: all have experts
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
    ),
}
