"""One Decoder, and a table of what sets the architectures apart. Knows tensor names, not files.

A new architecture is a row in ARCHITECTURES; a new class only when the block graph itself changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanoengine.config import ModelConfig, RopeConfig
from nanoengine.context import ForwardContext, StepInputs
from nanoengine.errors import UnsupportedModelError, shown
from nanoengine.models.layers import (
    Attention,
    Bridge,
    GateUp,
    Head,
    LayerOps,
    Norm,
    Normalize,
    NormedProduct,
    OffsetNorm,
    Product,
    gelu_mul,
    plain_bridge,
)
from nanoengine.models.rope import Rotary, head_order

TensorSource = Callable[[str], Tensor]
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Architecture:
    """What differs between decoders.

    qk_norm: RMSNorm over each head of q and k before the rotation.
    qkv_bias: q, k and v have a bias though config.json names none.
    is_fused: q, k, v are one tensor of the checkpoint, gate and up another.
    may_skip_rope: reads no_rope_layers. may_turn_a_part: reads partial_rotary_factor.
    is_gemma: norms of weight + 1 before and after attention and feed-forward, gated by GELU (tanh),
    embeddings times the root of hidden_size, and Gemma's keys in config.json.
    windows: which layers may have a sliding window, by what config.json says: "every layer",
    "layer_types" or "pattern"; "": none, it is refused.
    defaults: what transformers takes for keys that config.json lacks, where Llama's differ.
    own_code: the class that checkpoints bring though transformers has the same.
    """

    qk_norm: bool = False
    qkv_bias: bool = False
    is_fused: bool = False
    may_skip_rope: bool = False
    may_turn_a_part: bool = False
    is_gemma: bool = False
    windows: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    own_code: str = ""


ARCHITECTURES = {
    "Gemma3ForCausalLM": Architecture(
        qk_norm=True,
        is_gemma=True,
        windows="pattern",
        defaults={
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
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(windows="every layer", defaults={"sliding_window": 4096}),
    "Phi3ForCausalLM": Architecture(
        is_fused=True,
        may_turn_a_part=True,
        windows="every layer",
        defaults={
            "rms_norm_eps": 1e-5,
            "original_max_position_embeddings": 4096,
            "sliding_window": None,
        },
        own_code="modeling_phi3.Phi3ForCausalLM",
    ),
    "Qwen2ForCausalLM": Architecture(
        qkv_bias=True, windows="layer_types", defaults={"use_sliding_window": False}
    ),
    "Qwen3ForCausalLM": Architecture(
        qk_norm=True, windows="layer_types", defaults={"head_dim": 128}
    ),
    "SmolLM3ForCausalLM": Architecture(
        may_skip_rope=True, defaults={"tie_word_embeddings": True, "rope_theta": 2e6}
    ),
}


def layer_windows(
    architecture: str, settings: Mapping[str, Any], num_layers: int, where: object
) -> tuple[int | None, ...]:
    """The sliding window of each layer, () without any, as transformers' classes read config.json.

    settings: of config.json, at `where`. Raises UnsupportedModelError for what they would not run.
    """
    rule = ARCHITECTURES[architecture].windows
    if rule == "pattern":
        return _windows_by_pattern(settings, num_layers, where)
    if not rule or (rule == "layer_types" and not settings.get("use_sliding_window")):
        window, first = None, num_layers
    else:
        window, first = settings.get("sliding_window", 4096), 0
    if rule == "layer_types" and window is not None:
        first = settings.get("max_window_layers", 28)
    if window is not None and (type(window) is not int or window < 1 or type(first) is not int):
        raise UnsupportedModelError(f"{where}: a 'sliding_window' of {window!r} is not supported")
    kinds: Any = [SLIDING if window and i >= first else FULL for i in range(num_layers)]
    listed = settings.get("layer_types")
    if listed is not None and listed != kinds:
        if rule != "layer_types" or not window or not _are_layer_types(listed, num_layers):
            raise UnsupportedModelError(
                f"{where}: 'layer_types' {shown(listed)} with a 'sliding_window' of {window} is "
                "not supported"
            )
        kinds = listed
    windows = tuple(window if kind == SLIDING else None for kind in kinds)
    return windows if any(windows) else ()


def _windows_by_pattern(
    settings: Mapping[str, Any], num_layers: int, where: object
) -> tuple[int | None, ...]:
    """As `layer_types` says, else in all layers but each `sliding_window_pattern`-th."""
    window: Any = settings.get("sliding_window")
    listed: Any = settings.get("layer_types")
    interval = settings.get("sliding_window_pattern")
    if listed is None and type(interval) is int and interval > 0:
        listed = [SLIDING if (i + 1) % interval else FULL for i in range(num_layers)]
    has_window = type(window) is int and window > 0
    if not _are_layer_types(listed, num_layers) or (SLIDING in listed and not has_window):
        raise UnsupportedModelError(
            f"{where}: 'layer_types' {listed!r} for {num_layers} layers with a 'sliding_window' of "
            f"{window!r} and a 'sliding_window_pattern' of {interval!r} is not supported"
        )
    return tuple(window if k == SLIDING else None for k in listed) if SLIDING in listed else ()


def _are_layer_types(listed: object, num_layers: int) -> bool:
    if not isinstance(listed, list) or len(listed) != num_layers:
        return False
    return all(kind in (FULL, SLIDING) for kind in listed)


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the architecture needs, under Hugging Face's names."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        shapes.update(_layer_shapes(config, f"model.layers.{layer}."))
    return shapes


def _layer_shapes(config: ModelConfig, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    architecture = ARCHITECTURES[config.architecture]
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield f"{prefix}input_layernorm.weight", (hidden,)
    yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    if architecture.is_gemma:
        yield f"{prefix}pre_feedforward_layernorm.weight", (hidden,)
        yield f"{prefix}post_feedforward_layernorm.weight", (hidden,)
    if architecture.qk_norm:
        yield f"{prefix}self_attn.q_norm.weight", (config.head_dim,)
        yield f"{prefix}self_attn.k_norm.weight", (config.head_dim,)
    if architecture.is_fused:
        qkv, gate_up = {"qkv": heads + 2 * kv_heads}, {"gate_up": 2 * inner}
    else:
        qkv = {"q": heads, "k": kv_heads, "v": kv_heads}
        gate_up = {"gate": inner, "up": inner}
    for part, rows, columns, has_bias in (
        ("self_attn", qkv, hidden, _has_qkv_bias(config)),
        ("self_attn", {"o": hidden}, heads, config.attention_bias),
        ("mlp", gate_up, hidden, config.mlp_bias),
        ("mlp", {"down": hidden}, inner, config.mlp_bias),
    ):
        for name, num_rows in rows.items():
            yield f"{prefix}{part}.{name}_proj.weight", (num_rows, columns)
            if has_bias:
                yield f"{prefix}{part}.{name}_proj.bias", (num_rows,)


def _ropes(config: ModelConfig) -> tuple[tuple[RopeConfig | None, ...], tuple[int, ...]]:
    """The kinds of rotation, and for each layer which of them it has."""
    layers = range(config.num_layers)
    if config.local_rope is not None:
        has_window = tuple(int(config.attention.window(i) is not None) for i in layers)
        return (config.rope, config.local_rope), has_window
    if config.no_rope_layers:
        return (config.rope, None), tuple(int(i in config.no_rope_layers) for i in layers)
    return (config.rope,), (0,) * config.num_layers


def _has_qkv_bias(config: ModelConfig) -> bool:
    return config.attention_bias or ARCHITECTURES[config.architecture].qkv_bias


class Decoder:
    """A decoder-only transformer over tokens laid end to end."""

    def __init__(
        self, config: ModelConfig, source: TensorSource, device: torch.device, ops: LayerOps
    ) -> None:
        """`source` gives each tensor of `weight_shapes(config)` once, on `device` and in the
        final dtype.
        """
        builder = _Builder(config, source, ops)
        self._embed, self._head = builder.ends()
        parts = [builder.layer(index) for index in range(config.num_layers)]
        qkvs = [part.qkv for part in parts]
        self._qkv = qkvs[0]
        ropes, rope_of = _ropes(config)
        self._layers = [
            (part.attention, builder.bridge(part, following), rope)
            for part, following, rope in zip(parts, [*qkvs[1:], None], rope_of, strict=True)
        ]
        self._rotary = Rotary(ropes, config.head_dim, device)
        self._logit_softcap = config.final_logit_softcap
        self._ops = ops

    def forward(self, ctx: ForwardContext) -> Tensor:
        """Residual stream after the last layer, [tokens, hidden]; the next call overwrites it."""
        x = self._embed(ctx.token_ids)
        cos, sin = self._rotary.angles(ctx.positions)
        is_decode = len(x) == len(ctx.lengths)  # only such steps are like one another
        inputs = ctx.kv.inputs() if is_decode and ctx.attention.follows_tensors else None
        if inputs is None:
            return self._run_layers(self._ops.begin(x), cos, sin, ctx)
        tensors = x, cos, sin, ctx.query_start, ctx.kv_lens, *inputs.tensors
        return self._ops.repeat(
            StepInputs(tensors, inputs.layout), lambda: self._run_layers(x, cos, sin, ctx)
        )

    def _run_layers(self, x: Tensor, cos: Tensor, sin: Tensor, ctx: ForwardContext) -> Tensor:
        qkv = self._qkv(x)
        angles = list(zip(cos.unbind(), sin.unbind(), strict=True))
        for attention, bridge, rope in self._layers:
            qkv = bridge(x, attention(qkv, *angles[rope], ctx))
        return x

    def logits(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab], in the dtype of the weights or in fp32."""
        logits, softcap = self._head(x), self._logit_softcap
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


