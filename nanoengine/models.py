"""One Decoder, and a table of what sets the architectures apart. Knows tensor names, not files.

A new architecture is a row in ARCHITECTURES; a new class only when the block graph itself changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoengine.config import ModelConfig
from nanoengine.context import ForwardContext
from nanoengine.layers import MLP, Attention, LayerOps, Norm, Product, Rotary

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
        self, config: ModelConfig, source: TensorSource, device: torch.device, ops: LayerOps
    ) -> None:
        """`source` gives each tensor of `weight_shapes(config)` once, on `device` and in the
        final dtype.
        """
        builder = _Builder(config, source, ops)
        self._embed, self._head = builder.ends()
        self._layers = [builder.layer(index) for index in range(config.num_layers)]
        self._rotary = Rotary(config.rope, config.head_dim, device)

    def forward(self, ctx: ForwardContext) -> Tensor:
        """Residual stream after the last layer, [tokens, hidden]."""
        x = self._embed(ctx.token_ids)
        cos, sin = self._rotary.angles(ctx.positions)
        for attention, mlp in self._layers:
            attention(x, cos, sin, ctx)
            mlp(x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab], in the dtype of the weights."""
        return self._head(x)


class _Builder:
    """Takes tensors from the source by name and fuses q, k, v and gate, up."""

    def __init__(self, config: ModelConfig, source: TensorSource, ops: LayerOps) -> None:
        self._config = config
        self._ops = ops
        self._source = source

    def ends(self) -> tuple[Callable[[Tensor], Tensor], Product]:
        """Token ids -> embeddings, and residual stream -> logits."""
        embedding, norm = self._source("model.embed_tokens.weight"), self._norm("model.norm")
        if self._config.tie_word_embeddings:
            return self._ops.tied(embedding, norm)
        head = self._ops.linear(self._source("lm_head.weight"), None, norm)
        return functools.partial(torch.embedding, embedding), head

    def layer(self, index: int) -> tuple[Attention, MLP]:
        """Pre-norm attention and feed-forward, each added to the residual stream."""
        prefix = f"model.layers.{index}."
        norms = (self._norm(prefix + n) for n in ("input_layernorm", "post_attention_layernorm"))
        return self._attention(index, prefix, next(norms)), self._mlp(prefix + "mlp.", next(norms))

    def _attention(self, index: int, prefix: str, norm: Norm) -> Attention:
        config, prefix = self._config, prefix + "self_attn."
        weights, biases = self._weights(prefix, ("q", "k", "v"), config.attention_bias)
        qkv = self._ops.linear(torch.cat(weights), torch.cat(biases) if biases else None, norm)
        head_norms = None
        if ARCHITECTURES[config.architecture].qk_norm:
            head_norms = self._norm(prefix + "q_norm"), self._norm(prefix + "k_norm")
        out = self._linear(prefix, "o", config.attention_bias)
        heads = config.num_heads, config.num_kv_heads
        return Attention(self._ops, index, *heads, qkv, out, head_norms)

    def _mlp(self, prefix: str, norm: Norm) -> MLP:
        (gate, up), biases = self._weights(prefix, ("gate", "up"), self._config.mlp_bias)
        pair = (biases[0], biases[1]) if biases else None
        gate_up = self._ops.gate_up(gate, up, pair, norm)
        return MLP(gate_up, self._linear(prefix, "down", self._config.mlp_bias))

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
