"""What a GGUF file says of one family alone, by the names of Hugging Face."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from nanoengine.errors import CorruptModelError, UnsupportedModelError
from nanoengine.loading.gguf.metadata import Metadata
from nanoengine.loading.gguf.rope_scaling import original_length, scaling_factor
from nanoengine.loading.layer_kinds import FULL, RECURRENT, SLIDING

COHERE_INTERVAL = MUSE_INTERVAL = 4
EXAONE_INTERVAL = OLMO_INTERVAL = 4
EXAONE_WINDOWS = {64: 4096}  # by layers, of files that do not say it
GEMMA_INTERVAL, GEMMA_LOCAL_THETA, GEMMA_27B_LAYERS = 6, 10000.0, 62
GEMMA_2_INTERVAL, GEMMA_2_27B_LAYERS, GEMMA_2_WINDOW = 2, 46, 4096
MINICPM = "minicpm"
# Settings that change the arithmetic, and Hugging Face's keys for them, which Granite alone has.
GRANITE_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def phi3_settings(metadata: Metadata) -> dict[str, Any]:
    """The window, and the positions that the factors of the RoPE are about."""
    return {
        "original_max_position_embeddings": original_length(metadata),
        "sliding_window": metadata.window(),
    }


def mistral_settings(metadata: Metadata, stored: Mapping[str, Any]) -> dict[str, Any]:
    """A Llama with a window in every layer."""
    biased = sorted(name for name in stored if name.endswith(".bias"))
    if biased:
        raise UnsupportedModelError(
            f"{metadata.path}: a sliding window beside {biased[0]!r} is not supported"
        )
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": metadata.window(),
    }


def recurrent_settings(
    metadata: Metadata, stored: Mapping[str, Any], num_layers: int
) -> dict[str, Any]:
    """Gated delta rules are in the layers that have its tensors."""
    keys, heads, value_dim = recurrent_sizes(metadata)
    kinds = [RECURRENT if f"blk.{i}.ssm_a" in stored else FULL for i in range(num_layers)]
    return {
        "layer_types": kinds,
        "linear_conv_kernel_dim": metadata.number("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.number("ssm.state_size"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": heads,
        "linear_value_head_dim": value_dim,
    }


KIMIS = ("bailingmoe3", "kimi-linear")
# Of Ling's config.json: the keys of a file.
CLAMPS = {
    "expert_swiglu_limit_list": "swiglu_clamp_exp",
    "share_expert_swiglu_limit_list": "swiglu_clamp_shexp",
}


def kimi_settings(metadata: Metadata, stored: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The heads of Kimi's rule are as many as its rates of decay."""
    of_rates = [f"blk.{i}.ssm_a" for i in range(num_layers)]
    heads = {math.prod(map(int, stored[name].shape)) for name in of_rates if name in stored}
    if len(heads) > 1:
        raise UnsupportedModelError(
            f"{metadata.path}: recurrent layers have {sorted(heads)} heads, and must be alike"
        )
    settings = {
        "layer_types": [RECURRENT if name in stored else FULL for name in of_rates],
        "linear_conv_kernel_dim": metadata.number("ssm.conv_kernel"),
        "linear_head_dim": metadata.number("kda.head_dim"),
        "linear_num_heads": heads.pop() if heads else 1,
    }
    return settings | (_ling_settings(metadata) if metadata.architecture == "bailingmoe3" else {})


def _ling_settings(metadata: Metadata) -> dict[str, Any]:
    """What bounds decays, and what experts multiply. Raises UnsupportedModelError."""
    if not metadata.flag("kda.safe_gate", default=True):
        raise UnsupportedModelError(
            f"{metadata.path}: 'bailingmoe3.kda.safe_gate' is false, which llama.cpp does not run "
            "either"
        )
    limits = {}
    for key, name in CLAMPS.items():
        if metadata.has(whole := f"bailingmoe3.{name}"):
            limits[key] = metadata.reals(whole, metadata.number("block_count"))
    return limits | {"kda_lower_bound": metadata.real("kda.gate_lower_bound")}


