"""One Decoder for every architecture: the rows in architectures.py say how they differ.

Knows tensor names, not files. Write a new class only for a model with another order of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nanoengine.config import ModelConfig, RopeConfig
from nanoengine.context import ForwardContext, ReplayKey
from nanoengine.models.architectures import ARCHITECTURES, has_qkv_bias
from nanoengine.models.layer_ops import AfterAttention, Embed, LayerOps, Norm, Product
from nanoengine.models.layers import Attention
from nanoengine.models.rope import Rotary, head_order
from nanoengine.models.stored_codes import Weight, halves, in_order, joined, numbers_of

TensorSource = Callable[[str], Weight]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One iteration of the loop over layers. rope: the index of its kind of rotation."""

    attention: Attention
    after_attention: AfterAttention
    rope: int


class Model(Protocol):
    """What runs the steps of a model (Decoder)."""

    def forward(self, ctx: ForwardContext) -> Tensor:
        """Residual stream after the last layer, [tokens, hidden]; the next call overwrites it."""
        ...

    def logits(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab], in the dtype of the weights or in fp32."""
        ...


class Decoder:
    """A decoder-only transformer over tokens laid end to end."""

    def __init__(
        self, config: ModelConfig, source: TensorSource, device: torch.device, ops: LayerOps
    ) -> None:
        """`source` gives each tensor of `weight_shapes(config)` once, on `device` and in the final
        dtype; matrices may be codes if `ops` takes these.
        """
        builder = _Builder(config, source, ops)
        self._embed, self._head = builder.ends()
        parts = [builder.layer(index) for index in range(config.num_layers)]
        self._first_qkv, *next_qkvs = (*(part.qkv for part in parts), None)
        ropes, rope_of = _ropes(config)
        self._layers = [
            _Layer(
                part.attention,
                ops.after_attention(part.out, part.gate_up, part.down, next_qkv),
                rope,
            )
            for part, next_qkv, rope in zip(parts, next_qkvs, rope_of, strict=True)
        ]
        self._rotary = Rotary(ropes, config.head_dim, device)
        self._logit_softcap = config.final_logit_softcap
        self._ops = ops

    def forward(self, ctx: ForwardContext) -> Tensor:
        """Residual stream after the last layer, [tokens, hidden]; the next call overwrites it."""
        x = self._embed(ctx.token_ids)
        cos, sin = self._rotary.angles(ctx.positions)
        # Steps other than decodes are hardly ever alike; a replay would report no mass.
        may_replay = len(x) == len(ctx.lengths) and ctx.block_mass is None
        key = ctx.kv.replay_key() if may_replay and ctx.attention.can_replay else None
        if key is None:
            return self._run_layers(self._ops.to_static_buffer(x), cos, sin, ctx)
        tensors = x, cos, sin, ctx.query_start, ctx.kv_lens, *key.tensors
        return self._ops.replay(
            ReplayKey(tensors, key.layout), lambda: self._run_layers(x, cos, sin, ctx)
        )

    def _run_layers(self, x: Tensor, cos: Tensor, sin: Tensor, ctx: ForwardContext) -> Tensor:
        """For each layer: x = x + attention(norm(x)), then x = x + mlp(norm(x)).

        attention(x) is out(attended(qkv(x))), mlp(x) is down(gate_up(x)). Kernels can fuse all that
        needs no KV cache, so after_attention does both sums, in place, and returns qkv(norm(x)) of
        the next layer. If an architecture has norms after attention and mlp, they are part of out
        and down.
        """
        angles = list(zip(cos.unbind(), sin.unbind(), strict=True))
        qkv = self._first_qkv(x)
        for layer in self._layers:
            attended = layer.attention(qkv, *angles[layer.rope], ctx)
            qkv = layer.after_attention(x, attended)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab], in the dtype of the weights or in fp32."""
        logits, softcap = self._head(x), self._logit_softcap
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _ropes(config: ModelConfig) -> tuple[tuple[RopeConfig | None, ...], tuple[int, ...]]:
    """The kinds of rotation, and for each layer the index of its kind."""
    layers = range(config.num_layers)
    if config.local_rope is not None:
        has_window = tuple(int(config.attention.window(i) is not None) for i in layers)
        return (config.rope, config.local_rope), has_window
    if config.no_rope_layers:
        return (config.rope, None), tuple(int(i in config.no_rope_layers) for i in layers)
    return (config.rope,), (0,) * config.num_layers


@dataclass(frozen=True, slots=True)
class _LayerParts:
    """What a layer computes, in this order. The products include the norms around them."""

    qkv: Product
    attention: Attention
    out: Product
    gate_up: Product
    down: Product


