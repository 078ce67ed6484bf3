"""One Decoder for every architecture: what sets them apart is a row in architectures.py.

Knows tensor names, not files. A new class is needed only when the block graph itself changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoengine.config import ModelConfig, RopeConfig
from nanoengine.context import ForwardContext, StepInputs
from nanoengine.models.architectures import ARCHITECTURES, _has_qkv_bias
from nanoengine.models.layer_ops import Bridge, GateUp, Head, LayerOps, Norm, Product, plain_bridge
from nanoengine.models.layers import Attention, Normalize, NormedProduct, OffsetNorm, gelu_mul
from nanoengine.models.rope import Rotary, head_order

TensorSource = Callable[[str], Tensor]


def _ropes(config: ModelConfig) -> tuple[tuple[RopeConfig | None, ...], tuple[int, ...]]:
    """The kinds of rotation, and for each layer which of them it has."""
    layers = range(config.num_layers)
    if config.local_rope is not None:
        has_window = tuple(int(config.attention.window(i) is not None) for i in layers)
        return (config.rope, config.local_rope), has_window
    if config.no_rope_layers:
        return (config.rope, None), tuple(int(i in config.no_rope_layers) for i in layers)
    return (config.rope,), (0,) * config.num_layers


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
