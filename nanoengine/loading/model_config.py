"""Reads a checkpoint's config.json, with every value checked, as a ModelConfig."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from nanoengine.config.model import (
    AnyRecurrent,
    Factors,
    LatentConfig,
    LayerShape,
    ModelConfig,
    RecurrentConfig,
    RopeConfig,
)
from nanoengine.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError, shown
from nanoengine.loading.experts_json import dense_layers, read_experts
from nanoengine.loading.fp8 import GROUP, fp8_block
from nanoengine.loading.kimi import read_kimi, with_usual_keys
from nanoengine.loading.latent_json import latent_scalar, leave_out_share, read_latent
from nanoengine.loading.layer_kinds import (
    FULL,
    MAX_STATE_DIM,
    RECURRENT,
    layer_windows,
    read_conv_size,
    read_heads,
    recurrent_layers,
)
from nanoengine.loading.layer_shapes import HEADS, read_head_counts, read_shapes
from nanoengine.loading.left_out import read_left_out
from nanoengine.loading.ling import read_ling, with_lings_keys
from nanoengine.loading.mixers import (
    ATTENTION,
    BOTH,
    MAMBA,
    eps_key,
    read_inner_size,
    read_mamba,
    read_mixers,
    read_pattern,
)
from nanoengine.loading.modelopt import quantization_of
from nanoengine.loading.multipliers import (
    GRANITE_FACTORS,
    checked_factor,
    with_granites_names,
    with_multipliers,
)
from nanoengine.loading.nf4 import has_nf4
from nanoengine.loading.nvfp4 import has_nvfp4
from nanoengine.loading.packed_ints import packed_format
from nanoengine.loading.refused import (
    about_architecture,
    about_folder,
    about_quantization,
    quant_method,
    rotates_activations,
)
from nanoengine.loading.rope_json import read_rope, read_ropes_by_kind, with_one_theta
from nanoengine.loading.short_convs import ADJUSTS, read_adjusted_size, read_short_convs
from nanoengine.loading.wrappers import WRAPPERS, text_config
from nanoengine.models.architecture import Architecture
from nanoengine.models.architectures import ARCHITECTURES, SPELLINGS
from nanoengine.models.families import OUT_IS_TILED
from nanoengine.text.checked_json import CheckedJson, has_file, read_json_if_any
from nanoengine.text.tokenizer_files import read_eos_id

MAX_LAYERS = 1000
DOUBLES = "linear_allow_neg_eigval"  # RecurrentConfig's doubles_steps
SIZES = ("num_attention_heads", "hidden_size", "vocab_size")
LOGIT_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")


def read_model_config(folder: Path, max_model_len: int | None = None) -> ModelConfig:
    """Read config.json, generation_config.json and the tokenizer's end token as a ModelConfig.

    A class in WRAPPERS has it under `text_config`. RoPE is read in both spellings (`rope_theta` and
    `rope_scaling`, or `rope_parameters`).
    max_model_len: the engine's setting, for RoPE kinds that depend on the length.
    Raises ModelNotFoundError without a config.json, CorruptModelError for an unreadable one or
    impossible numbers, UnsupportedModelError for an unknown architecture or setting.
    """
    content = config_json(folder)
    return config_of(content, *_architecture(content), max_model_len)


def config_of(
    content: CheckedJson, name: str, wrapper: str, max_model_len: int | None
) -> ModelConfig:
    """As read_model_config, of a config.json of this architecture. wrapper: as in ModelConfig."""
    folder = content.path.parent
    architecture, reads = ARCHITECTURES[name], ARCHITECTURES[name].reads
    _complete(content, architecture, wrapper or name)
    codes = _codes(content, architecture)
    num_heads, hidden_size, vocab_size = map(content.size, SIZES)
    mixers, num_layers = _layers(content, architecture)
    latent = read_latent(content, num_heads) if architecture.latent else None
    head_dim = latent.row_dim if latent else _head_dim(content, hidden_size // num_heads)
    windows = layer_windows(name, content.values, num_layers, content.path)
    of_layers = windows or (None,) * num_layers
    shapes = _shapes(content, architecture, of_layers)
    head_dims = _head_dims(shapes, of_layers, head_dim)
    rope, local_rope, max_position = _ropes(content, architecture, head_dims, latent, max_model_len)
    config = ModelConfig(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_inner_size(content, architecture),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=1 if latent else content.size("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rms_norm_eps=content.real(eps_key(architecture), 1e-6),
        max_position=max_position,
        tie_word_embeddings=content.flag("tie_word_embeddings"),
        rope=rope,
        attention_bias=content.flag("attention_bias"),
        mlp_bias=content.flag("mlp_bias"),
        local_rope=local_rope,
        no_rope_layers=_no_rope_layers(content, architecture, of_layers),
        eos_token_ids=_eos_token_ids(folder, content, vocab_size),
        windows=windows,
        query_pre_attn_scalar=_query_scalar(content, architecture, latent, head_dim),
        attn_logit_softcap=_softcap(content, reads, "attn_logit_softcapping"),
        final_logit_softcap=_softcap(content, reads, "final_logit_softcapping"),
        norm_after_eps=content.real("post_norm_eps") if "post_norm_eps" in reads else None,
        wrapper=wrapper,
        recurrent=_recurrent(content, architecture, mixers, num_layers),
        attends_beside=architecture.hybrid == "beside",
        bare_layers=tuple(i for i, mixer in enumerate(mixers) if mixer in (MAMBA, ATTENTION)),
        experts=read_experts(content, architecture.experts, num_layers, mixers),
        shapes=shapes,
        layer_input_size=_layer_input_size(content, architecture, vocab_size),
        codes=codes,
        left_out=read_left_out(content.get("quantization_config")),
        stored_dtype=str(content.get("dtype") or content.get("torch_dtype") or ""),
        latent=latent,
        has_qk_norm="use_qk_norm" not in reads or content.flag("use_qk_norm"),
        factors=_factors(content, reads),
    )
    return _with_good_heads(with_multipliers(config, content), content.path)


def _complete(content: CheckedJson, architecture: Architecture, class_name: str) -> None:
    """Fill in what is missing, by its usual name. Raises as `_refuse_settings`."""
    content.fill(architecture.defaults)
    for usual, own in architecture.keys.items():
        if content.get(own) is not None:
            content.values[usual] = content.values[own]
    content.values["quantization_config"] = quantization_of(content.path.parent, content.values)
    if architecture.hybrid == "kimi":
        with_usual_keys(content)
    elif architecture.hybrid == "ling":
        with_lings_keys(content)
    if "scale_depth" in architecture.reads:
        with_granites_names(content)
    if "layer_rope_theta" in architecture.reads:
        num_layers = content.size("num_hidden_layers", limit=MAX_LAYERS)
        with_one_theta(content, num_layers, "layer_rope_theta" in architecture.needs)
    _refuse_settings(content, architecture, class_name)


def _inner_size(content: CheckedJson, architecture: Architecture) -> int:
    if ADJUSTS in architecture.reads:
        return read_adjusted_size(content)
    return read_inner_size(content, architecture)


def _head_dim(content: CheckedJson, usual: int) -> int:
    return content.size("head_dim", max(usual, 1))


def _query_scalar(
    content: CheckedJson, architecture: Architecture, latent: LatentConfig | None, head_dim: int
) -> float | None:
    reads, defaults = architecture.reads, architecture.defaults
    if latent is not None:
        # Mistral 4 was trained without that factor: its params.json has `apply_scale` false.
        # transformers multiplies by it since 5.17, vLLM and SGLang do not.
        return latent_scalar(content, latent, is_plain=architecture.scales_queries)
    if "attention_multiplier" in reads:
        if content.get("attention_multiplier") is None and "attention_multiplier" in defaults:
            return None  # the usual root of head_dim
        return _factor(content, reads, "attention_multiplier") ** -2
    if "qk_scale_factor" in reads:  # of queries; then scores are divided as usual
        return head_dim / _factor(content, reads, "qk_scale_factor") ** 2
    return content.real("query_pre_attn_scalar") if "query_pre_attn_scalar" in reads else None


def _factors(content: CheckedJson, reads: Collection[str]) -> Factors:
    """Cohere's, Falcon-H1's and Muse's logits are multiplied, Granite's divided."""
    factors = Factors(*(_factor(content, reads, name) for name in GRANITE_FACTORS))
    by = (_factor(content, reads, name) for name in LOGIT_FACTORS)
    if "mup_enabled" in reads and content.flag("mup_enabled"):
        factors = replace(factors, embeddings=content.size("hidden_size") ** 0.5)
    return replace(factors, logits=factors.logits / math.prod(by))


def _factor(content: CheckedJson, reads: Collection[str], name: str) -> float:
    return checked_factor(content, name, content.get(name)) if name in reads else 1.0


def config_json(folder: Path) -> CheckedJson:
    """The config.json of a folder. Raises ModelNotFoundError."""
    path = folder / "config.json"
    if has_file(path):
        return CheckedJson(path)
    raise ModelNotFoundError(f"{folder} has no config.json{about_folder(folder)}")


def _architecture(content: CheckedJson) -> tuple[str, str]:
    """The architecture, and the class that wraps it, whose text model `content` becomes; "" if no
    class does.
    """
    named = content.get("architectures")
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise CorruptModelError(f"{content.path}: 'architectures' must be a list of names")
    for name in (SPELLINGS.get(str(name), str(name)) for name in named):
        if name in ARCHITECTURES:
            return name, ""
        if name in WRAPPERS:
            return _unwrap(content, name), name
    raise UnsupportedModelError(f"{content.path}: {about_architecture(', '.join(named))}")


def _unwrap(content: CheckedJson, wrapper: str) -> str:
    inner = text_config(content.values)
    if inner is None:
        raise CorruptModelError(f"{content.path}: 'text_config' of a {wrapper} must be an object")
    kind = inner.get("model_type")
    name = WRAPPERS[wrapper].get(kind, "") if isinstance(kind, str) else ""
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{content.path}: the text model of this {wrapper} is {shown(kind)}, which is not "
            f"supported; supported: {', '.join(WRAPPERS[wrapper])}"
        )
    content.values = inner
    return name


def _layers(content: CheckedJson, architecture: Architecture) -> tuple[list[str], int]:
    """As mixers.read_pattern, [] for other architectures; and the number of layers."""
    if architecture.hybrid == "apart":
        mixers = read_pattern(content)
        return mixers, len(mixers)
    num_layers = content.size("num_hidden_layers", limit=MAX_LAYERS)
    mixers = (
        read_mixers(content, architecture, num_layers) if architecture.hybrid == "mixers" else []
    )
    return [BOTH] * num_layers if architecture.hybrid == "beside" else mixers, num_layers


def _shapes(
    content: CheckedJson, architecture: Architecture, windows: Sequence[int | None]
) -> tuple[LayerShape, ...]:
    if HEADS in architecture.reads:
        return read_head_counts(content, len(windows))
    return read_shapes(content, windows) if architecture.shapes_by_layer else ()


def _with_good_heads(config: ModelConfig, path: Path) -> ModelConfig:
    shapes = [config.shape(layer) for layer in config.attention_layers]
    for num_heads, (num, dim) in {(shape.num_heads, shape.kv_heads) for shape in shapes}:
        if num_heads % num or dim % 2:
            raise UnsupportedModelError(
                f"{path}: {num_heads} heads, {num} KV heads of {dim}; heads must be a multiple of "
                "KV heads, and the head size even"
            )
    return config


def _head_dims(
    shapes: Sequence[LayerShape], windows: Sequence[int | None], usual: int
) -> tuple[int, int]:
    """Of the layers that see all keys, and of those with a window."""
    each = zip(windows, shapes, strict=bool(shapes))
    found = {window is not None: shape.head_dim for window, shape in each}
    return found.get(False, usual), found.get(True, usual)


def _layer_input_size(content: CheckedJson, architecture: Architecture, vocab_size: int) -> int:
    size = content.get("hidden_size_per_layer_input") if architecture.layer_inputs else 0
    if not size:
        return 0
    if content.size("vocab_size_per_layer_input", vocab_size) != vocab_size:
        raise UnsupportedModelError(
            f"{content.path}: 'vocab_size_per_layer_input' is not the 'vocab_size', which is not "
            "supported"
        )
    return content.size("hidden_size_per_layer_input")


def _softcap(content: CheckedJson, reads: Collection[str], name: str) -> float | None:
    """By this key; None if the architecture or the checkpoint has none."""
    is_set = name in reads and content.get(name) is not None
    return content.real(name) if is_set else None


def _no_rope_layers(
    content: CheckedJson, architecture: Architecture, windows: Sequence[int | None]
) -> tuple[int, ...]:
    """Layers without RoPE. Nemotron-H's and Kimi's: all, and Granite 4's, but for Micro; OLMo
    Hybrid's, where it says so. SmolLM3's: zeros in a list, or the last layer of each interval.
    """
    num_layers = len(windows)
    has_none = architecture.hybrid == "mixers" and content.get("position_embedding_type") != "rope"
    has_none |= "rope_theta" in architecture.reads and _lacks_rope(content)
    if architecture.hybrid in ("apart", "kimi") or has_none:
        return tuple(range(num_layers))
    if architecture.ropes_in_windows and content.get("sliding_window") is not None:
        turned = dense_layers(content, num_layers) if _turns_dense(content, architecture) else ()
        return tuple(i for i, window in enumerate(windows) if window is None and i not in turned)
    if "no_rope_layers" not in architecture.reads:
        return ()
    listed = content.get("no_rope_layers")
    if listed is None:
        interval = content.size("no_rope_layer_interval", 4)
        return tuple(range(interval - 1, num_layers, interval))
    if not isinstance(listed, list) or any(has_rope not in (0, 1) for has_rope in listed):
        raise CorruptModelError(f"{content.path}: 'no_rope_layers' must be a list of 0 and 1")
    if len(listed) < num_layers:
        raise CorruptModelError(
            f"{content.path}: 'no_rope_layers' has {len(listed)} entries for {num_layers} layers"
        )
    return tuple(i for i, has_rope in enumerate(listed[:num_layers]) if not has_rope)


def _turns_dense(content: CheckedJson, architecture: Architecture) -> bool:
    """Cohere's layers without experts turn, windows or not, if all of them see all keys."""
    key = "prefix_dense_sliding_window_pattern"
    return key in architecture.reads and content.size(key) == 1


