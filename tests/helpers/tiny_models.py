"""Tiny models of all architectures, by the names that tests use."""

from __future__ import annotations

# First: it sets what the libraries read at import.
from tiny_model import (
    COMMON,
    DENSE_LATENT,
    FALCON_H1,
    GRANITE,
    GRANITE_HYBRID,
    HYBRID,
    HYBRID_EXPERTS,
    LAGUNA,
    LATENT,
    LINEAR_ROPE,
    LLAMA3_ROPE,
    NEMOTRON_H,
    TOKENIZER_SIZE,
    YARN_ROPE,
    TinyModel,
)

TINY: dict[str, TinyModel] = {
    "llama": TinyModel(),
    "llama-tied": TinyModel(settings={"tie_word_embeddings": True}, seed=1),
    "llama-bias": TinyModel(settings={"attention_bias": True, "mlp_bias": True}, seed=2),
    "apertus": TinyModel(
        "apertus",
        {"rope_parameters": {**LLAMA3_ROPE, "original_max_position_embeddings": 8192}},
        seed=101,
    ),
    "arcee": TinyModel("arcee", {"rope_parameters": YARN_ROPE, "mlp_bias": True}, seed=102),
    "cohere": TinyModel(
        "cohere",
        {"attention_bias": True, "logit_scale": 0.3, "tie_word_embeddings": False},
        seed=103,
    ),
    "cohere2": TinyModel(
        "cohere2",
        {
            "layer_norm_eps": 0.02,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 21,
        },
        seed=104,
    ),
    # A dense layer first, which turns; the last sees all keys and does not.
    "cohere2-moe": TinyModel(
        "cohere2_moe",
        {
            "rms_norm_eps": 0.02,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "sliding_window": 13,
            "intermediate_size": 24,
            "prefix_dense_intermediate_size": 96,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "logit_scale": 0.7,
        },
        seed=136,
    ),
    # A softmax over the scores of the chosen, and the mean of experts and what is beside them.
    "cohere2-moe-shared": TinyModel(
        "cohere2_moe",
        {
            "rms_norm_eps": 0.02,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "sparse", "sparse"],
            "sliding_window": 13,
            "intermediate_size": 24,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "tie_word_embeddings": False,
        },
        seed=137,
    ),
    # Sinks in all layers, of which the first is dense; those that see all keys do not turn.
    "flint": TinyModel(
        "flint",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [0],
            "sliding_window": 13,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rms_norm_eps": 0.02,
        },
        seed=138,
    ),
    # Norms without weights, a head that turns back, a cap that logits reach.
    "nanochat": TinyModel("nanochat", {"rms_norm_eps": 0.02}, seed=141),
    # What experts are scores of has a bias, by which another one is chosen than by their scores.
    "kolibri": TinyModel(
        "kolibri1",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "sliding_window": 13,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rms_norm_eps": 0.02,
        },
        seed=140,
    ),
    # Llama by other names.
    "exaone": TinyModel("exaone", {"rms_norm_eps": 0.02}, seed=150, hub_class="ExaoneForCausalLM"),
    # One tensor for q, k and v, half of a head turns, experts in groups behind a dense layer.
    "ling-2": TinyModel(
        "sarvam_moe",
        {
            "attention_bias": True,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 24,
            "rms_norm_eps": 0.02,
        },
        seed=151,
        hub_class="BailingMoeV2ForCausalLM",
    ),
    "sarvam": TinyModel(
        "sarvam_moe",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
            "use_qk_norm": False,
            "first_k_dense_replace": 2,
        },
        seed=152,
        hub_class="SarvamMoEForCausalLM",
    ),
    "sarvam-latent": TinyModel(
        "sarvam_mla",
        LATENT
        | {
            "q_lora_rank": None,
            "rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0},
            "first_k_dense_replace": 1,
        },
        seed=153,
        hub_class="SarvamMLAForCausalLM",
    ),
    # The text model of one for images: the layer that sees all keys does not turn.
    "muse-glimmer": TinyModel(
        "muse_glimmer",
        {
            "text_config": COMMON
            | {
                "model_type": "muse_glimmer_text",
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "layer_rope_theta": [500.0, 0, 500.0],
                "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_window": 13,
                "rms_norm_eps": 0.02,
                "post_norm_eps": 0.05,
                "output_multiplier": 0.7,
                "final_logit_softcapping": 5.0,
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
            },
            "out_hidden_size": 128,
            "projector_hidden_size": 32,
        },
        seed=139,
    ),
    # LayerNorm with biases, an eps that matters, and feed-forwards without a gate.
    "jais2": TinyModel("jais2", {"layer_norm_eps": 0.02}, seed=130),
    "nemotron": TinyModel("nemotron", {"norm_eps": 0.02, "attention_bias": True}, seed=131),
    "starcoder2": TinyModel("starcoder2", {"norm_epsilon": 0.02}, seed=132),
    "stablelm": TinyModel("stablelm", {"layer_norm_eps": 0.02, "use_qkv_bias": True}, seed=133),
    "llama-rope-llama3": TinyModel(settings={"rope_parameters": LLAMA3_ROPE}, seed=3),
    "llama-rope-linear": TinyModel(settings={"rope_parameters": LINEAR_ROPE}, seed=4),
    # The weights of "llama" in several files.
    "llama-sharded": TinyModel(saved_as={"max_shard_size": "200KB"}),
    # head_dim x heads is not hidden_size, and the vocabulary is padded past the tokenizer's.
    "qwen3": TinyModel(
        "qwen3",
        {"hidden_size": 48, "head_dim": 32, "vocab_size": 272, "tie_word_embeddings": True},
        seed=5,
        adds_bos=False,
        template_in_own_file=True,
    ),
    "qwen2": TinyModel("qwen2", {"rope_parameters": YARN_ROPE}, seed=6, adds_bos=False),
    # Queries have factors from position 16 on.
    "ministral3": TinyModel(
        "ministral3",
        {
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 32.0, "beta_fast": 2.0},
                **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
                "original_max_position_embeddings": 16,
            }
        },
        seed=21,
    ),
    # The last layer sees everything, and turns as the others do.
    "ministral": TinyModel(
        "ministral",
        {
            "sliding_window": 13,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        seed=120,
    ),
    "cwm": TinyModel(
        "cwm",
        {
            "sliding_window": 13,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": LLAMA3_ROPE,
        },
        seed=121,
    ),
    # The numbers of a pair are neighbours.
    "helium": TinyModel("helium", {"rms_norm_eps": 0.02}, seed=122),
    # Norms on both sides of what is added, with a factor, and an eps that matters.
    "hyperclovax": TinyModel("hyperclovax", {**GRANITE, "rms_norm_eps": 0.02}, seed=123),
    # Latent attention, and feed-forwards alone.
    "youtu": TinyModel("youtu", DENSE_LATENT, seed=124),
    "seed-oss": TinyModel("seed_oss", {"hidden_size": 48, "head_dim": 32}, seed=22),
    "mistral": TinyModel("mistral", {"sliding_window": None}, seed=7),
    # A dense layer between two with experts, whose size is no multiple of a vector.
    "qwen3-moe": TinyModel(
        "qwen3_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
        seed=12,
    ),
    # One tensor for the experts of a layer, as transformers 5 holds them.
    "mixtral": TinyModel(
        "mixtral",
        {"num_local_experts": 4, "intermediate_size": 48, "sliding_window": 21},
        seed=13,
        saved_as={"save_original_format": False},
    ),
    # Sinks, a window in every other layer, and YaRN whose ramp ends between pairs.
    "gpt-oss": TinyModel(
        "gpt_oss",
        {
            "num_local_experts": 5,
            "intermediate_size": 64,
            "num_experts_per_tok": 2,
            "sliding_window": 13,
            "rope_parameters": YARN_ROPE | {"truncate": False},
        },
        seed=15,
        adds_bos=False,
    ),
    # Factors, and a norm's eps that matters.
    "granite": TinyModel(
        "granite",
        {
            "attention_multiplier": 0.1,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.3,
            "logits_scaling": 0.7,
            "rms_norm_eps": 0.02,
            "tie_word_embeddings": True,
        },
        seed=41,
    ),
    "granite-moe": TinyModel(
        "granitemoe", {**GRANITE, "num_local_experts": 5, "intermediate_size": 40}, seed=46
    ),
    "granite-moe-shared": TinyModel(
        "granitemoeshared",
        {
            **GRANITE,
            "num_local_experts": 5,
            "intermediate_size": 40,
            "shared_intermediate_size": 24,
        },
        seed=105,
    ),
    # Sinks and windows; the layer that sees everything does not turn.
    "granite-swa": TinyModel(
        "granite_swa",
        {
            **GRANITE,
            "sliding_window": 13,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "layer_rope_theta": [500.0, 0, 500.0],
        },
        seed=134,
    ),
    "granite-moe-swa": TinyModel(
        "granitemoe_swa",
        {
            **GRANITE,
            "num_local_experts": 5,
            "intermediate_size": 40,
            "shared_intermediate_size": 24,
            "sliding_window": 13,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
        seed=135,
    ),
    "minimax-m2": TinyModel(
        "minimax_m2",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 40,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        seed=106,
    ),
    "dots1": TinyModel(
        "dots1",
        {
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.7,
        },
        seed=107,
    ),
    # Each kind of layer turns by a theta of its own.
    "mellum": TinyModel(
        "mellum",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "sliding_window": 13,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": YARN_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        seed=125,
    ),
    # Layers with other heads, each multiplied by the softplus of its gate; half of a head turns in
    # those without a window.
    "laguna": TinyModel(
        "laguna",
        LAGUNA
        | {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "moe_routed_scaling_factor": 1.7,
        },
        seed=134,
    ),
    "laguna-dense": TinyModel("laguna", LAGUNA | {"mlp_layer_types": ["dense"] * 3}, seed=135),
    # What is attended to has a gate of its own product; embeddings are scaled.
    "afmoe": TinyModel(
        "afmoe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "route_scale": 1.7,
            "mup_enabled": True,
            "sliding_window": 13,
            "global_attn_every_n_layers": 2,
            "rms_norm_eps": 0.02,
        },
        seed=129,
    ),
    # A dense layer first; the last one does not turn.
    "exaone-moe": TinyModel(
        "exaone_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "moe_intermediate_size": 24,
            "n_group": 3,
            "topk_group": 2,
            "sliding_window": 13,
            "sliding_window_pattern": 3,
        },
        seed=126,
    ),
    "solar-open": TinyModel(
        "solar_open",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
        },
        seed=127,
    ),
    # Norms behind attention and experts alone, and over all heads of q and of k.
    "flex-olmo": TinyModel(
        "flex_olmo",
        {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 32},
        seed=128,
    ),
    "olmoe": TinyModel(
        "olmoe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "num_key_value_heads": 4,
        },
        seed=14,
    ),
    # Norms after attention and feed-forward alone, and over all heads of q and of k.
    "olmo2": TinyModel("olmo2", {"attention_bias": True}, seed=25),
    # The last layer sees everything, and turns by YaRN.
    "olmo3": TinyModel(
        "olmo3",
        {
            "sliding_window": 13,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": YARN_ROPE},
        },
        seed=26,
    ),
    # Norms after attention and feed-forward alone, and of heads; the last layer does not turn.
    "exaone4": TinyModel("exaone4", {"sliding_window": 13, "sliding_window_pattern": 3}, seed=44),
    "exaone4-full": TinyModel(
        "exaone4",
        {
            "sliding_window": None,
            "layer_types": ["full_attention"] * 3,
            "tie_word_embeddings": True,
        },
        seed=45,
    ),
    # Scores by sigmoid with a bias, in groups of two; a dense layer first; half a head is turned.
    "deepseek-v2": TinyModel(
        "deepseek_v2",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_group": 3,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.3,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "mscale": 0.707,
                "mscale_all_dim": 0.6,
            },
        },
        seed=31,
    ),
    "deepseek-v3": TinyModel(
        "deepseek_v3",
        {
            **LATENT,
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_interleave": False,
        },
        seed=32,
    ),
    "deepseek-v3-dense": TinyModel("deepseek_v3", {**LATENT, "first_k_dense_replace": 3}, seed=34),
    # The text model of one for images: groups by a softmax, and queries that grow from position 16.
    "mistral4": TinyModel(
        "mistral3",
        {
            "text_config": COMMON
            | LATENT
            | {
                "model_type": "mistral4",
                "head_dim": 40,
                "n_group": 3,
                "topk_group": 2,
                "first_k_dense_replace": 1,
                "rope_parameters": YARN_ROPE
                | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5}
                | {"mscale": 1.0, "mscale_all_dim": 0.0},
            },
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "head_dim": 16,
            },
            "tie_word_embeddings": False,
        },
        seed=140,
    ),
    # Llama's, under names of their own.
    "internlm3": TinyModel(
        "internlm3",
        {"qkv_bias": True, "bias": True, "head_dim": 32, "num_key_value_heads": 1},
        seed=141,
        hub_class="InternLM3ForCausalLM",
    ),
    "iquestcoder": TinyModel(
        "iquestcoder", {"rms_norm_eps": 0.02}, seed=142, hub_class="IQuestCoderForCausalLM"
    ),
    # Granite's, by factors of other names: 1.5 is over the root of three layers.
    "minicpm": TinyModel(
        "granite",
        {
            "attention_multiplier": 0.25,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 1.5 / 3**0.5,
            "logits_scaling": 64 / 40,
            "scale_emb": 3,
            "scale_depth": 1.5,
            "dim_model_base": 40,
        },
        seed=151,
        hub_class="MiniCPMForCausalLM",
    ),
    "minicpm3": TinyModel(
        "minicpm3",
        DENSE_LATENT | {"scale_emb": 3, "scale_depth": 1.5, "dim_model_base": 40},
        seed=152,
    ),
    "glm4-moe-lite": TinyModel(
        "glm4_moe_lite", {**LATENT, "mlp_layer_types": ["sparse", "dense", "sparse"]}, seed=33
    ),
    # All neighbours are turned; the layer in the middle has experts.
    "ernie": TinyModel("ernie4_5", seed=51),
    "ernie-moe": TinyModel(
        "ernie4_5_moe",
        {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 24,
            "moe_layer_end_index": 1,
        },
        seed=52,
    ),
    # Norms of q and k after the rotation, whose theta grows by alpha.
    "hunyuan": TinyModel(
        "hunyuan_v1_dense",
        {
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "alpha": 50.0,
                "factor": 1.0,
            }
        },
        seed=53,
    ),
    "hunyuan-moe": TinyModel(
        "hunyuan_v1_moe",
        {
            "num_experts": 5,
            "moe_topk": [2, 2, 2],
            "intermediate_size": 40,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "alpha": 1000.0,
                "factor": 1.0,
            },
        },
        seed=54,
    ),
    # Neighbours are turned, in 8 of 16 dimensions; norms before and after.
    "glm4": TinyModel("glm4", seed=42),
    "glm": TinyModel(
        "glm", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}, seed=43
    ),
    "glm4-moe": TinyModel(
        "glm4_moe",
        {
            "use_qk_norm": True,
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
        },
        seed=15,
    ),
    # GLM 4.5 Air has no norms of heads, and one group of experts.
    "glm4-moe-air": TinyModel(
        "glm4_moe",
        {
            "use_qk_norm": False,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "attention_bias": True,
        },
        seed=37,
    ),
    "qwen2-moe": TinyModel(
        "qwen2_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
            "num_key_value_heads": 2,
            "decoder_sparse_step": 2,
        },
        seed=16,
    ),
    # The middle layer sees no positions; keys that it lacks have other defaults than Llama's.
    "smollm3": TinyModel("smollm3", {"no_rope_layer_interval": 2}, seed=8),
    # 12 of 16 dimensions of a head are turned, and cos and sin are 1.2 times themselves.
    "phi3": TinyModel(
        "phi3",
        {
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "attention_factor": 1.2,
                "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
                "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 13.0],
            },
        },
        seed=9,
    ),
    # A window that ends inside a block of 8 as of 16; and one for some of the layers.
    "mistral-window": TinyModel("mistral", {"sliding_window": 21}, seed=6),
    "qwen3-window": TinyModel(
        "qwen3", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}, seed=7
    ),
    # Two of three layers are recurrent; 4 of 16 dimensions of a head are turned.
    "qwen3.5": TinyModel("qwen3_5_text", HYBRID, seed=12),
    # Heads of odd sizes, the first layer with attention, and projections in another order.
    "qwen3-next": TinyModel(
        "qwen3_next",
        HYBRID
        | {
            "num_experts": 0,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
            "attention_bias": True,
        },
        seed=13,
    ),
    # Recurrent layers with experts, held in one tensor for all of a layer.
    "qwen3.5-moe": TinyModel(
        "qwen3_5_moe_text",
        HYBRID | HYBRID_EXPERTS,
        seed=21,
        saved_as={"save_original_format": False},
    ),
    # A layer with a feed-forward, and weights of experts that do not add up to one.
    "qwen3-next-moe": TinyModel(
        "qwen3_next",
        HYBRID | HYBRID_EXPERTS | {"mlp_only_layers": [0], "norm_topk_prob": False},
        seed=18,
    ),
    # Layers that see all keys do not turn, those with a window do, and others are recurrent.
    "lara": TinyModel(
        "lara_mini",
        HYBRID
        | HYBRID_EXPERTS
        | {
            "num_hidden_layers": 4,
            "layer_types": [
                *("linear_attention", "sliding_attention"),
                *("linear_attention", "full_attention"),
            ],
            "linear_value_head_dim": 20,
            "sliding_window": 13,
            "rms_norm_eps": 0.02,
        },
        seed=154,
    ),
    # Mixers with and without a feed-forward behind them; heads of odd sizes.
    "nemotron-h": TinyModel(
        "nemotron_h",
        NEMOTRON_H
        | {
            "layers_block_type": [
                *("linear_attention", "mlp", "linear_attention", "full_attention", "mlp"),
                *("linear_attention", "full_attention"),
            ],
            "num_hidden_layers": 7,
        },
        seed=41,
    ),
    # Experts without a gate, in groups, behind some mixers; a feed-forward behind another.
    "nemotron-h-moe": TinyModel(
        "nemotron_h",
        NEMOTRON_H
        | {
            "layers_block_type": [
                *("linear_attention", "moe", "full_attention", "moe", "linear_attention", "mlp"),
                *("linear_attention", "full_attention"),
            ],
            "num_hidden_layers": 8,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 3,
            "topk_group": 2,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 56,
            "routed_scaling_factor": 2.5,
        },
        seed=42,
    ),
    # Nemotron 3 Super: experts in a latent space, as wide inside as the residual stream.
    "nemotron-h-latent": TinyModel(
        "nemotron_h",
        NEMOTRON_H
        | {
            "layers_block_type": [
                *("linear_attention", "moe", "full_attention", "moe", "linear_attention"),
            ],
            "num_hidden_layers": 5,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "moe_latent_size": 24,
            "moe_shared_expert_intermediate_size": 56,
            "head_dim": 24,
            "routed_scaling_factor": 2.5,
        },
        seed=123,
    ),
    # Mamba-2 layers, and attention without RoPE; experts with one beside them, or that one alone.
    "granite-hybrid": TinyModel(
        "granitemoehybrid",
        {
            **GRANITE_HYBRID,
            "num_local_experts": 5,
            "intermediate_size": 24,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
        seed=61,
    ),
    # With RoPE.
    "granite-hybrid-dense": TinyModel(
        "granitemoehybrid",
        {
            **GRANITE_HYBRID,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "tie_word_embeddings": True,
        },
        seed=62,
    ),
    # Mamba-2 layers, and attention in which half of a head turns; one feed-forward each.
    "bamba": TinyModel(
        "bamba",
        {
            "attn_layer_indices": [1],
            "mamba_d_state": 20,
            "mamba_n_groups": 4,
            "mamba_n_heads": 8,
            "attention_bias": True,
            "mlp_bias": True,
        },
        seed=125,
    ),
    # Attention and Mamba-2 side by side, and every multiplier; one group without a norm.
    "falcon-h1": TinyModel("falcon_h1", FALCON_H1, seed=64),
    # A norm before the gate, groups, another convolution, tied embeddings and all biases.
    "falcon-h1-norm": TinyModel(
        "falcon_h1",
        FALCON_H1
        | {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "mamba_n_groups": 4,
            "mamba_d_conv": 3,
            "tie_word_embeddings": True,
            **dict.fromkeys(("attention_bias", "mlp_bias"), True),
            **dict.fromkeys(("mamba_proj_bias", "projectors_bias"), True),
        },
        seed=65,
    ),
    # A decay for each channel of a head of odd size; latent attention that does not turn; experts
    # in groups behind a dense layer.
    "kimi-linear": TinyModel(
        "kimi_linear",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_heads": 4,
            "linear_head_dim": 20,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 24,
            "v_head_dim": 20,
            "num_key_value_heads": 4,
            "num_local_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 24,
        },
        seed=111,
    ),
    # The first layer with attention, whose queries come from a vector of their own; no experts. One
    # tensor for three convolutions, as transformers 5 holds them.
    "kimi-linear-dense": TinyModel(
        "kimi_linear",
        {
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "mlp_layer_types": ["dense"] * 3,
            "linear_num_heads": 4,
            "linear_head_dim": 16,
            "linear_conv_kernel_dim": 3,
            "kv_lora_rank": 32,
            "q_lora_rank": 40,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 24,
            "v_head_dim": 20,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
        seed=112,
        saved_as={"save_original_format": False},
    ),
    # A bounded decay for each channel of a head of odd size; latent attention that turns, with a
    # gate of each head; experts in groups behind a dense layer.
    "ling": TinyModel(
        "bailing_hybrid",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "head_dim": 20,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 24,
            "v_head_dim": 20,
            "num_key_value_heads": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 24,
            "kda_lower_bound": -3.5,
        },
        seed=146,
        hub_class="BailingMoeV3ForCausalLM",
    ),
    # Without a bound; the first layer with attention. By transformers' own names.
    "ling-unbounded": TinyModel(
        "bailing_hybrid",
        {
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "kda_safe_gate": False,
            "head_dim": 16,
            "short_conv_kernel_size": 3,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 24,
            "v_head_dim": 28,
            "num_key_value_heads": 4,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
        seed=141,
        saved_as={"save_original_format": False},
    ),
    # Short convolutions with biases and of another size; a feed-forward of two thirds, rounded up.
    "lfm2": TinyModel(
        "lfm2",
        {
            "hidden_size": 72,
            "num_attention_heads": 6,
            "head_dim": 12,
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_multiple_of": 24,
            "block_ffn_dim_multiplier": 1.3,
            "layer_types": ["conv", "full_attention", "conv"],
            "tie_word_embeddings": False,
        },
        seed=63,
    ),
    # A dense layer first; scores by sigmoid with a bias, whose sum a small number is added to.
    "lfm2-moe": TinyModel(
        "lfm2_moe",
        {
            "layer_types": ["conv", "conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.7,
        },
        seed=64,
    ),
    # Norms before and after, a gate for each head, a window of one of two layers with attention.
    "lfm3": TinyModel(
        "lfm3",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "conv", "full_attention", "conv"],
            "sliding_window": 13,
        },
        seed=121,
    ),
    # Norms after attention, and before recurrent layers, whose shares go up to 2; no layer turns.
    "olmo-hybrid": TinyModel(
        "olmo_hybrid",
        HYBRID
        | {
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
        seed=122,
        saved_as={"save_original_format": False},  # else it divides the convolutions evenly
    ),
    # The middle layer sees everything, and turns by another theta than those with a window.
    "gemma": TinyModel(
        "gemma", {"hidden_size": 48, "head_dim": 32, "num_key_value_heads": 1}, seed=108
    ),
    # Caps that most scores and logits reach.
    "gemma2": TinyModel(
        "gemma2",
        {
            "hidden_size": 48,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 13,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
        seed=109,
    ),
    "vaultgemma": TinyModel(
        "vaultgemma",
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 24,
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": None,
            "attention_bias": True,
        },
        seed=110,
    ),
    "gemma3": TinyModel(
        "gemma3_text",
        {
            "hidden_size": 48,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 13,
            "sliding_window_pattern": 2,
        },
        seed=10,
    ),
    "gemma3-softcap": TinyModel(
        "gemma3_text",
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": LINEAR_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
            "final_logit_softcapping": 5.0,
            "attention_bias": True,
        },
        seed=11,
    ),
    # Heads of two sizes and numbers; where everything is seen, v is k.
    "gemma4": TinyModel(
        "gemma4_unified_text",
        {
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 13,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 5.0,
        },
        seed=22,
    ),
    # Experts beside a feed-forward, by a router with a norm and scales of its own.
    "gemma4-moe": TinyModel(
        "gemma4_text",
        {
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
            "sliding_window": 13,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
        seed=24,
    ),
    # The last three layers read what the second and the third have stored; each has inputs.
    "gemma4-shared": TinyModel(
        "gemma4_text",
        {
            "hidden_size": 48,
            "num_hidden_layers": 6,
            "num_key_value_heads": 1,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": TOKENIZER_SIZE,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
        seed=23,
    ),
}
