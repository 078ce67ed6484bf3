"""One Decoder, and a table of what sets the architectures apart. Knows tensor names, not files.

A new architecture is a row in ARCHITECTURES; a new class only when the block graph itself changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoengine.config import ModelConfig
from nanoengine.context import ForwardContext
from nanoengine.layers import MLP, Attention, Linear, RMSNorm, Rotary, TensorOps

TensorSource = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class Architecture:
    """What differs between decoders. qk_norm: RMSNorm over each head of q and k before the
    rotation.
    """

    qk_norm: bool = False


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(),
    "Qwen3ForCausalLM": Architecture(qk_norm=True),
}


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
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield f"{prefix}input_layernorm.weight", (hidden,)
    yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    if ARCHITECTURES[config.architecture].qk_norm:
        yield f"{prefix}self_attn.q_norm.weight", (config.head_dim,)
        yield f"{prefix}self_attn.k_norm.weight", (config.head_dim,)
    attention = {
        "q": (heads, hidden),
        "k": (kv_heads, hidden),
        "v": (kv_heads, hidden),
        "o": (hidden, heads),
    }
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    for part, table, has_bias in (
        ("self_attn", attention, config.attention_bias),
        ("mlp", mlp, config.mlp_bias),
    ):
        for name, shape in table.items():
            yield f"{prefix}{part}.{name}_proj.weight", shape
            if has_bias:
                yield f"{prefix}{part}.{name}_proj.bias", shape[:1]


class Decoder:
    """A decoder-only transformer over tokens laid end to end."""

    def __init__(
        self, config: ModelConfig, source: TensorSource, device: torch.device, ops: TensorOps
    ) -> None:
        """`source` gives each tensor of `weight_shapes(config)` once, on `device` and in the
        final dtype.
        """
        builder = _Builder(config, source, ops)
        self._embedding = source("model.embed_tokens.weight")
        self._layers = [builder.layer(index) for index in range(config.num_layers)]
        self._norm = RMSNorm(ops, source("model.norm.weight"), config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self._head = Linear(self._embedding if tied else source("lm_head.weight"))
        self._rotary = Rotary(config.rope, config.head_dim, device)

    def forward(self, ctx: ForwardContext) -> Tensor:
        """Residual stream after the last layer, [tokens, hidden]."""
        x = torch.embedding(self._embedding, ctx.token_ids)
        cos, sin = self._rotary.angles(ctx.positions)
        pending: Tensor | None = None
        for layer in self._layers:
            pending = layer(x, pending, cos, sin, ctx)
        return x if pending is None else x + pending

    def logits(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab], in the dtype of the weights."""
        return self._head(self._norm(x))


class DecoderLayer:
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(
        self, attn_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: MLP
    ) -> None:
        self._attn_norm = attn_norm
        self._attention = attention
        self._mlp_norm = mlp_norm
        self._mlp = mlp

    def __call__(
        self, x: Tensor, pending: Tensor | None, cos: Tensor, sin: Tensor, ctx: ForwardContext
    ) -> Tensor:
        """Adds `pending` and the attention to the residual stream x, [tokens, hidden], in place.

        Returns the feed-forward's output, which the next layer adds: each sum is fused with the
        norm that follows it.
        """
        normed = self._attn_norm(x) if pending is None else self._attn_norm.after_add(x, pending)
        attended = self._attention(normed, cos, sin, ctx)
        return self._mlp(self._mlp_norm.after_add(x, attended))


class _Builder:
    """Takes tensors from the source by name and fuses q, k, v and gate, up."""

    def __init__(self, config: ModelConfig, source: TensorSource, ops: TensorOps) -> None:
        self._config = config
        self._ops = ops
        self._source = source
        self._flags = ARCHITECTURES[config.architecture]

    def layer(self, index: int) -> DecoderLayer:
        config, prefix = self._config, f"model.layers.{index}."
        qk_norm = self._flags.qk_norm
        attention = Attention(
            self._ops,
            index,
            config.num_heads,
            config.num_kv_heads,
            self._linear(prefix + "self_attn.", ("q", "k", "v"), config.attention_bias),
            self._linear(prefix + "self_attn.", ("o",), config.attention_bias),
            self._norm(prefix + "self_attn.q_norm") if qk_norm else None,
            self._norm(prefix + "self_attn.k_norm") if qk_norm else None,
        )
        mlp = MLP(
            self._ops,
            self._linear(prefix + "mlp.", ("gate", "up"), config.mlp_bias),
            self._linear(prefix + "mlp.", ("down",), config.mlp_bias),
        )
        return DecoderLayer(
            self._norm(prefix + "input_layernorm"),
            attention,
            self._norm(prefix + "post_attention_layernorm"),
            mlp,
        )

    def _linear(self, prefix: str, names: tuple[str, ...], has_bias: bool) -> Linear:
        weights = [self._source(f"{prefix}{name}_proj.weight") for name in names]
        biases = [self._source(f"{prefix}{name}_proj.bias") for name in names if has_bias]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return Linear(weight, torch.cat(biases) if biases else None)

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._ops, self._source(f"{name}.weight"), self._config.rms_norm_eps)