def _lacks_rope(content: CheckedJson) -> bool:
    """Whether config.json says null of RoPE, or of its theta."""
    said, theta = content.values.get("rope_parameters", {}), content.values.get("rope_theta", 0)
    return (said.get("rope_theta", theta) if isinstance(said, dict) else theta or None) is None


def _recurrent(
    content: CheckedJson, architecture: Architecture, mixers: list[str], num_layers: int
) -> AnyRecurrent | None:
    """The recurrent layers; None if all have attention."""
    if architecture.hybrid == "convs":
        return read_short_convs(content, architecture, num_layers)
    if architecture.hybrid == "kimi":
        return read_kimi(content, num_layers)
    if architecture.hybrid == "ling":
        return read_ling(content, num_layers)
    if mixers:
        return read_mamba(content, mixers, architecture)
    if architecture.hybrid != "delta":
        return None
    keys, values = read_heads(content, "linear_num_key_heads", "linear_num_value_heads")
    rule = RecurrentConfig(
        layers=recurrent_layers(content, num_layers, bool(architecture.windows)),
        num_key_heads=keys,
        num_value_heads=values,
        key_dim=content.size("linear_key_head_dim", limit=MAX_STATE_DIM),
        value_dim=content.size("linear_value_head_dim", limit=MAX_STATE_DIM),
        conv_size=read_conv_size(content, "linear_conv_kernel_dim"),
        out_tiles=values // keys if content.flag(OUT_IS_TILED) else 1,
        doubles_steps=DOUBLES in architecture.reads and content.flag(DOUBLES),
    )
    return rule if rule.layers else None


