"""LayerBuilder: the parts of a decoder, made of the tensors of a checkpoint as the rows in
architectures.py say. Knows tensor names, not files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanoengine.config.model import ExpertsConfig, ModelConfig, RopeConfig
from nanoengine.models.activations import XIELU_SHAPES, Xielu, gelu, relu2
from nanoengine.models.architecture import (
    CHOICE_BIAS,
    LATENT_NAMES,
    MTP_JOIN,
    MTP_NORMS,
    ExpertNames,
)
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.models.expert_layer import make_mixture
from nanoengine.models.experts import ExpertWeights, Map, MixtureWeights, Routing
from nanoengine.models.latent import LATENT_NORM_EPS, absorbed, head_rows, latent_rows
from nanoengine.models.layer_ops import LayerOps
from nanoengine.models.layers import (
    AnyAttention,
    Attention,
    InputGate,
    LatentAttention,
    LayerInputs,
    MixerBeside,
    RecurrentLayer,
    SharedKVAttention,
)
from nanoengine.models.mtp import MtpParts
from nanoengine.models.norms import Norms
from nanoengine.models.products import MLP, Embed, Norm, Product
from nanoengine.models.recurrent_builder import (
    Projection,
    TensorSource,
    bias_of,
    make_recurrent,
    put_beside,
)
from nanoengine.models.rope import head_order
from nanoengine.models.stored_codes import Weight, halves, in_order, joined, numbers_of
from nanoengine.models.weight_shapes import experts_of, has_out_bias, has_qkv_bias, norms_of


def rotations(config: ModelConfig) -> tuple[dict[int, list[RopeConfig | None]], list[int]]:
    """The kinds of rotation by head_dim, and for each layer the index of its kind among all."""
    layers = range(config.num_layers)
    each = [(config.shape(layer).head_dim, _rope(config, layer)) for layer in layers]
    kinds = sorted(dict.fromkeys(each), key=lambda kind: kind[0])
    by_dim: dict[int, list[RopeConfig | None]] = {}
    for head_dim, rope in kinds:
        by_dim.setdefault(head_dim, []).append(rope)
    return by_dim, [kinds.index(kind) for kind in each]


def _rope(config: ModelConfig, layer: int) -> RopeConfig | None:
    if config.local_rope is not None and config.window(layer) is not None:
        return config.local_rope
    return None if layer in config.no_rope_layers else config.rope


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What a layer computes, in this order. The products include the norms around them. end: of
    LayerEnd; None: there is none. mlp: None: there is none. is_parallel: as of Architecture.
    beside: a mixer whose projection is in qkv; None: there is none.
    """

    qkv: Product
    attention: AnyAttention
    out: Product
    mlp: Product | None
    end: tuple[InputGate | None, float] | None
    is_parallel: bool
    beside: MixerBeside | None = None


