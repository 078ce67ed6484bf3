"""The names that tensors of a GGUF have at Hugging Face."""

from __future__ import annotations

from nanoengine.loading.gguf.mamba import NEMOTRON_NAMES
from nanoengine.models.architecture import MTP_JOIN, MTP_NORMS

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "token_embd_norm.weight": "model.embedding_norm.weight",  # LFM2's, behind the last layer
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PHI3_NAMES = _LAYER_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GEMMA_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GLM4_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "post_ffw_norm": "post_mlp_layernorm",
}
_HUNYUAN_NAMES = _LAYER_NAMES | {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
_GEMMA_4_NAMES = _GEMMA_NAMES | {
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
# Names that do not end in ".weight" at Hugging Face, or in the file.
WHOLE_NAMES = {
    "ffn_norm": "pre_ff_layernorm.weight",  # Falcon-H1's
    "attn_sinks.weight": "self_attn.sinks",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_LATENT_NAMES = _LAYER_NAMES | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_KIMI_NAMES = _LATENT_NAMES | {
    "ssm_beta": "self_attn.b_proj",
    "ssm_conv1d_k": "self_attn.k_conv1d",
    "ssm_conv1d_q": "self_attn.q_conv1d",
    "ssm_conv1d_v": "self_attn.v_conv1d",
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_norm": "self_attn.o_norm",
}
_LING_NAMES = _KIMI_NAMES | {
    "attn_gate": "self_attn.g_proj",
    "layer_output_norm": MTP_NORMS[2],
    "ssm_f_a": "self_attn.f_proj",
    "ssm_g_a": "self_attn.g_proj",
}
# Of the head for multi-token prediction, beside its layer. A file may have copies of the model's
# embedding and output head, too.
_MTP_NAMES = {
    "nextn.enorm": MTP_NORMS[0],
    "nextn.hnorm": MTP_NORMS[1],
    "nextn.shared_head_norm": MTP_NORMS[2],
    "nextn.eh_proj": MTP_JOIN,
}
_LFM2_NAMES = _LAYER_NAMES | {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}
_NEWER_NAMES = _LAYER_NAMES | {"post_attention_norm": "post_attention_layernorm"}
_NORMS_AFTER_NAMES = _NEWER_NAMES | {"post_ffw_norm": "post_feedforward_layernorm"}
_NAMES = {
    "afmoe": _LAYER_NAMES
    | {
        "attn_gate": "self_attn.g_proj",
        "ffn_norm": "pre_mlp_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    "bailingmoe2": _LAYER_NAMES
    | {"attn_qkv": "self_attn.qkv_proj", "layer_output_norm": MTP_NORMS[2]},
    "bailingmoe3": _LING_NAMES,
    "deepseek2": _LATENT_NAMES,
    "apertus": _LAYER_NAMES
    | {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
    "exaone4": _NORMS_AFTER_NAMES,
    "falcon-h1": _LAYER_NAMES | {"ffn_norm": "pre_ff_layernorm"},
    "gemma2": _GEMMA_NAMES,
    "gemma3": _GEMMA_NAMES,
    "gemma4": _GEMMA_4_NAMES,
    "glm4": _GLM4_NAMES,
    "glm4moe": _NEWER_NAMES,
    "gpt-oss": _NEWER_NAMES,
    "hunyuan-dense": _HUNYUAN_NAMES,
    "hunyuan-moe": _HUNYUAN_NAMES,
    "kimi-linear": _KIMI_NAMES,
    "laguna": _LAYER_NAMES | {"attn_gate": "self_attn.g_proj"},
    "lfm2": _LFM2_NAMES,
    "lfm2moe": _LFM2_NAMES,
    "muse-glimmer": _GEMMA_NAMES | {"attn_gate": "self_attn.g_proj"},
    "nemotron_h": NEMOTRON_NAMES,
    "nemotron_h_moe": NEMOTRON_NAMES,
    "olmo2": _NORMS_AFTER_NAMES,
    "phi3": _PHI3_NAMES,
    "qwen35": _NEWER_NAMES,
    "qwen35moe": _NEWER_NAMES,
    "qwen3next": _NEWER_NAMES,
    "seed_oss": _NEWER_NAMES,
}


def layer_names(architecture: str) -> dict[str, str]:
    """Of a layer's tensors, without its number and the ending."""
    return _NAMES.get(architecture, _LAYER_NAMES) | _MTP_NAMES