def _ropes(
    content: CheckedJson,
    architecture: Architecture,
    head_dims: tuple[int, int],
    latent: LatentConfig | None,
    max_model_len: int | None,
) -> tuple[RopeConfig, RopeConfig | None, int]:
    """ModelConfig's rope, local_rope and max_position."""
    if architecture.ropes_by_kind:
        may_be_partial = "partial_rotary_factor" in architecture.reads
        return read_ropes_by_kind(content, head_dims, may_be_partial, max_model_len)
    if latent is not None:
        if architecture.scales_queries:
            leave_out_share(content, latent)
        rope, max_position = read_rope(
            content, latent.rope_dim, False, max_model_len, architecture.scales_queries
        )
        if rope.kind == "proportional":
            raise UnsupportedModelError(
                f"{content.path}: RoPE 'proportional' is not supported for this architecture"
            )
        return replace(rope, num_dims=latent.rope_dim), None, max_position
    if "rotary_dim" in architecture.reads and content.get("rotary_dim") is not None:
        part = content.size("rotary_dim") / head_dims[0]
        content.values.setdefault("partial_rotary_factor", part)
    may_be_partial = "partial_rotary_factor" in architecture.reads
    rope, max_position = read_rope(
        content, head_dims[0], may_be_partial, max_model_len, architecture.scales_queries
    )
    return rope, None, max_position


