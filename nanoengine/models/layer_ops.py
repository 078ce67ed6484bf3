"""The operations that a decoder is built of: products and the small operators between them.

LayerOps is the interface, and does all of it in PyTorch. kernels/cpu_ops.py and kernels/gpu_ops.py
do it fast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from nanoengine.context import ForwardContext, KVTarget, RecurrentState, ReplayKey
from nanoengine.models.activations import GATED, relu2
from nanoengine.models.draw import Draws, draw, likeliest
from nanoengine.models.experts import (
    Experts,
    ExpertWeights,
    Map,
    MixtureWeights,
    Router,
    Routing,
    route,
    sigmoid,
)
from nanoengine.models.products import Embed, Linear, Norm, Product, TiledProduct, Tiles, normed
from nanoengine.models.rules import RecurrentNet, recurrence
from nanoengine.models.stored_codes import Weight, joined, numbers_of

# (x, attended) -> the next layer's qkv, or x after the last layer. Adds to x in place.
AfterAttention = Callable[[Tensor, Tensor], Tensor]
# (x, state, ctx) -> what the rule gives. Replaces the state.
Recurrence = Callable[[Tensor, RecurrentState, ForwardContext], Tensor]


class LayerOps(Protocol):
    """Products of a model and the small operators between them; in PyTorch, which runs anywhere."""

    is_batch_invariant: bool = False  # whether the bits of a row depend on that row alone
    takes_codes: bool = False  # whether weights may be codes
    packs: bool = False  # whether products hold copies of weights, in a form of their own
    replays_graphs: bool = False  # whether parts of steps may be replayed as graphs of a GPU

    @property
    def saved_bytes(self) -> int:
        """How many bytes less the weights so far take than their numbers in the dtype."""
        return 0

    def linear(
        self, weight: Weight, bias: Tensor | None = None, norm: Norm | None = None
    ) -> Product:
        """norm(x) @ weight.T + bias; weight is [out_features, in_features]."""
        return normed(self.rms_norm, norm, Linear(numbers_of(weight), bias))

    def whole(self, weight: Weight) -> Product:
        """x @ weight.T with as many outputs as the residual stream: all of them on every rank."""
        return self.linear(weight)

    def summand(
        self, weight: Weight, bias: Tensor | None = None, tiles: Tiles | None = None
    ) -> Product:
        """x @ weight.T + bias, whose result is added to the residual stream. tiles: the order of
        the weight's inputs, where it is not that of x.
        """
        product = self.linear(weight, bias)
        return product if tiles is None else TiledProduct(self.copy, tiles, product)

    def per_head(self, weights: Tensor) -> Product:
        """Each head's own product: weights [heads, outputs, inputs], x [tokens, heads, inputs],
        which may have strides -> [tokens, heads, outputs].
        """
        turned = weights.transpose(1, 2).contiguous()
        return lambda x: torch.bmm(x.transpose(0, 1), turned).transpose(0, 1).contiguous()

    def gate_up(
        self, gate: Weight, up: Weight, bias: Tensor | None, norm: Norm | None, activation: str
    ) -> Product:
        """activation(gate(norm(x))) * up(norm(x)) (arXiv 2002.05202). bias: of gate, then of up."""
        both = self.linear(joined([gate, up]), bias)
        gated = self.gated(activation)
        return normed(self.rms_norm, norm, lambda x: gated(both(x)))

    def head(self, weight: Weight, norm: Norm | None) -> Product:
        """The product that gives the logits; its weight is never quantised."""
        return self.tied(weight, norm)[1]

    def embedding(self, weight: Weight) -> Embed:
        """Token ids to rows of weight."""
        return functools.partial(torch.embedding, numbers_of(weight))

    def tied(self, weight: Weight, norm: Norm | None) -> tuple[Embed, Product]:
        """The embedding and the head that share one weight, which is held once if possible."""
        # What oneDNN reorders is held twice.
        return self.embedding(weight), normed(self.rms_norm, norm, Linear(numbers_of(weight)))

    def router(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """x @ weight.T + bias in fp32; the weight is never quantised."""
        product = Linear(weight.float(), None if bias is None else bias.float())
        return lambda x: product(x.float())

    def route(self, routing: Routing, logits: Tensor) -> tuple[Tensor, Tensor]:
        """As experts.route, of what `router` gives."""
        return route(routing, logits)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """target = source, in place; both may have strides."""
        target.copy_(source)

    def scale(self, x: Tensor, factor: float) -> None:
        """x *= factor, in place."""
        x.mul_(factor)

    def accumulate(self, x: Tensor, summand: Tensor, gate: Tensor | None = None) -> Tensor:
        """x += summand, in place, and x; both are contiguous and of one dtype.

        gate: contiguous fp32 [tokens, 1]: summand is multiplied by its sigmoid and rounded first.
        """
        if gate is not None:
            summand = (summand.float() * sigmoid(gate)).to(x.dtype)
        return x.add_(summand)

    def experts(
        self, weights: MixtureWeights, router: Router, activation: str, gather: Map | None = None
    ) -> Product:
        """The experts of a layer, which are read one at a time. gather: as of Experts."""
        each = [parts_of_expert(self, expert, activation) for expert in weights.experts]
        return Experts(router, each, gather)

    def after_attention(
        self, out: Product, mlp: Product, next_qkv: Product | None
    ) -> AfterAttention:
        """Everything between two attentions, as one function:

            x = x + out(attended)
            x = x + mlp(x)
            return next_qkv(x)  # x if next_qkv is None

        Both sums are in place; a product is rounded before it is added.
        """

        def run(x: Tensor, attended: Tensor) -> Tensor:
            self.accumulate(x, out(attended))
            self.accumulate(x, mlp(x))
            return x if next_qkv is None else next_qkv(x)

        return run

    def beside_attention(
        self, out: Product, mlp: Product, next_qkv: Product | None
    ) -> AfterAttention:
        """As after_attention, of a feed-forward that does not see what attention gives:

        x = x + out(attended) + mlp(x)
        """

        def run(x: Tensor, attended: Tensor) -> Tensor:
            of_mlp = mlp(x)
            self.accumulate(x, out(attended))
            self.accumulate(x, of_mlp)
            return x if next_qkv is None else next_qkv(x)

        return run

    def layer_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """LayerNorm (arXiv 1607.06450) of [tokens, dim] in fp32, rounded once."""
        return functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Normalise the last dimension of x, [tokens, dim] or [tokens, heads, dim]."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
        return (norm.weight * (wide * scale).to(norm.weight.dtype)).to(x.dtype)

    def rms_norm_of_all(self, x: Tensor, norm: Norm) -> Tensor:
        """Normalise all heads of a token at once; x: [tokens, heads, dim], perhaps of a rank."""
        return self.rms_norm(x.view(len(x), -1), norm).view(x.shape)

    def exchange(self, x: Tensor) -> Tensor:
        """What ranks made for some layers each, [tokens, layers, dim] -> each rank's columns for
        all layers. One process has all of both.
        """
        return x

    def rotate_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, target: KVTarget
    ) -> Tensor:
        """Rotate the pairs (i, i + head_dim / 2) of q and k, store k and v, and return q.

        q, k and v are [tokens, heads, head_dim]; q and k may be overwritten.
        """
        target.store(_rotate(k, cos, sin), v)
        return _rotate(q, cos, sin)

    def rotate(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As rotate_and_store, of q alone, which may be overwritten."""
        return _rotate(q, cos, sin)

    def gated(self, activation: str) -> Product:
        """[tokens, 2 x dim] -> activation(first half) * second half; see activations.GATED."""
        return GATED[activation]

    def activated(self, x: Tensor, activation: Map) -> Tensor:
        """activation(x), in place, and x: of feed-forwards and experts without a gate."""
        return activation(x)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """x * sigmoid(gate), the sigmoid rounded first; x is [tokens, heads x head_dim], gate
        [tokens, heads, head_dim].
        """
        return x * gate.reshape(x.shape).sigmoid()

    def softplus_heads(self, x: Tensor, gates: Tensor) -> None:
        """x *= softplus(gate), rounded first, for each head of x; x is [tokens, heads x head_dim],
        gates [tokens, heads].
        """
        multiply_heads(x, gates)

    def recurrence(self, net: RecurrentNet) -> Recurrence:
        """As rules.recurrence, of this net."""
        return lambda x, state, ctx: recurrence(x, net, state, ctx)

    def argmax(self, logits: Tensor) -> Tensor:
        """[rows, vocab] -> int64 [rows]: the first place of the largest value, NaN above all."""
        return logits.argmax(dim=-1)

    def likeliest(self, logprobs: Tensor, count: int) -> Tensor:
        """As draw.likeliest."""
        return likeliest(logprobs, count)

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """As draw.draw; a row's token does not depend on the other rows."""
        return draw(logits, draws)

    def replay(self, key: ReplayKey, forward: Callable[[], Tensor]) -> Tensor:
        """forward(), which reads the tensors of `key`, or the replay of an earlier step on them.

        The next step overwrites the result.
        """
        return forward()

    def to_static_buffer(self, x: Tensor) -> Tensor:
        """x, or a copy of it where `after_attention` can be replayed as a graph.

        For the residual stream of a step that is not replayed as a whole. The next step overwrites
        the copy.
        """
        return x

    def forget_steps(self) -> None:
        """Release what was recorded to be replayed on a GPU: it is recorded anew."""
        return


class TorchOps(LayerOps):
    """Plain PyTorch alone."""


def parts_of_expert(
    ops: LayerOps, weights: ExpertWeights, activation: str
) -> tuple[Product, Product]:
    """Gate and up, or up with relu2; and down."""
    if weights.gate is None:
        product = ops.linear(weights.up)
        return lambda x: ops.activated(product(x), relu2), ops.summand(weights.down)
    bias, of_down = weights.biases or (None, None)
    gate_up = ops.gate_up(weights.gate, weights.up, bias, None, activation)
    return gate_up, ops.summand(weights.down, of_down)


def multiply_heads(x: Tensor, gates: Tensor) -> None:
    """As LayerOps.softplus_heads."""
    factors = functional.softplus(gates.float()).to(x.dtype)
    x.view(*gates.shape, -1).mul_(factors.unsqueeze(-1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