def recurrent_sizes(metadata: Metadata) -> tuple[int, int, int]:
    """Key heads, value heads and the values of one of these. Raises CorruptModelError."""
    keys, heads = metadata.number("ssm.group_count"), metadata.number("ssm.time_step_rank")
    inner = metadata.number("ssm.inner_size")
    if heads % keys or inner % heads:
        raise CorruptModelError(
            f"{metadata.path}: {keys} key heads, {heads} value heads and {inner} values of a "
            "recurrent layer; each must be a multiple of the one before"
        )
    return keys, heads, inner // heads


def gemma3_settings(metadata: Metadata, width_per_head: int, head_dim: int) -> dict[str, Any]:
    """The layers with a window, their RoPE and the scale of scores, as llama.cpp knows them.

    width_per_head: of the residual stream, by which the model of 27B scales its scores.
    """
    num_layers = metadata.number("block_count")
    interval = metadata.number("attention.sliding_window_pattern", GEMMA_INTERVAL)
    window = metadata.count("attention.sliding_window")
    kinds = [SLIDING if window and (i + 1) % interval else FULL for i in range(num_layers)]
    return {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": kinds,
        "sliding_window": window or 4096,
        "rope_local_base_freq": metadata.real("rope.freq_base_swa", GEMMA_LOCAL_THETA),
        "query_pre_attn_scalar": width_per_head if num_layers == GEMMA_27B_LAYERS else head_dim,
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 0.0) or None,
    }


def gemma2_settings(metadata: Metadata, width_per_head: int, head_dim: int) -> dict[str, Any]:
    """The windows, the softcaps and the scale of scores, as llama.cpp knows them.

    width_per_head: as of gemma3_settings.
    """
    num_layers = metadata.number("block_count")
    has_window = metadata.have_windows(num_layers, GEMMA_2_INTERVAL)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [SLIDING if has else FULL for has in has_window],
        "sliding_window": metadata.number("attention.sliding_window", GEMMA_2_WINDOW),
        "query_pre_attn_scalar": width_per_head if num_layers == GEMMA_2_27B_LAYERS else head_dim,
        "attn_logit_softcapping": metadata.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 30.0) or None,
    }


def cohere_settings(metadata: Metadata, num_layers: int) -> dict[str, Any]:
    """A file of Command R7B says that every so many-th layer sees all keys, or which ones, or
    neither. To llama.cpp 0 is no factor of the logits. Raises as `_check_one_theta`.
    """
    settings: dict[str, Any] = {"logit_scale": metadata.real("logit_scale", 0.0) or 1.0}
    if metadata.architecture == "cohere2moe":
        _check_one_theta(metadata)
        settings["rms_norm_eps"] = metadata.real("attention.layer_norm_rms_epsilon")
    else:
        settings["layer_norm_eps"] = metadata.real("attention.layer_norm_epsilon")
    if metadata.architecture == "command-r":
        return settings
    interval = COHERE_INTERVAL if metadata.architecture == "cohere2" else None
    has_window = metadata.have_windows(num_layers, interval)
    # Also one that no text is longer than: layers without one do not rotate.
    return settings | {
        "layer_types": [SLIDING if has else FULL for has in has_window],
        "sliding_window": metadata.number("attention.sliding_window"),
    }