class LayerBuilder:
    """Takes tensors from the source by name and makes the parts of a model of them.

    Fuses q, k, v and gate, up. Puts the heads of q and k into the order that the rotation needs.
    The residual stream is held divided by config.factors.summands: what is added to it needs no
    factor then.
    """

    def __init__(
        self, config: ModelConfig, source: TensorSource, ops: LayerOps, device: torch.device
    ) -> None:
        self._config, self._device = config, device
        self._architecture = ARCHITECTURES[config.architecture]
        self._ops = ops
        self._source = source
        self._norms = Norms(config, source, device)

    def ends(self) -> tuple[Embed, Product, Norm]:
        """Token ids -> embeddings, and residual stream -> logits; and the last norm, which the
        latter is without where others see what it gives, or give the output head something else:
        of an assistant, and of a model with a head for multi-token prediction.
        """
        architecture = self._architecture
        last = self._norms.last()
        weight = self._source("model.embed_tokens.weight")
        norm = None if self._config.has_mtp or self._config.given_kv else last
        embed: Embed
        fused, normed = self._fused(norm)
        if self._config.tie_word_embeddings:
            embed, head = self._ops.tied(weight, fused)
        else:
            embed = self._ops.embedding(weight)
            head = self._ops.head(self._source("lm_head.weight"), fused)
        head = normed(head)
        factor = self._config.factors.embeddings / self._config.factors.summands
        if architecture.scales_embeddings and not self._config.given_kv:
            factor = _root(self._config.hidden_size, weight.dtype)
        if architecture.norms_embeddings:
            embed = self._normed_embedding(embed)
        return embed if factor == 1 else _scaled(embed, factor), head, last

    def _normed_embedding(self, embed: Embed) -> Embed:
        norm, ops = self._norms.unit(self._config.hidden_size), self._ops
        return lambda token_ids: ops.rms_norm(embed(token_ids), norm)

    def layer_inputs(self) -> LayerInputs | None:
        """What makes the vectors that each layer gets; None if they get none."""
        size, ops = self._config.layer_input_size, self._ops
        if not size:
            return None
        weight = self._source("model.embed_tokens_per_layer.weight")
        embed = _scaled(ops.embedding(weight), _root(size, weight.dtype))
        project = ops.linear(self._source("model.per_layer_model_projection.weight"))
        norm = self._norms.named("model.per_layer_projection_norm")
        return LayerInputs(ops, embed, project, norm)

    def mtp(self) -> MtpParts:
        """The parts of the head for multi-token prediction."""
        index, ops = self._config.num_layers, self._ops
        prefix = f"model.layers.{index}."
        embedded, given, last = (self._norms.named(prefix + name) for name in MTP_NORMS)
        join, layer = ops.whole(self._source(f"{prefix}{MTP_JOIN}.weight")), self.layer(index)
        assert layer.mlp is not None
        after_attention = ops.after_attention(layer.out, layer.mlp, None)
        return MtpParts((embedded, given), join, layer.qkv, layer.attention, after_attention, last)

    def layer(self, index: int) -> LayerParts:
        """The parts of one layer."""
        config, names = self._config, norms_of(self._config, index)
        layer = f"model.layers.{index}."
        before = self._norms.if_any(layer, names.before_attention)
        beside = None
        if index in config.attention_layers:
            make = self._attention if config.latent is None else self._latent_attention
            projection, attention, out = make(index, layer + "self_attn.")
            if index in config.recurrent_layers:
                mixer = self._recurrent(index, layer + "linear_attn.")
                projection, beside = put_beside(self._ops, projection, *mixer)
        else:
            projection, attention, out = self._recurrent(index, layer + "linear_attn.")
        fused, normed = self._fused(before)
        return LayerParts(
            qkv=normed(self._ops.linear(projection.weight, projection.bias, fused)),
            attention=attention,
            out=self._then_normed(out, self._norms.behind(layer, names.after_attention)),
            mlp=None if index in config.bare_layers else self._mlp(index, layer, before),
            end=self._end(layer),
            is_parallel=self._architecture.is_parallel,
            beside=beside,
        )

    def _end(self, layer: str) -> tuple[InputGate | None, float] | None:
        if not self._architecture.layer_scalar:
            return None
        gate, scalar = None, self._numbers(layer + "layer_scalar").item()
        if self._config.layer_input_size:
            project = self._ops.summand(self._source(layer + "per_layer_projection.weight"))
            gate = InputGate(
                self._ops,
                self._ops.linear(self._source(layer + "per_layer_input_gate.weight")),
                self._ops.gated(self._architecture.activation),
                self._then_normed(project, self._norms.named(layer + "post_per_layer_input_norm")),
            )
        return gate, scalar

    def _attention(self, index: int, prefix: str) -> tuple[Projection, AnyAttention, Product]:
        config, architecture, shape = self._config, self._architecture, self._config.shape(index)
        out = self._summand(prefix, "o", has_out_bias(config))
        among = config.attention_layers.index(index)
        if shape.source != index:
            norm = self._norms.of_head(prefix + "q_norm", self._head_order(index))
            read = config.given_kv[index] if config.given_kv else among
            shared = SharedKVAttention(self._ops, read, shape.num_heads, norm)
            return self._qkv(index, prefix, "q"), shared, out
        sinks = self._numbers_if(architecture.sinks, prefix + "sinks")
        attention = Attention(
            self._ops,
            among,
            shape.num_heads,
            shape.num_kv_heads,
            self._norms.of_heads(prefix, shape.head_dim, self._head_order(index)),
            architecture.norms_turned,
            architecture.output_gate or architecture.gate_proj,
            None if sinks is None else sinks.float(),
            shape.values_are_keys,
            config.multipliers.attended,
            architecture.head_gate,
        )
        parts = ("qk" if shape.values_are_keys else "qkv") + "g" * architecture.gate_proj
        return self._qkv(index, prefix, parts), attention, out

    def _latent_attention(
        self, index: int, prefix: str
    ) -> tuple[Projection, AnyAttention, Product]:
        config, ops, shape = self._config, self._ops, self._config.latent
        assert shape is not None
        num_heads, query, eps = config.num_heads, None, LATENT_NORM_EPS
        queries = f"{prefix}{'q_b' if shape.q_rank else 'q'}_proj.weight"
        q = in_order(self._source(queries), head_rows(shape, num_heads))
        if shape.q_rank:
            query_norm = Norm(self._numbers(prefix + "q_a_layernorm.weight"), eps)
            query, q = ops.linear(q, None, query_norm), self._source(prefix + "q_a_proj.weight")
        kv = self._source(prefix + "kv_a_proj_with_mqa.weight")
        from_latent = self._numbers(prefix + "kv_b_proj.weight")
        attention = LatentAttention(
            ops,
            config.attention_layers.index(index),
            num_heads,
            shape,
            query,
            Norm(self._numbers(prefix + "kv_a_layernorm.weight"), eps),
            *map(ops.per_head, absorbed(from_latent.view(num_heads, -1, shape.kv_rank), shape)),
            has_head_gate=bool(self._architecture.head_gate),
        )
        parts = [q, in_order(kv, latent_rows(shape))]
        if self._architecture.head_gate:
            parts.append(self._source(f"{prefix}g_proj.weight"))
        return Projection(joined(parts)), attention, self._summand(prefix, "o", has_bias=False)

    def _qkv(self, index: int, prefix: str, parts: str) -> Projection:
        names = ("qkv",) if "qkv" in self._architecture.fused else tuple(parts)
        weights, biases = self._weights(prefix, names, has_qkv_bias(self._config))
        weight = self._in_order(index, weights)
        if self._architecture.head_gate:
            weight = joined([weight, self._source(f"{prefix}g_proj.weight")])
        bias = numbers_of(self._in_order(index, [*biases])) if biases else None
        return Projection(weight, bias)

    def _head_order(self, index: int) -> Tensor | None:
        """As rope.head_order; layers without a rotation have that of the others."""
        rope, dim = _rope(self._config, index), self._config.shape(index).head_dim
        row = self._architecture
        return head_order(rope or self._config.rope, dim, row.pairs_take_turns, row.turns_back)

    def _in_order(self, index: int, parts: list[Weight]) -> Weight:
        """Weights or biases of q, k and v as [(heads + 2 kv_heads) x head_dim, ...], the heads of q
        and k in `head_order`; with a gate there are `heads` more, stored behind those of q.
        """
        shape, order = self._config.shape(index), self._head_order(index)
        if self._architecture.output_gate:
            rows = torch.arange(parts[0].shape[0]).view(shape.num_heads, 2, shape.head_dim)
            q, gate = (in_order(parts[0], part.flatten()) for part in rows.unbind(1))
            parts = [q, *parts[1:], gate]
        qkv = joined(parts)
        if order is None:
            return qkv
        heads = torch.arange(qkv.shape[0]).view(-1, shape.head_dim)
        q_and_k, others = heads.tensor_split((shape.num_heads + shape.num_kv_heads,))
        return in_order(qkv, torch.cat((q_and_k[:, order.cpu()], others)).flatten())

    def _recurrent(self, index: int, prefix: str) -> tuple[Projection, RecurrentLayer, Product]:
        return make_recurrent(
            self._ops, self._config, index, lambda name: self._source(prefix + name)
        )

    def _mlp(self, index: int, layer: str, before_attention: Norm | None) -> Product:
        names, prefix = norms_of(self._config, index), layer + "mlp."
        norm = self._norms.if_any(layer, names.before_mlp)
        norm_after = self._norms.behind(layer, names.after_mlp)
        if self._architecture.is_parallel:
            norm = before_attention
        gate = self._config.multipliers.gate
        if norm is not None and gate != 1:
            norm = replace(norm, weight=norm.weight.float() * gate)
        experts, expert_names = experts_of(self._config, index), self._architecture.experts
        if experts is None or expert_names is None:
            return self._dense(prefix, norm, norm_after)
        if expert_names.beside is None:
            return self._then_normed(self._experts(experts, prefix, norm), norm_after)
        named = (self._norms.named(layer + name) for name in expert_names.beside)
        after_dense, before, after = named
        dense = self._dense(prefix, norm, after_dense)
        sparse = self._then_normed(self._experts(experts, prefix, before, layer), after)
        both = self._ops.accumulate
        return self._then_normed(lambda x: both(dense(x), sparse(x)), norm_after)

    def _dense(self, prefix: str, norm: Norm | None, norm_after: Norm | None) -> Product:
        gate_up = (
            self._gate_up(prefix, norm) if self._architecture.is_gated else self._up(prefix, norm)
        )
        down = self._summand(prefix, "down", self._config.mlp_bias)
        return MLP(gate_up, self._then_normed(down, norm_after))

    def _experts(
        self, config: ExpertsConfig, prefix: str, norm: Norm | None, own_router: str = ""
    ) -> Product:
        """own_router: of a router with a norm and scales of its own, what its names begin with."""
        names = self._architecture.experts or ExpertNames()
        scale = self._numbers_if(bool(own_router), own_router + "router.per_expert_scale")
        shared, has_bias = prefix + names.shared, config.has_bias
        choice_bias = self._numbers_if(config.has_choice_bias, f"{prefix}gate.{CHOICE_BIAS}")
        weights = MixtureWeights(
            router=self._numbers(prefix + "gate.weight"),
            router_bias=self._numbers_if(has_bias, prefix + "gate.bias"),
            routing=Routing(config, choice_bias, None if scale is None else scale.float()),
            experts=(self._expert(f"{prefix}experts.{i}.", has_bias) for i in range(config.count)),
            shared=self._expert(shared + ".", has_bias=False) if config.shared_size else None,
            shared_gate=self._shared_gate(config, names, shared),
            before_router=self._before_router(own_router) if own_router else None,
            latent=self._latents(prefix) if config.latent_size else None,
        )
        fused, normed = self._fused(norm)
        return normed(make_mixture(self._ops, weights, fused, self._architecture.activation))

    def _shared_gate(self, config: ExpertsConfig, names: ExpertNames, shared: str) -> Tensor | None:
        if config.averages_shared:  # the sigmoid of 0 is a half
            return torch.zeros(1, self._config.hidden_size, device=self._device)
        return self._numbers_if(names.has_shared_gate, shared + "_gate.weight")

    def _latents(self, prefix: str) -> tuple[Weight, Weight]:
        first, second = (self._source(f"{prefix}{name}.weight") for name in LATENT_NAMES)
        return first, second

    def _before_router(self, layer: str) -> Product:
        norm = self._norms.of_router(layer)
        return lambda x: self._ops.rms_norm(x, norm)

    def _numbers_if(self, is_there: bool, name: str) -> Tensor | None:
        return self._numbers(name) if is_there else None

    def _expert(self, prefix: str, has_bias: bool) -> ExpertWeights:
        if not self._architecture.is_gated:
            (up, down), _ = self._weights(prefix, ("up", "down"), False)
            return ExpertWeights(None, up, down)
        (gate, up, down), biases = self._weights(prefix, ("gate", "up", "down"), has_bias)
        both = (torch.cat(biases[:2]), biases[2]) if biases else None
        return ExpertWeights(gate, up, down, both)

    def _gate_up(self, prefix: str, norm: Norm | None) -> Product:
        is_fused = "gate_up" in self._architecture.fused
        names = ("gate_up",) if is_fused else ("gate", "up")
        weights, biases = self._weights(prefix, names, self._config.mlp_bias)
        gate, up = halves(weights[0]) if is_fused else weights
        bias = torch.cat(biases) if biases else None
        fused, normed = self._fused(norm)
        return normed(self._ops.gate_up(gate, up, bias, fused, self._architecture.activation))

    def _up(self, prefix: str, norm: Norm | None) -> Product:
        """Of a feed-forward without a gate."""
        weights, biases = self._weights(prefix, ("up",), self._config.mlp_bias)
        fused, normed = self._fused(norm)
        up = normed(self._ops.linear(weights[0], biases[0] if biases else None, fused))
        activation: Map = relu2
        if self._architecture.activation == "gelu_pytorch_tanh":
            activation = gelu
        if self._architecture.activation == "xielu":
            activation = Xielu.of(*(self._numbers(prefix + name) for name in XIELU_SHAPES))
        return lambda x: self._ops.activated(up(x), activation)

    def _summand(self, prefix: str, name: str, has_bias: bool) -> Product:
        weights, biases = self._weights(prefix, (name,), has_bias)
        return self._ops.summand(weights[0], biases[0] if biases else None)

    def _weights(
        self, prefix: str, names: tuple[str, ...], has_bias: bool
    ) -> tuple[list[Weight], list[Tensor]]:
        weights = [self._source(f"{prefix}{name}_proj.weight") for name in names]
        biases = names if has_bias else ()
        return weights, [bias_of(self._config, self._source, prefix, name) for name in biases]

    def _numbers(self, name: str) -> Tensor:
        """A tensor that is never codes."""
        return numbers_of(self._source(name))

    def _then_normed(self, product: Product, norm: Norm | None) -> Product:
        return product if norm is None else lambda x: self._ops.rms_norm(product(x), norm)

    def _fused(self, norm: Norm | None) -> tuple[Norm | None, Callable[[Product], Product]]:
        """The norm that a product has in it, and what puts another one before the product."""
        if norm is None or not self._architecture.layer_norm:
            return norm, lambda product: product
        return None, lambda product: lambda x: product(self._ops.layer_norm(x, norm))


def _scaled(embed: Embed, factor: float) -> Embed:
    return lambda token_ids: embed(token_ids).mul_(factor)


def _root(size: int, dtype: torch.dtype) -> float:
    """Rounded to the weights' dtype, as in transformers."""
    return torch.tensor(size**0.5).to(dtype).item()
