"""The tensors that a model has, and their shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple

from nanoengine.config.model import ExpertsConfig, LatentConfig, ModelConfig, RecurrentConfig
from nanoengine.models.activations import XIELU_SHAPES
from nanoengine.models.architecture import (
    CHOICE_BIAS,
    LATENT_NAMES,
    MTP_JOIN,
    MTP_NORMS,
    ROUTER,
    SINKS,
    Architecture,
    ExpertNames,
    NormNames,
)
from nanoengine.models.architectures import ARCHITECTURES

Shapes = Iterator[tuple[str, tuple[int, ...]]]  # by name


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that the model needs, by Hugging Face's names."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        **dict(_norm_shapes(config, "model.norm")),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    shapes.update(_input_shapes(config))
    recurrent, attending = map(frozenset, (config.recurrent_layers, config.attention_layers))
    for layer in range(config.num_layers):
        if layer in recurrent:
            shapes.update(_recurrent_shapes(config, f"model.layers.{layer}.linear_attn."))
        if layer in attending:
            shapes.update(_attention_shapes(config, layer))
        shapes.update(_other_shapes(config, layer))
    if config.has_mtp:
        shapes.update(_mtp_shapes(config))
    return shapes


def _input_shapes(config: ModelConfig) -> Shapes:
    """Of what makes the vectors that each layer gets beside the residual stream."""
    size, hidden = config.layer_input_size, config.hidden_size
    if not size:
        return
    all_layers = config.num_layers * size
    yield "model.embed_tokens_per_layer.weight", (config.vocab_size, all_layers)
    yield "model.per_layer_model_projection.weight", (all_layers, hidden)
    yield "model.per_layer_projection_norm.weight", (size,)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}per_layer_input_gate.weight", (size, hidden)
        yield f"{prefix}per_layer_projection.weight", (hidden, size)
        yield f"{prefix}post_per_layer_input_norm.weight", (hidden,)


def _mtp_shapes(config: ModelConfig) -> Shapes:
    """Of the head for multi-token prediction, by DeepSeek's names."""
    layer, hidden = config.num_layers, config.hidden_size
    yield from _attention_shapes(config, layer)
    yield from _other_shapes(config, layer)
    for norm in MTP_NORMS:
        yield f"model.layers.{layer}.{norm}.weight", (hidden,)
    yield f"model.layers.{layer}.{MTP_JOIN}.weight", (hidden, 2 * hidden)


def _norm_shapes(config: ModelConfig, name: str) -> Shapes:
    architecture = ARCHITECTURES[config.architecture]
    is_there = {"weight": architecture.has_norm_weights, "bias": architecture.norm_bias}
    for part in filter(is_there.get, is_there):
        yield f"{name}.{part}", (config.hidden_size,)


