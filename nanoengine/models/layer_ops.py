"""The operations that a decoder is built of: products and the small operators between them.

LayerOps is the interface; TorchOps does all of it in PyTorch. The fast ones are in
kernels/fused_ops.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from nanoengine.config.model import ExpertsConfig
from nanoengine.context import ForwardContext, KVTarget, RecurrentState, ReplayKey
from nanoengine.models.delta_net import DeltaNet, gated_delta
from nanoengine.models.experts import (
    Experts,
    ExpertWeights,
    MixtureWeights,
    Router,
    RouterWeights,
    SharedExpert,
    route,
)
from nanoengine.models.quant import Quantizer
from nanoengine.models.stored_codes import Weight, joined, numbers_of

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0

# [tokens, in_features] -> [tokens, out_features], the norm, bias and activation included.
Product = Callable[[Tensor], Tensor]
Embed = Callable[[Tensor], Tensor]  # int64 [tokens] -> [tokens, hidden]
# (x, attended) -> the next layer's qkv, or x after the last layer. Adds to x in place.
AfterAttention = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm: x / rms(x) * weight (arXiv 1910.07467), in fp32 until x / rms(x) is rounded.

    in_fp32: weight is fp32, and only the result is rounded. No kernel fuses such a norm.
    """

    weight: Tensor
    eps: float
    in_fp32: bool = False


class LayerOps(Protocol):
    """Makes the products of a model and runs the small operators between them."""

    @property
    def is_batch_invariant(self) -> bool:
        """Whether the bits of a row depend on that row alone."""
        ...

    @property
    def takes_codes(self) -> bool:
        """Whether weights may be codes."""
        ...

    def linear(
        self, weight: Weight, bias: Tensor | None = None, norm: Norm | None = None
    ) -> Product:
        """norm(x) @ weight.T + bias; weight is [out_features, in_features]."""
        ...

    def summand(self, weight: Weight, bias: Tensor | None = None) -> Product:
        """x @ weight.T + bias, whose result is added to the residual stream."""
        ...

    def gate_up(
        self,
        gate: Weight,
        up: Weight,
        biases: tuple[Tensor, Tensor] | None,
        norm: Norm | None,
        activation: str,
    ) -> Product:
        """activation(gate(norm(x))) * up(norm(x)) (arXiv 2002.05202); see GATED."""
        ...

    def head(self, weight: Weight, norm: Norm | None) -> Product:
        """The product that gives the logits; its weight is never quantised."""
        ...

    def embedding(self, weight: Weight) -> Embed:
        """Token ids to rows of weight."""
        ...

    def tied(self, weight: Weight, norm: Norm | None) -> tuple[Embed, Product]:
        """The embedding and the head that share one weight, which is held once if possible."""
        ...

    def router(self, weights: RouterWeights) -> Product:
        """x @ weight.T + bias in fp32; the weight is never quantised."""
        ...

    def experts(
        self, config: ExpertsConfig, weights: MixtureWeights, norm: Norm | None, activation: str
    ) -> Product:
        """The experts of a layer, on norm(x)."""
        ...

    def after_attention(
        self, out: Product, mlp: Product, next_qkv: Product | None
    ) -> AfterAttention:
        """Everything between two attentions, as one function:

            x = x + out(attended)
            x = x + mlp(x)
            return next_qkv(x)  # x if next_qkv is None

        Both sums are in place; a product is rounded before it is added.
        """
        ...

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Normalise the last dimension of x, [tokens, dim] or [tokens, heads, dim]."""
        ...

    def rotate_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, target: KVTarget
    ) -> Tensor:
        """Rotate the pairs (i, i + head_dim / 2) of q and k, store k and v, and return q.

        q, k and v are [tokens, heads, head_dim]; q and k may be overwritten.
        """
        ...

    def rotate(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As rotate_and_store, of q alone."""
        ...

    def gated(self, activation: str) -> Product:
        """[tokens, 2 x dim] -> activation(first half) * second half; see GATED."""
        ...

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """x * sigmoid(gate), the sigmoid rounded first; x is [tokens, heads x head_dim], gate
        [tokens, heads, head_dim].
        """
        ...

    def gated_delta(
        self, x: Tensor, net: DeltaNet, state: RecurrentState, ctx: ForwardContext
    ) -> Tensor:
        """As delta_net.gated_delta."""
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """[rows, vocab] -> int64 [rows]: the first place of the largest value, NaN above all."""
        ...

    def replay(self, key: ReplayKey, forward: Callable[[], Tensor]) -> Tensor:
        """forward(), which reads the tensors of `key`, or the replay of an earlier step on them.

        The next step overwrites the result.
        """
        ...

    def to_static_buffer(self, x: Tensor) -> Tensor:
        """x, or a copy of it where `after_attention` can be replayed as a graph.

        For the residual stream of a step that is not replayed as a whole. The next step overwrites
        the copy.
        """
        ...