def _codes(content: CheckedJson, architecture: Architecture) -> str:
    """ModelConfig's codes. Raises UnsupportedModelError for weights that nobody here reads."""
    quantised = content.get("quantization_config")
    if quantised is None:
        return ""
    if rotates_activations(quantised):
        raise UnsupportedModelError(
            f"{content.path}: 'transform_config' of 'quantization_config' rotates activations, "
            "which is not supported; run it with vLLM"
        )
    packed, block = packed_format(quantised), fp8_block(quantised)
    if packed is not None:
        return f"INT{packed.bits}" if packed.stays_codes else "F32"
    if block is not None:
        return "F32" if block[1] % GROUP else "FP8"
    if has_nvfp4(quantised) or has_nf4(quantised):
        return "NVFP4" if has_nvfp4(quantised) else "NF4"
    if quant_method(quantised) in architecture.quantizations:
        return "MXFP4"
    raise UnsupportedModelError(f"{content.path}: {about_quantization(quantised)}")


def _refuse_settings(content: CheckedJson, architecture: Architecture, class_name: str) -> None:
    """Raise UnsupportedModelError for settings that change the arithmetic in ways not done here."""
    refused = {
        "sliding_window": not architecture.windows and _has_window(content, architecture),
        "auto_map": _brings_another_class(content, class_name),
        "is_causal": content.get("is_causal") is False,
    }
    for key, values in architecture.requires.items():
        refused[key] = content.get(key) not in values
    for key in architecture.needs:
        refused[key] = content.get(key) is None
    for key, is_refused in refused.items():
        if is_refused:
            raise UnsupportedModelError(
                f"{content.path}: {key!r} is {shown(content.get(key))}, which is not supported"
                + (" (code in a checkpoint is never run)" if key == "auto_map" else "")
                + _supported(architecture.requires.get(key, ()))
            )