def muse_settings(metadata: Metadata, stored: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Layers with a window turn, others do not. Raises UnsupportedModelError for norms of q or k
    that are more than one factor of queries, and for RoPE that is scaled.
    """
    _check_one_theta(metadata)
    if (
        scaling_factor(metadata) != 1.0
    ):  # of layers without a window, to llama.cpp, where none turns
        raise UnsupportedModelError(
            f"{metadata.path}: 'muse-glimmer.rope.scaling.factor' is {scaling_factor(metadata):g}, "
            "which is not supported; supported: 1"
        )
    has_window = metadata.have_windows(num_layers, MUSE_INTERVAL)
    theta = metadata.real("rope.freq_base", 10000.0)
    return {
        "hidden_activation": "silu",
        "layer_types": [SLIDING if has else FULL for has in has_window],
        "layer_rope_theta": [theta if has else 0 for has in has_window],
        "sliding_window": metadata.number("attention.sliding_window"),
        "qk_scale_factor": _factor_of_queries(metadata, stored, num_layers),
        "output_multiplier": metadata.real("logit_scale"),
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 30.0) or None,
    }


def _factor_of_queries(metadata: Metadata, stored: Mapping[str, Any], num_layers: int) -> float:
    """What all weights of the norms of q are, where those of k are 1."""
    found: dict[str, set[float]] = {"q": set(), "k": set()}
    for layer in range(num_layers):
        for part, values in found.items():
            name = f"blk.{layer}.attn_{part}_norm.weight"
            if name not in stored:
                raise CorruptModelError(f"{metadata.path} has no tensor {name!r}")
            values |= {*np.array(stored[name].data, dtype=np.float32).reshape(-1).tolist()}
    if len(found["q"]) != 1 or found["k"] != {1.0}:
        raise UnsupportedModelError(
            f"{metadata.path}: the weights of 'attn_q_norm' and 'attn_k_norm' are more than one "
            "factor of queries, which is not supported"
        )
    return float(str(np.float32(found["q"].pop())))


def _check_one_theta(metadata: Metadata) -> None:
    """Raise UnsupportedModelError if layers with a window turn by another one."""
    key = "rope.freq_base_swa"
    theta = metadata.real("rope.freq_base", 10000.0)
    if metadata.real(key, theta) != theta:
        raise UnsupportedModelError(
            f"{metadata.path}: '{metadata.architecture}.{key}' is {metadata.real(key):g}, and "
            f"'rope.freq_base' {theta:g}; two are not supported here"
        )


def exaone_settings(metadata: Metadata, num_layers: int) -> dict[str, Any]:
    """A window that no text is longer than counts, too: layers without one do not rotate. Older
    files do not say which layers have it.
    """
    window = metadata.count("attention.sliding_window") or EXAONE_WINDOWS.get(num_layers)
    has_window = metadata.have_windows(num_layers, EXAONE_INTERVAL)
    kinds = [SLIDING if window and has else FULL for has in has_window]
    return {"sliding_window": window, "layer_types": kinds}


def olmo_settings(metadata: Metadata, num_layers: int) -> dict[str, Any]:
    """OLMo 3 is an OLMo 2 with windows, in whose layers RoPE is not scaled; older files do not say
    which layers these are.
    """
    window = metadata.count("attention.sliding_window")
    if not window:
        return {}
    has_window = metadata.have_windows(num_layers, OLMO_INTERVAL)
    theta = metadata.real("rope.freq_base", 10000.0)
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": [SLIDING if has else FULL for has in has_window],
        "rope_local_base_freq": metadata.real("rope.freq_base_swa", theta),
    }


def mellum_settings(metadata: Metadata, num_layers: int) -> dict[str, Any]:
    """In layers with a window RoPE is not scaled."""
    window = metadata.count("attention.sliding_window")
    has_window = metadata.have_windows(num_layers) if window else [False] * num_layers
    theta = metadata.real("rope.freq_base", 10000.0)
    return {
        "sliding_window": window or None,
        "layer_types": [SLIDING if has else FULL for has in has_window],
        "rope_local_base_freq": metadata.real("rope.freq_base_swa", theta),
    }


def granite_settings(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    """To llama.cpp 0 is no factor, and scores are divided by the root of head_dim then. Raises
    UnsupportedModelError for a MiniCPM of 2024, which does not say its factors.
    """
    if metadata.architecture == MINICPM and not metadata.real("logit_scale", 0.0):
        raise UnsupportedModelError(
            f"{metadata.path} lacks the key 'minicpm.logit_scale', without which logits are not "
            "those of the model; take a file that llama.cpp made since 2025"
        )
    usual = {"attention.scale": head_dim**-0.5}
    return {
        name: metadata.real(key, 0.0) or usual.get(key, 1.0) for key, name in GRANITE_KEYS.items()
    }
