"""The operations that a decoder is built of: products and the small operators between them.

LayerOps is the interface. torch_ops.py does all of it in PyTorch, kernels/cpu_ops.py and
kernels/gpu_ops.py fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from nanoengine.config.model import ExpertsConfig
from nanoengine.context import ForwardContext, KVTarget, RecurrentState, ReplayKey
from nanoengine.models.draw import Draws
from nanoengine.models.experts import ExpertWeights, Map, Router, RouterWeights
from nanoengine.models.rules import RecurrentNet
from nanoengine.models.stored_codes import Weight

# [tokens, in_features] -> [tokens, out_features], the norm, bias and activation included.
Product = Callable[[Tensor], Tensor]
Embed = Callable[[Tensor], Tensor]  # int64 [tokens] -> [tokens, hidden]
# (x, attended) -> the next layer's qkv, or x after the last layer. Adds to x in place.
AfterAttention = Callable[[Tensor, Tensor], Tensor]


RUN = 64  # token ids side by side: of the first run 0 to 63


@runtime_checkable
class PartedHead(Protocol):
    """An output head that may be asked for the logits of some tokens alone."""

    num_runs: int

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab]."""
        ...

    def of_runs(self, x: Tensor, runs: Tensor) -> Tensor:
        """As logits of all tokens, for those of `runs`, int64 [n]; the others have -inf."""
        ...


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm: x / rms(x) * weight (arXiv 1910.07467), in fp32 until x / rms(x) is rounded to the
    dtype of the weight. So with a weight in fp32 only the result is rounded.
    """

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Tiles:
    """The order of heads in a weight's inputs: so many tiles, each with one head of every group.

    Activations have the heads of a group, `count`, side by side. size: numbers of a head.
    """

    count: int
    size: int


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

    @property
    def packs(self) -> bool:
        """Whether products hold copies of weights, in a form of their own."""
        ...

    @property
    def saved_bytes(self) -> int:
        """How many bytes less the weights so far take than their numbers in the dtype."""
        ...

    def linear(
        self, weight: Weight, bias: Tensor | None = None, norm: Norm | None = None
    ) -> Product:
        """norm(x) @ weight.T + bias; weight is [out_features, in_features]."""
        ...

    def whole(self, weight: Weight) -> Product:
        """x @ weight.T with as many outputs as the residual stream: all of them on every rank."""
        ...

    def summand(
        self, weight: Weight, bias: Tensor | None = None, tiles: Tiles | None = None
    ) -> Product:
        """x @ weight.T + bias, whose result is added to the residual stream. tiles: the order of
        the weight's inputs, where it is not that of x.
        """
        ...

    def per_head(self, weights: Tensor) -> Product:
        """Each head's own product: weights [heads, outputs, inputs], x [tokens, heads, inputs],
        which may have strides -> [tokens, heads, outputs].
        """
        ...

    def gate_up(
        self,
        gate: Weight,
        up: Weight,
        biases: tuple[Tensor, Tensor] | None,
        norm: Norm | None,
        activation: str,
    ) -> Product:
        """activation(gate(norm(x))) * up(norm(x)) (arXiv 2002.05202); see torch_ops.GATED."""
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

    def route(
        self,
        config: ExpertsConfig,
        logits: Tensor,
        choice_bias: Tensor | None,
        scale: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """As experts.route, of what `router` gives."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """target = source, in place; both may have strides."""
        ...

    def scale(self, x: Tensor, factor: float) -> None:
        """x *= factor, in place."""
        ...

    def accumulate(self, x: Tensor, summand: Tensor, gate: Tensor | None = None) -> Tensor:
        """x += summand, in place, and x; both are contiguous and of one dtype.

        gate: contiguous fp32 [tokens, 1]: summand is multiplied by its sigmoid and rounded first.
        """
        ...

    def experts(
        self,
        config: ExpertsConfig,
        experts: Iterable[ExpertWeights],
        router: Router,
        activation: str,
        gather: Map | None = None,
    ) -> Product:
        """The experts of a layer, which are read one at a time. gather: as of Experts."""
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

    def beside_attention(
        self, out: Product, mlp: Product, next_qkv: Product | None
    ) -> AfterAttention:
        """As after_attention, of a feed-forward that does not see what attention gives:

        x = x + out(attended) + mlp(x)
        """
        ...

    def layer_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """LayerNorm without a bias (arXiv 1607.06450) of x, [tokens, dim]: (x - mean) / sd * weight
        in fp32, rounded once.
        """
        ...

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Normalise the last dimension of x, [tokens, dim] or [tokens, heads, dim]."""
        ...

    def rms_norm_of_all(self, x: Tensor, norm: Norm) -> Tensor:
        """Normalise all heads of a token at once; x is [tokens, heads, dim]. A rank has some of
        the heads that the norm is of.
        """
        ...

    def exchange(self, x: Tensor) -> Tensor:
        """What ranks made for some layers each, [tokens, layers, dim] -> each rank's columns for
        all layers. One process has all of both.
        """
        ...

    def rotate_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, target: KVTarget
    ) -> Tensor:
        """Rotate the pairs (i, i + head_dim / 2) of q and k, store k and v, and return q.

        q, k and v are [tokens, heads, head_dim]; q and k may be overwritten.
        """
        ...

    def rotate(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As rotate_and_store, of q alone, which may be overwritten."""
        ...

    def gated(self, activation: str) -> Product:
        """[tokens, 2 x dim] -> activation(first half) * second half; see torch_ops.GATED."""
        ...

    def activated(self, x: Tensor, activation: Map) -> Tensor:
        """activation(x), in place, and x: of feed-forwards and experts without a gate."""
        ...

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """x * sigmoid(gate), the sigmoid rounded first; x is [tokens, heads x head_dim], gate
        [tokens, heads, head_dim].
        """
        ...

    def recurrence(
        self, x: Tensor, net: RecurrentNet, state: RecurrentState, ctx: ForwardContext
    ) -> Tensor:
        """As rules.recurrence."""
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """[rows, vocab] -> int64 [rows]: the first place of the largest value, NaN above all."""
        ...

    def likeliest(self, logprobs: Tensor, count: int) -> Tensor:
        """As draw.likeliest."""
        ...

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """As draw.draw; a row's token does not depend on the other rows."""
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

    def forget_steps(self) -> None:
        """Release what was recorded to be replayed on a GPU."""
        ...


def num_runs(head: Product) -> int:
    """The runs of token ids that logits may be asked for alone; 0: only those of all tokens."""
    return head.num_runs if isinstance(head, PartedHead) else 0


def head_logits(head: Product, x: Tensor, runs: Tensor | None) -> Tensor:
    """The logits of all tokens, or, of a PartedHead, of `runs`."""
    if runs is None or not isinstance(head, PartedHead):
        return head(x)
    return head.of_runs(x, runs)


class NormedProduct:
    """product(norm(x)), with the two kept apart: a kernel may add to x and normalise it at once."""

    def __init__(self, ops: LayerOps, norm: Norm, product: Product) -> None:
        self._ops, self.norm, self.product = ops, norm, product

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features]."""
        return self.product(self._ops.rms_norm(x, self.norm))


class TiledProduct:
    """product(x), whose weight has heads in the order of `tiles`. The two are kept apart: a kernel
    may fuse the product with what follows.
    """

    def __init__(self, ops: LayerOps, tiles: Tiles, product: Product) -> None:
        self._ops, self._tiles, self.product = ops, tiles, product

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features]."""
        return self.product(self.tiled(x))

    def tiled(self, x: Tensor) -> Tensor:
        """A copy of x, [tokens, in_features], in the order of the weight."""
        count, size = self._tiles.count, self._tiles.size
        groups = x.view(len(x), x.shape[1] // (count * size), count, size)
        tiles, copy = groups.transpose(1, 2), x.new_empty(x.shape)
        self._ops.copy(copy.view(tiles.shape), tiles)
        return copy


@dataclass(frozen=True, slots=True)
class MLP:
    """down(gate_up(x)), of which a kernel may fuse the parts."""

    gate_up: Product
    down: Product

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return self.down(self.gate_up(x))