def _supported(values: Sequence[object]) -> str:
    """For an error about a key. None: it may be missing, too."""
    said = [shown(value) for value in values if value is not None]
    return f"; supported: {', '.join(said)}" if said else ""


def _has_window(content: CheckedJson, architecture: Architecture) -> bool:
    layer_types = content.get("layer_types")
    known = (FULL, RECURRENT) if architecture.projections else (FULL,)
    has_others = architecture.hybrid in ("mixers", "beside", "convs")
    is_listed = isinstance(layer_types, list) and not has_others
    if is_listed and any(kind not in known for kind in layer_types):
        return True
    return (
        content.get("sliding_window") is not None and content.get("use_sliding_window") is not False
    )


def _brings_another_class(content: CheckedJson, class_name: str) -> bool:
    """Whether the checkpoint has code for a model of another class. For one of a class that they
    have, transformers and vLLM, too, leave the checkpoint's code aside.
    """
    auto_map = content.get("auto_map")
    names = auto_map.items() if isinstance(auto_map, dict) else ()
    classes = {str(key): str(value).rpartition(".")[2] for key, value in names}
    brought = {
        key: SPELLINGS.get(name, name)
        for key, name in classes.items()
        if key.startswith("AutoModel")
    }
    if "AutoModelForCausalLM" in brought:
        return brought["AutoModelForCausalLM"] != class_name
    stem, _, _ = class_name.rpartition("For")
    return not {class_name, f"{stem}Model"}.issuperset(brought.values())


def _eos_token_ids(folder: Path, content: CheckedJson, vocab_size: int) -> tuple[int, ...]:
    """generation_config.json's ids, else config.json's, and the tokenizer's end token."""
    path = folder / "generation_config.json"
    listed = read_json_if_any(path).get("eos_token_id")
    if listed is None:
        path, listed = content.path, content.get("eos_token_id")
    ids = listed if isinstance(listed, list) else [listed]
    if not all(token_id is None or type(token_id) is int for token_id in ids):
        raise CorruptModelError(
            f"{path}: 'eos_token_id' must be an integer or a list, not {shown(listed)}"
        )
    ids = [*ids, read_eos_id(folder)]
    # -1 and similar values mean that there is none.
    return tuple(dict.fromkeys(i for i in ids if i is not None and 0 <= i < vocab_size))