def _other_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Of the norms and the feed-forward, or experts, of a layer."""
    architecture, prefix = ARCHITECTURES[config.architecture], f"model.layers.{layer}."
    norms, is_bare = norms_of(config, layer), layer in config.bare_layers
    for norm in (norms.before_attention, norms.after_attention) if is_bare else astuple(norms):
        if norm:
            yield from _norm_shapes(config, f"{prefix}{norm}")
    if architecture.layer_scalar:
        yield f"{prefix}layer_scalar", (1,)
    if is_bare:
        return
    experts, names = experts_of(config, layer), architecture.experts or ExpertNames()
    if experts is None or names.beside:
        if architecture.activation == "xielu":
            yield from ((f"{prefix}mlp.{name}", shape) for name, shape in XIELU_SHAPES.items())
        inner_size = config.shape(layer).intermediate_size
        yield from _mlp_shapes(config, f"{prefix}mlp.", inner_size, config.mlp_bias)
    if experts is None:
        return
    if names.beside:
        for norm in names.beside:
            yield f"{prefix}{norm}.weight", (config.hidden_size,)
        yield f"{prefix}router.scale", (config.hidden_size,)
        yield f"{prefix}router.per_expert_scale", (experts.count,)
    yield f"{prefix}mlp.gate.weight", (experts.count, config.hidden_size)
    if experts.has_bias:
        yield f"{prefix}mlp.gate.bias", (experts.count,)
    if experts.has_choice_bias:
        yield f"{prefix}mlp.gate.{CHOICE_BIAS}", (experts.count,)
    if experts.shared_size:
        name = f"{prefix}mlp.{names.shared}."
        yield from _mlp_shapes(config, name, experts.shared_size, has_bias=False)
    if names.has_shared_gate:
        yield f"{prefix}mlp.{names.shared}_gate.weight", (1, config.hidden_size)
    if experts.latent_size:
        yield f"{prefix}mlp.{LATENT_NAMES[0]}.weight", (experts.latent_size, config.hidden_size)
        yield f"{prefix}mlp.{LATENT_NAMES[1]}.weight", (config.hidden_size, experts.latent_size)
    width = config.expert_width
    for expert in range(experts.count):
        name = f"{prefix}mlp.experts.{expert}."
        yield from _mlp_shapes(config, name, experts.inner_size, experts.has_bias, width)


def _attention_shapes(config: ModelConfig, layer: int) -> Shapes:
    architecture, part = ARCHITECTURES[config.architecture], f"model.layers.{layer}.self_attn."
    if config.latent is not None:
        yield from _latent_shapes(config, config.latent, part)
        return
    shape = config.shape(layer)
    dim, has_kv = shape.head_dim, shape.source == layer
    heads, kv_heads = shape.num_heads * dim, shape.num_kv_heads * dim
    if architecture.qk_norm and architecture.norms_of_heads and config.has_qk_norm:
        is_whole, (of_q, of_k) = architecture.qk_norm == "all heads", architecture.norms_of_heads
        yield f"{part}{of_q}.weight", (heads if is_whole else dim,)
        if has_kv:
            yield f"{part}{of_k}.weight", (kv_heads if is_whole else dim,)
    qkv = {"q": heads * (1 + architecture.output_gate)}
    if has_kv:
        qkv |= dict.fromkeys("k" if shape.values_are_keys else "kv", kv_heads)
    if "qkv" in architecture.fused:
        qkv = {"qkv": heads + 2 * kv_heads}
    if architecture.gate_proj:
        qkv["g"] = heads
    if architecture.sinks:
        yield f"{part}{SINKS}", (shape.num_heads,)
    if architecture.head_gate:
        yield f"{part}g_proj.weight", (shape.num_heads, config.hidden_size)
    yield from _product_shapes(part, qkv, config.hidden_size, has_qkv_bias(config))
    yield from _product_shapes(part, {"o": config.hidden_size}, heads, has_out_bias(config))


def _latent_shapes(config: ModelConfig, latent: LatentConfig, part: str) -> Shapes:
    queries, hidden = config.num_heads * latent.query_dim, config.hidden_size
    values = config.num_heads * latent.value_dim
    if latent.q_rank:
        yield f"{part}q_a_proj.weight", (latent.q_rank, hidden)
        yield f"{part}q_a_layernorm.weight", (latent.q_rank,)
        yield f"{part}q_b_proj.weight", (queries, latent.q_rank)
    else:
        yield f"{part}q_proj.weight", (queries, hidden)
    yield f"{part}kv_a_proj_with_mqa.weight", (latent.row_dim, hidden)
    yield f"{part}kv_a_layernorm.weight", (latent.kv_rank,)
    yield f"{part}kv_b_proj.weight", (config.num_heads * latent.kv_dim, latent.kv_rank)
    if ARCHITECTURES[config.architecture].head_gate:
        yield f"{part}g_proj.weight", (config.num_heads, hidden)
    yield f"{part}o_proj.weight", (hidden, values)


def _recurrent_shapes(config: ModelConfig, part: str) -> Shapes:
    recurrent, hidden = config.recurrent, config.hidden_size
    assert recurrent is not None
    yield f"{part}out_proj.weight", (hidden, recurrent.value_size)
    if isinstance(recurrent, RecurrentConfig):
        yield from _rule_shapes(config, recurrent, part)
        return
    yield f"{part}conv1d.weight", (recurrent.channels, 1, recurrent.conv_size)
    yield f"{part}in_proj.weight", (sum(recurrent.sizes), hidden)
    if recurrent.has_bias:
        yield f"{part}in_proj.bias", (sum(recurrent.sizes),)
        yield f"{part}conv1d.bias", (recurrent.channels,)
        yield f"{part}out_proj.bias", (hidden,)


def _rule_shapes(config: ModelConfig, recurrent: RecurrentConfig, part: str) -> Shapes:
    """Of a rule with heads: what is before its projection of results."""
    heads, keys, values = recurrent.num_value_heads, recurrent.key_size, recurrent.value_size
    channels = {"": recurrent.channels, "q_": keys, "k_": keys, "v_": values}
    if recurrent.has_short_vectors:
        yield f"{part}f_b_proj.weight", (recurrent.num_decays, recurrent.key_dim)
        yield f"{part}g_b_proj.weight", (values, recurrent.value_dim)
    for of in conv_parts(ARCHITECTURES[config.architecture]):
        yield f"{part}{of}conv1d.weight", (channels[of], 1, recurrent.conv_size)
    if recurrent.rule == "mamba":
        yield f"{part}in_proj.weight", (sum(recurrent.sizes), config.hidden_size)
        yield f"{part}conv1d.bias", (recurrent.channels,)
        yield f"{part}D", (heads,)
        if recurrent.has_bias:
            yield f"{part}in_proj.bias", (sum(recurrent.sizes),)
        if recurrent.has_out_bias:
            yield f"{part}out_proj.bias", (config.hidden_size,)
    rows = {"qkv": recurrent.channels, "z": values, "b": heads, "a": recurrent.num_decays}
    rows |= {"qkvz": recurrent.channels + values, "ba": 2 * heads}
    rows |= {"q": keys, "k": keys, "v": values}
    rows |= {"f_a": recurrent.key_dim, "g_a": recurrent.value_dim}
    for name in ARCHITECTURES[config.architecture].projections:
        yield f"{part}in_proj_{name}.weight", (rows[name], config.hidden_size)
    yield f"{part}A_log", (heads,)
    yield f"{part}dt_bias", (recurrent.num_decays,)
    if recurrent.norm != "none":
        is_whole = recurrent.rule == "mamba"
        yield f"{part}norm.weight", (values if is_whole else recurrent.value_dim,)


def _mlp_shapes(
    config: ModelConfig, prefix: str, inner: int, has_bias: bool, width: int = 0
) -> Shapes:
    """width: of what it takes and gives; 0: that of the residual stream."""
    width = width or config.hidden_size
    gate_up = {"gate": inner, "up": inner}
    if not ARCHITECTURES[config.architecture].is_gated:
        gate_up = {"up": inner}
    if "gate_up" in ARCHITECTURES[config.architecture].fused:
        gate_up = {"gate_up": 2 * inner}
    yield from _product_shapes(prefix, gate_up, width, has_bias)
    yield from _product_shapes(prefix, {"down": width}, inner, has_bias)


def _product_shapes(prefix: str, rows: Mapping[str, int], columns: int, has_bias: bool) -> Shapes:
    for name, num_rows in rows.items():
        yield f"{prefix}{name}_proj.weight", (num_rows, columns)
        if has_bias:
            yield f"{prefix}{name}_proj.bias", (num_rows,)


def experts_of(config: ModelConfig, layer: int) -> ExpertsConfig | None:
    """The experts of this layer; None if it has a feed-forward."""
    experts = config.experts
    return None if experts is None or layer in experts.dense_layers else experts


def norms_of(config: ModelConfig, layer: int) -> NormNames:
    """The names of this layer's norms."""
    architecture = ARCHITECTURES[config.architecture]
    if architecture.recurrent_norms is None or layer not in config.recurrent_layers:
        return architecture.norms
    return architecture.recurrent_norms


def conv_parts(architecture: Architecture) -> tuple[str, ...]:
    """What the names of a recurrent layer's convolutions begin with."""
    return ("q_", "k_", "v_") if "q" in architecture.projections else ("",)


def has_qkv_bias(config: ModelConfig) -> bool:
    """Whether q, k and v have a bias."""
    return config.attention_bias or ARCHITECTURES[config.architecture].qkv_bias


def has_out_bias(config: ModelConfig) -> bool:
    """Whether the output of attention has a bias."""
    return config.attention_bias and ARCHITECTURES[config.architecture].out_bias


def in_float(config: ModelConfig) -> tuple[str, ...]:
    """Ends of the names of weights that are in float32, whatever the dtype of the others."""
    is_exact = config.experts is not None and config.experts.exact_router
    return (CHOICE_BIAS, SINKS, ROUTER) if is_exact else (CHOICE_BIAS, SINKS)