@dataclass(frozen=True, slots=True)
class _LayerParts:
    """A layer: qkv, attention, out; gate and up, down. Norms are in the products."""

    qkv: Product
    attention: Attention
    out: Product
    gate_up: GateUp
    down: Product


class _Builder:
    """Takes tensors from the source by name and fuses q, k, v and gate, up.

    Heads of q and k are put into the order that the rotation wants.
    """

    def __init__(self, config: ModelConfig, source: TensorSource, ops: LayerOps) -> None:
        self._config = config
        self._architecture = ARCHITECTURES[config.architecture]
        self._is_gemma = self._architecture.is_gemma
        self._head_order = head_order(config.rope, config.head_dim)
        self._ops = ops
        self._source = source

    def ends(self) -> tuple[Callable[[Tensor], Tensor], Head]:
        """Token ids -> embeddings, and residual stream -> logits."""
        embedding = self._source("model.embed_tokens.weight")
        rows: Callable[[Tensor], Tensor] = functools.partial(torch.embedding, embedding)
        norm = None if self._is_gemma else self._norm("model.norm")
        if self._config.tie_word_embeddings:
            rows, head = self._ops.tied(embedding, norm)
        else:
            head = self._ops.head(self._source("lm_head.weight"), norm)
        if not self._is_gemma:
            return rows, head
        head = NormedProduct(head, before=self._norm_apart("model.norm"))
        # The root rounded to the weights' dtype, as in transformers.
        root = torch.tensor(self._config.hidden_size**0.5).to(embedding.dtype).item()
        return lambda token_ids: rows(token_ids).mul_(root), head

    def layer(self, index: int) -> _LayerParts:
        """Norms are fused to the products that they come before; Gemma's stand apart."""
        config, prefix = self._config, f"model.layers.{index}."
        out: Product = self._linear(prefix + "self_attn.", "o", config.attention_bias)
        down: Product = self._linear(prefix + "mlp.", "down", config.mlp_bias)
        before_mlp = prefix + "post_attention_layernorm"
        if self._is_gemma:
            out = NormedProduct(out, after=self._norm_apart(before_mlp))
            after_mlp = self._norm_apart(prefix + "post_feedforward_layernorm")
            down = NormedProduct(down, after=after_mlp)
            before_mlp = prefix + "pre_feedforward_layernorm"
        return _LayerParts(
            self._qkv(prefix + "self_attn.", prefix + "input_layernorm"),
            self._attention(index, prefix + "self_attn."),
            out,
            self._gate_up(prefix + "mlp.", before_mlp),
            down,
        )

    def bridge(self, part: _LayerParts, following: Product | None) -> Bridge:
        """From one attention to the next."""
        make = plain_bridge if self._is_gemma else self._ops.bridge
        return make(part.out, part.gate_up, part.down, following)

    def _qkv(self, prefix: str, norm_name: str) -> Product:
        names = ("qkv",) if self._architecture.is_fused else ("q", "k", "v")
        weights, biases = self._weights(prefix, names, _has_qkv_bias(self._config))
        weight = self._in_order(torch.cat(weights))
        bias = self._in_order(torch.cat(biases)) if biases else None
        return self._normed(weight, bias, norm_name)

    def _normed(self, weight: Tensor, bias: Tensor | None, norm_name: str) -> Product:
        if not self._is_gemma:
            return self._ops.linear(weight, bias, self._norm(norm_name))
        return NormedProduct(self._ops.linear(weight, bias), before=self._norm_apart(norm_name))

    def _in_order(self, qkv: Tensor) -> Tensor:
        """[(heads + 2 kv_heads) x head_dim, ...] with the heads of q and k in `head_order`."""
        if self._head_order is None:
            return qkv
        config = self._config
        heads = qkv.view(-1, config.head_dim, *qkv.shape[1:])
        q_and_k, v = heads.tensor_split((config.num_heads + config.num_kv_heads,))
        return torch.cat((q_and_k[:, self._head_order.to(qkv.device)], v)).flatten(0, 1)

    def _attention(self, index: int, prefix: str) -> Attention:
        head_norms = None
        if self._architecture.qk_norm:
            assert self._head_order is None
            head_norms = self._norm_apart(prefix + "q_norm"), self._norm_apart(prefix + "k_norm")
        heads = self._config.num_heads, self._config.num_kv_heads
        return Attention(self._ops, index, *heads, head_norms)

    def _gate_up(self, prefix: str, norm_name: str) -> GateUp:
        names = ("gate_up",) if self._architecture.is_fused else ("gate", "up")
        weights, biases = self._weights(prefix, names, self._config.mlp_bias)
        if self._architecture.is_fused:
            weights, biases = (
                [half for tensor in stored for half in tensor.chunk(2)]
                for stored in (weights, biases)
            )
        gate, up = weights
        if self._is_gemma:
            bias = torch.cat(biases) if biases else None
            both = self._normed(torch.cat((gate, up)), bias, norm_name)
            return lambda x: gelu_mul(both(x))
        norm = self._norm(norm_name)
        return self._ops.gate_up(gate, up, (biases[0], biases[1]) if biases else None, norm)

    def _linear(self, prefix: str, name: str, has_bias: bool) -> Product:
        weights, biases = self._weights(prefix, (name,), has_bias)
        return self._ops.linear(weights[0], biases[0] if biases else None)

    def _weights(
        self, prefix: str, names: tuple[str, ...], has_bias: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        weights = [self._source(f"{prefix}{name}_proj.weight") for name in names]
        return weights, [self._source(f"{prefix}{name}_proj.bias") for name in names if has_bias]

    def _norm(self, name: str) -> Norm:
        return self._source(f"{name}.weight"), self._config.rms_norm_eps

    def _norm_apart(self, name: str) -> Normalize:
        norm = self._norm(name)
        if self._is_gemma:
            return OffsetNorm(self._ops, norm)
        return lambda x: self._ops.rms_norm(x, *norm)
