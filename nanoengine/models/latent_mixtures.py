"""The architectures with latent attention whose layers are mixtures of experts: rows of
ARCHITECTURES.
"""

from __future__ import annotations

from nanoengine.models.architecture import Architecture, ExpertNames
from nanoengine.models.families import LATENT, LATENT_DEFAULTS, LATENT_REQUIRES, SCORES_BY_SIGMOID

LATENT_MIXTURES = {
    "DeepseekV2ForCausalLM": Architecture(
        "DeepSeek-V2 (Lite 16B, 236B)",
        latent=True,
        requires=LATENT_REQUIRES
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
        defaults=LATENT_DEFAULTS
        | {
            "q_lora_rank": 1536,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "topk_method": "greedy",
        },
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "DeepSeek-V3, R1 (671B)",
        **LATENT,
        experts=SCORES_BY_SIGMOID,
        defaults=LATENT_DEFAULTS
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
    "Glm4MoeLiteForCausalLM": Architecture(
        "GLM 4.7 Flash (30B-A3B)",
        **LATENT,
        experts=SCORES_BY_SIGMOID,
        defaults=LATENT_DEFAULTS
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
    "Mistral4ForCausalLM": Architecture(
        "Mistral Small 4 (119B-A6.5B)",
        latent=True,
        scales_queries=True,
        requires={"hidden_act": (None, "silu"), "attention_bias": (None, False)},
        experts=ExpertNames(group_best=2, shared="shared_experts"),
        defaults={
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 2048,
            "norm_topk_prob": True,
            "max_position_embeddings": 1048576,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "SarvamMLAForCausalLM": Architecture(
        "Sarvam (105B-A10B)",
        **(LATENT | {"mtp": ""}),
        experts=SCORES_BY_SIGMOID,
        keys={"n_shared_experts": "num_shared_experts"},
        defaults=LATENT_DEFAULTS
        | {
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 2048,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.5,
        },
    ),
}