class _Builder:
    """Takes tensors from the source by name and makes the parts of a model of them.

    Fuses q, k, v and gate, up. Puts the heads of q and k into the order that the rotation needs.
    """

    def __init__(self, config: ModelConfig, source: TensorSource, ops: LayerOps) -> None:
        self._config = config
        self._architecture = ARCHITECTURES[config.architecture]
        self._head_order = head_order(config.rope, config.head_dim)
        self._ops = ops
        self._source = source

    def ends(self) -> tuple[Embed, Product]:
        """Token ids -> embeddings, and residual stream -> logits."""
        weight, norm = self._source("model.embed_tokens.weight"), self._norm("model.norm")
        embed: Embed
        if self._config.tie_word_embeddings:
            embed, head = self._ops.tied(weight, norm)
        else:
            embed = self._ops.embedding(weight)
            head = self._ops.head(self._source("lm_head.weight"), norm)
        if not self._architecture.scales_embeddings:
            return embed, head
        # The root rounded to the weights' dtype, as in transformers.
        root = torch.tensor(self._config.hidden_size**0.5).to(weight.dtype).item()
        return lambda token_ids: embed(token_ids).mul_(root), head

    def layer(self, index: int) -> _LayerParts:
        """The parts of one layer."""
        config, names = self._config, self._architecture.norms
        layer = f"model.layers.{index}."
        attention, mlp = layer + "self_attn.", layer + "mlp."
        out = self._summand(attention, "o", config.attention_bias)
        down = self._summand(mlp, "down", config.mlp_bias)
        return _LayerParts(
            qkv=self._qkv(attention, self._norm_if(layer, names.before_attention)),
            attention=self._attention(index, attention),
            out=self._then_normed(out, self._norm_if(layer, names.after_attention)),
            gate_up=self._gate_up(mlp, self._norm_if(layer, names.before_mlp)),
            down=self._then_normed(down, self._norm_if(layer, names.after_mlp)),
        )

    def _qkv(self, prefix: str, norm: Norm | None) -> Product:
        names = ("qkv",) if self._architecture.is_fused else ("q", "k", "v")
        weights, biases = self._weights(prefix, names, has_qkv_bias(self._config))
        weight, bias = joined(weights), torch.cat(biases) if biases else None
        if self._head_order is not None:
            order = self._row_order(self._head_order)
            weight, bias = in_order(weight, order), None if bias is None else bias[order]
        return self._ops.linear(weight, bias, norm)

    def _row_order(self, head_order: Tensor) -> Tensor:
        """int64 [(heads + 2 kv_heads) x head_dim]: the heads of q and k in `head_order`."""
        config = self._config
        rows = torch.arange((config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        heads = rows.view(-1, config.head_dim)
        q_and_k, v = heads.tensor_split((config.num_heads + config.num_kv_heads,))
        return torch.cat((q_and_k[:, head_order.cpu()], v)).flatten()

    def _attention(self, index: int, prefix: str) -> Attention:
        head_norms = None
        if self._architecture.qk_norm:
            assert self._head_order is None
            head_norms = self._norm(prefix + "q_norm"), self._norm(prefix + "k_norm")
        heads = self._config.num_heads, self._config.num_kv_heads
        return Attention(self._ops, index, *heads, head_norms)

    def _gate_up(self, prefix: str, norm: Norm | None) -> Product:
        names = ("gate_up",) if self._architecture.is_fused else ("gate", "up")
        weights, biases = self._weights(prefix, names, self._config.mlp_bias)
        if self._architecture.is_fused:
            weights = halves(weights[0])
            biases = [half for bias in biases for half in bias.chunk(2)]
        gate, up = weights
        gate_up_biases = (biases[0], biases[1]) if biases else None
        return self._ops.gate_up(gate, up, gate_up_biases, norm, self._architecture.activation)

    def _summand(self, prefix: str, name: str, has_bias: bool) -> Product:
        weights, biases = self._weights(prefix, (name,), has_bias)
        return self._ops.summand(weights[0], biases[0] if biases else None)

    def _weights(
        self, prefix: str, names: tuple[str, ...], has_bias: bool
    ) -> tuple[list[Weight], list[Tensor]]:
        weights = [self._source(f"{prefix}{name}_proj.weight") for name in names]
        return weights, [self._vector(f"{prefix}{name}_proj.bias") for name in names if has_bias]

    def _vector(self, name: str) -> Tensor:
        """A tensor that is never codes."""
        return numbers_of(self._source(name))

    def _then_normed(self, product: Product, norm: Norm | None) -> Product:
        return product if norm is None else lambda x: self._ops.rms_norm(product(x), norm)

    def _norm_if(self, prefix: str, name: str) -> Norm | None:
        return self._norm(prefix + name) if name else None

    def _norm(self, name: str) -> Norm:
        weight, offset = self._vector(f"{name}.weight"), self._architecture.norm_offset
        if offset:  # a small weight would be lost beside it in 16 bits
            return Norm(weight.float() + offset, self._config.rms_norm_eps, in_fp32=True)
        return Norm(weight, self._config.rms_norm_eps)