class Linear:
    """A product by PyTorch. On a CPU bfloat16 weights are reordered once into oneDNN's layout."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, quantized: Product | None = None
    ) -> None:
        """quantized: the product with the quantised weight, used instead of `weight`."""
        self._bias = bias
        self._quantized = quantized
        if quantized is not None:
            return
        self._packed = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features]."""
        if self._quantized is not None:
            product = self._quantized(x)
            return product if self._bias is None else product.add_(self._bias)
        if self._packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return out
        return functional.linear(x, self._weight, self._bias)


class NormedProduct:
    """product(norm(x)), with the two kept apart: a kernel may add to x and normalise it at once."""

    def __init__(self, ops: LayerOps, norm: Norm, product: Product) -> None:
        self._ops, self.norm, self.product = ops, norm, product

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features]."""
        return self.product(self._ops.rms_norm(x, self.norm))


@dataclass(frozen=True, slots=True)
class MLP:
    """down(gate_up(x)), of which a kernel may fuse the parts."""

    gate_up: Product
    down: Product

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return self.down(self.gate_up(x))


def make_experts(
    ops: LayerOps,
    config: ExpertsConfig,
    weights: MixtureWeights,
    norm: Norm | None,
    activation: str,
) -> Product:
    """LayerOps.experts of the products of `ops`."""
    each = [_expert(ops, expert, activation) for expert in weights.experts]
    before = norm_of_experts(ops, weights, norm)
    experts = Experts(make_router(ops, config, weights), each, before)
    return finish_experts(ops, experts, weights, norm, activation)


def make_router(ops: LayerOps, config: ExpertsConfig, weights: MixtureWeights) -> Router:
    """Chooses the experts of rows."""
    product, before, scale = ops.router(weights.router), weights.before_router, weights.scale

    def choose(x: Tensor) -> tuple[Tensor, Tensor]:
        logits = product(x if before is None else before(x))
        ids, chosen = route(config, logits, weights.choice_bias)
        return ids, chosen if scale is None else chosen * scale[ids]

    return choose


def norm_of_experts(ops: LayerOps, weights: MixtureWeights, norm: Norm | None) -> Product | None:
    """The norm that the experts alone see; None: what is before them is also before the router."""
    if norm is None or weights.before_router is None:
        return None
    return lambda x: ops.rms_norm(x, norm)


def finish_experts(
    ops: LayerOps, experts: Product, weights: MixtureWeights, norm: Norm | None, activation: str
) -> Product:
    """The experts of a layer, with the norm before them and the shared one beside them."""
    if weights.shared is not None:
        gate = weights.shared_gate
        product = None if gate is None else ops.router(RouterWeights(gate))
        experts = SharedExpert(experts, _expert(ops, weights.shared, activation), product)
    if norm is None or weights.before_router is not None:
        return experts
    return NormedProduct(ops, norm, experts)


def _expert(ops: LayerOps, weights: ExpertWeights, activation: str) -> Product:
    gate, up, down = weights.biases or (None, None, None)
    both = None if gate is None or up is None else (gate, up)
    gate_up = ops.gate_up(weights.gate, weights.up, both, None, activation)
    return MLP(gate_up, ops.summand(weights.down, down))


class TorchOps:
    """Plain PyTorch, which runs anywhere."""

    is_batch_invariant = False
    takes_codes = False

    def __init__(self, quantizer: Quantizer | None = None) -> None:
        """quantizer: packs the weights of the layers; None leaves them as they are."""
        self._quantizer = quantizer

    def linear(
        self, weight: Weight, bias: Tensor | None = None, norm: Norm | None = None
    ) -> Product:
        quantizer = self._quantizer
        quantized = None if quantizer is None else quantizer.product(numbers_of(weight))
        return self._linear(weight, bias, norm, quantized)

    def summand(self, weight: Weight, bias: Tensor | None = None) -> Product:
        return self.linear(weight, bias)

    def head(self, weight: Weight, norm: Norm | None) -> Product:
        return self._linear(weight, None, norm, None)

    def embedding(self, weight: Weight) -> Embed:
        return functools.partial(torch.embedding, numbers_of(weight))

    def _linear(
        self, weight: Weight, bias: Tensor | None, norm: Norm | None, quantized: Product | None
    ) -> Product:
        return self._normed(norm, Linear(numbers_of(weight), bias, quantized))

    def _normed(self, norm: Norm | None, product: Product) -> Product:
        return product if norm is None else NormedProduct(self, norm, product)

    def gate_up(
        self,
        gate: Weight,
        up: Weight,
        biases: tuple[Tensor, Tensor] | None,
        norm: Norm | None,
        activation: str,
    ) -> Product:
        both = self.linear(joined([gate, up]), None if biases is None else torch.cat(biases))
        gated = self.gated(activation)
        return self._normed(norm, lambda x: gated(both(x)))

    def gated(self, activation: str) -> Product:
        return GATED[activation]

    def tied(self, weight: Weight, norm: Norm | None) -> tuple[Embed, Product]:
        """As LayerOps.tied; but a weight that oneDNN reorders is held twice."""
        return self.embedding(weight), self.head(weight, norm)

    def router(self, weights: RouterWeights) -> Product:
        bias = None if weights.bias is None else weights.bias.float()
        product = Linear(weights.weight.float(), bias)
        return lambda x: product(x.float())

    def experts(
        self, config: ExpertsConfig, weights: MixtureWeights, norm: Norm | None, activation: str
    ) -> Product:
        return make_experts(self, config, weights, norm, activation)

    def after_attention(
        self, out: Product, mlp: Product, next_qkv: Product | None
    ) -> AfterAttention:
        def run(x: Tensor, attended: Tensor) -> Tensor:
            self._accumulate(x, out(attended))
            self._accumulate(x, mlp(x))
            return x if next_qkv is None else next_qkv(x)

        return run

    def _accumulate(self, x: Tensor, summand: Tensor) -> None:
        """x += summand, in place."""
        x += summand

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
        if norm.in_fp32:
            return (norm.weight * (wide * scale)).to(x.dtype)
        return norm.weight * (wide * scale).to(x.dtype)

    def rotate_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, target: KVTarget
    ) -> Tensor:
        target.store(_rotate(k, cos, sin), v)
        return _rotate(q, cos, sin)

    def rotate(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _rotate(q, cos, sin)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.reshape(x.shape).sigmoid()

    def gated_delta(
        self, x: Tensor, net: DeltaNet, state: RecurrentState, ctx: ForwardContext
    ) -> Tensor:
        return gated_delta(x, net, state, ctx)

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1)

    def replay(self, key: ReplayKey, forward: Callable[[], Tensor]) -> Tensor:
        return forward()

    def to_static_buffer(self, x: Tensor) -> Tensor:
        return x


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [tokens, 2 * dim]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up of [tokens, 2 * dim]; GELU by its formula with tanh (arXiv 1606.08415)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """gate * sigmoid(1.702 gate) * (up + 1) of [tokens, 2 * dim], where gate is at most 7 and up is
    within 7 of 0: that of gpt-oss.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * SWIGLU_ALPHA))


# activation(gate) * up, by transformers' names of the activations; it has none for the last.
GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_mul,
    "gelu_pytorch_tanh": gelu_mul,
    "clamped_swiglu": clamped_swiglu,
}


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
