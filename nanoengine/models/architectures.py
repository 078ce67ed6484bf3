"""The table of architectures: how each differs from Llama's."""

from __future__ import annotations

from typing import Any

from nanoengine.models.architecture import Architecture, ExpertNames, NormNames
from nanoengine.models.torch_ops import SWIGLU_ALPHA, SWIGLU_LIMIT

# config.json of Qwen3-Next and of Qwen 3.5, which differ in the order of projections.
_HYBRID: dict[str, Any] = {
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
_HYBRID_READS = (
    "partial_rotary_factor",
    OUT_IS_TILED,
    *(key for key in _HYBRID if key.startswith("linear_")),
)
_HYBRID_REQUIRES: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu", "swish"),
    "attn_output_gate": (None, True),
    "mamba_ssm_dtype": (None, "float32"),
}
_HYBRID_ROW: dict[str, Any] = {
    "norm_offset": 1.0,
    "qk_norm": "head",
    "output_gate": True,
    "mtp": "mtp",
    "reads": _HYBRID_READS,
    "requires": _HYBRID_REQUIRES,
}
_HYBRID_EXPERTS = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}

# ERNIE 4.5.
_ERNIE: dict[str, Any] = {
    "pairs_take_turns": True,
    "requires": {
        "hidden_act": (None, "silu", "swish"),
        "use_bias": (None, False),
        "moe_norm_min": (None, 1e-12),  # in models/experts.py it is 1e-20
    },
}
_ERNIE_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}
_GEMMA_NORMS = NormNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_GEMMA_4: dict[str, Any] = {
    "norms": _GEMMA_NORMS,
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
_GEMMA_4_DEFAULTS: dict[str, Any] = {
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
_GLM: dict[str, Any] = {
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
_SCORES_BY_SIGMOID = ExpertNames(
    scoring="sigmoid", has_choice_bias=True, group_best=2, shared="shared_experts"
)
# transformers reads neither key; the code that came with DeepSeek-V3 and vLLM do.
_CHOOSES_BY_SIGMOID = {"scoring_func": (None, "sigmoid"), "topk_method": (None, "noaux_tc")}
_LATENT_REQUIRES = {
    "hidden_act": (None, "silu"),
    "attention_bias": (None, False),
    "moe_layer_freq": (None, 1),
}
_LATENT: dict[str, Any] = {
    "latent": True,
    "mtp": "layer",
    "requires": _LATENT_REQUIRES | _CHOOSES_BY_SIGMOID,
}
_LATENT_DEFAULTS: dict[str, Any] = {
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
_NORMS_AFTER = NormNames("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_HUNYUAN: dict[str, Any] = {
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
_OLMO: dict[str, Any] = {
    "norms": _NORMS_AFTER,
    "norm_offset": 0.0,
    "qk_norm": "all heads",
    "requires": {"hidden_act": (None, "silu")},
}

ARCHITECTURES = {
    "DeepseekV2ForCausalLM": Architecture(
        "DeepSeek-V2 (also Lite)",
        own_code=("modeling_deepseek.DeepseekV2Model", "modeling_deepseek.DeepseekV2ForCausalLM"),
        latent=True,
        requires=_LATENT_REQUIRES
        | {
            "scoring_func": (None, "softmax"),
            "norm_topk_prob": (None, False),
            "topk_method": ("greedy", "group_limited_greedy"),
            "mlp_bias": (None, False),
        },
        experts=ExpertNames(
            renormalises=False,
            group_best=1,
            group_method="group_limited_greedy",
            shared="shared_experts",
        ),
        defaults=_LATENT_DEFAULTS
        | {
            "q_lora_rank": 1536,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "topk_method": "greedy",
        },
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "DeepSeek-V3, R1",
        own_code=("modeling_deepseek.DeepseekV3Model", "modeling_deepseek.DeepseekV3ForCausalLM"),
        **_LATENT,
        experts=_SCORES_BY_SIGMOID,
        defaults=_LATENT_DEFAULTS
        | {
            "q_lora_rank": 1536,
            "n_routed_experts": 256,
            "n_group": 8,
            "topk_group": 4,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 2048,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "Ernie4_5ForCausalLM": Architecture(
        "ERNIE 4.5 (0.3B)",
        **_ERNIE,
        defaults=_ERNIE_DEFAULTS | {"head_dim": 128, "num_key_value_heads": 2},
    ),
    "Ernie4_5_MoeForCausalLM": Architecture(
        "ERNIE 4.5 with experts (21B-A3B, 300B-A47B)",
        **_ERNIE,
        experts=ExpertNames(
            renormalises=True,
            has_choice_bias=True,
            shared="shared_experts",
            num_shared="moe_num_shared_experts",
            top_k="moe_k",
        ),
        defaults=_ERNIE_DEFAULTS
        | {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_layer_start_index": 1,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
        },
    ),
    "Exaone4ForCausalLM": Architecture(
        "EXAONE 4 (1.2B, 32B)",
        norms=_NORMS_AFTER,
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
    "Gemma3ForCausalLM": Architecture(
        "Gemma 3",
        norms=_GEMMA_NORMS,
        norm_offset=1.0,
        qk_norm="head",
        activation="gelu_pytorch_tanh",
        scales_embeddings=True,
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
        **_GEMMA_4,
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
        defaults=_GEMMA_4_DEFAULTS | {"hidden_size_per_layer_input": 256},
    ),
    "Gemma4UnifiedForCausalLM": Architecture(
        "Gemma 4 (12B)",
        **_GEMMA_4,
        defaults=_GEMMA_4_DEFAULTS | {"max_position_embeddings": 262144, "sliding_window": 1024},
    ),
    "Glm4ForCausalLM": Architecture(
        "GLM 4 (9B and 32B of April 2025)",
        norms=NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
        **_GLM,
    ),
    "Glm4MoeForCausalLM": Architecture(
        "GLM 4.5 to 4.7 with experts (also Air)",
        out_bias=False,
        qk_norm="head",
        experts=_SCORES_BY_SIGMOID,
        mtp="layer",
        reads=("partial_rotary_factor", "use_qk_norm"),
        requires={"hidden_act": (None, "silu")} | _CHOOSES_BY_SIGMOID,
        defaults={
            "partial_rotary_factor": 0.5,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-5,
        },
    ),
    "Glm4MoeLiteForCausalLM": Architecture(
        "GLM 4.7 Flash",
        **_LATENT,
        experts=_SCORES_BY_SIGMOID,
        defaults=_LATENT_DEFAULTS
        | {
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1536,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "rms_norm_eps": 1e-5,
        },
    ),
    "GlmForCausalLM": Architecture("GLM 4 (9B of 2024 in transformers' form)", **_GLM),
    "GptOssForCausalLM": Architecture(
        "gpt-oss (20b, 120b)",
        activation="clamped_swiglu",
        windows="pattern",
        sinks=True,
        # A softmax over the chosen scores is one over all, divided by the sum of the chosen.
        experts=ExpertNames(
            "intermediate_size", True, router="router", has_bias=True, is_turned=True
        ),
        quantizations=("mxfp4",),
        requires={
            "hidden_act": (None, "silu"),
            "swiglu_alpha": (None, SWIGLU_ALPHA),
            "swiglu_limit": (None, SWIGLU_LIMIT),
        },
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "num_experts_per_tok": 4,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
        },
    ),
    "GraniteForCausalLM": Architecture("Granite 3 (dense)", reads=GRANITE_MULTIPLIERS),
    "GraniteMoeForCausalLM": Architecture(
        "Granite 3 with experts (1B-A400M, 3B-A800M)",
        reads=GRANITE_MULTIPLIERS,
        # A softmax over the chosen scores, as gpt-oss has it.
        experts=ExpertNames("intermediate_size", True, "block_sparse_moe", router="router"),
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "HunYuanDenseV1ForCausalLM": Architecture("Hunyuan (dense, 0.5B to 7B, also MT)", **_HUNYUAN),
    "HunYuanMoEV1ForCausalLM": Architecture(
        "Hunyuan with experts (A13B)",
        **_HUNYUAN,
        experts=ExpertNames(
            inner_size="intermediate_size",
            renormalises=True,
            router="gate.wg",
            shared="shared_mlp",
            num_shared="num_shared_expert",
            top_k="moe_topk",
        ),
    ),
    "LlamaForCausalLM": Architecture(
        "Llama 2 to 3.3 and models of its shape, as SmolLM2 and TinyLlama"
    ),
    "Ministral3ForCausalLM": Architecture(
        "Ministral 3 and Devstral 2",
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
    "MistralForCausalLM": Architecture(
        "Mistral 7B and Nemo",
        windows="every layer",
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "MixtralForCausalLM": Architecture(
        "Mixtral (8x7B, 8x22B)",
        windows="every layer",
        experts=ExpertNames("intermediate_size", True, "block_sparse_moe", ("w1", "w3", "w2")),
        defaults={
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
        },
    ),
    "NemotronHForCausalLM": Architecture(
        "Nemotron-H and Nemotron Nano v2 (9B, 12B)",
        norm_offset=0.0,
        is_gated=False,
        pattern=True,
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
        },
    ),
    "Olmo2ForCausalLM": Architecture(
        "OLMo 2",
        **_OLMO,
        defaults={"rms_norm_eps": 1e-5},
    ),
    "Olmo3ForCausalLM": Architecture(
        "OLMo 3",
        **_OLMO,
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
    "OlmoeForCausalLM": Architecture(
        "OLMoE",
        qk_norm="all heads",
        experts=ExpertNames("intermediate_size"),
        requires={"hidden_act": (None, "silu"), "clip_qkv": (None,)},
        defaults={"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5},
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
        own_code=("modeling_phi3.Phi3ForCausalLM",),
    ),
    "Qwen2ForCausalLM": Architecture(
        "Qwen 1.5 to 2.5 (dense)",
        qkv_bias=True,
        windows="layer_types",
        defaults={"use_sliding_window": False},
    ),
    "Qwen2MoeForCausalLM": Architecture(
        "Qwen 1.5 and 2 with experts (A2.7B, 57B-A14B)",
        qkv_bias=True,
        experts=ExpertNames(shared="shared_expert", has_shared_gate=True),
        requires={"hidden_act": (None, "silu"), "qkv_bias": (None, True)},
        defaults={
            "use_sliding_window": False,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "Qwen3ForCausalLM": Architecture(
        "Qwen 3 (dense)", qk_norm="head", windows="layer_types", defaults={"head_dim": 128}
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "Qwen 3 with experts (30B-A3B, 235B-A22B, Coder)",
        qk_norm="head",
        experts=ExpertNames(),
        defaults={
            "use_sliding_window": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
        },
    ),
    "Qwen3NextForCausalLM": Architecture(
        "Qwen3-Next (80B-A3B, Coder)",
        **_HYBRID_ROW,
        recurrent=("qkvz", "ba"),
        experts=ExpertNames(shared="shared_expert", has_shared_gate=True),
        defaults={
            **_HYBRID,
            **_HYBRID_EXPERTS,
            "intermediate_size": 5632,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
        },
    ),
    "Qwen3_5ForCausalLM": Architecture(
        "Qwen 3.5 and 3.6 (dense)",
        **_HYBRID_ROW,
        recurrent=("qkv", "z", "b", "a"),
        defaults={**_HYBRID, "num_key_value_heads": 4},
    ),
    "Qwen3_5MoeForCausalLM": Architecture(
        "Qwen 3.5 and 3.6 with experts (35B-A3B, 122B-A10B)",
        **_HYBRID_ROW,
        recurrent=("qkv", "z", "b", "a"),
        experts=ExpertNames(renormalises=True, shared="shared_expert", has_shared_gate=True),
        defaults={
            **_HYBRID,
            **_HYBRID_EXPERTS,
            "intermediate_size": 512,  # of no layer: all have experts
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
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
        "SmolLM3",
        reads=("no_rope_layers",),
        defaults={
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "num_key_value_heads": 4,
            "use_sliding_window": False,
        },
    ),
}
