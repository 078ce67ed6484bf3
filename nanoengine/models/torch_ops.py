"""TorchOps: the operations of a decoder in plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional

from nanoengine.config.model import ExpertsConfig
from nanoengine.context import ForwardContext, KVTarget, RecurrentState, ReplayKey
from nanoengine.models.draw import Draws, draw, likeliest
from nanoengine.models.expert_layer import parts_of_expert
from nanoengine.models.experts import (
    Experts,
    ExpertWeights,
    Map,
    Router,
    RouterWeights,
    route,
    sigmoid,
)
from nanoengine.models.layer_ops import (
    AfterAttention,
    Embed,
    Norm,
    NormedProduct,
    Product,
    TiledProduct,
    Tiles,
)
from nanoengine.models.rules import RecurrentNet, recurrence
from nanoengine.models.stored_codes import Weight, joined, numbers_of
from nanoengine.models.ungated import relu2

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


class Linear:
    """A product by PyTorch. On a CPU bfloat16 weights are reordered once into oneDNN's layout, if
    oneDNN has bfloat16 there; it wants AVX-512 or AVX-NE-CONVERT.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        self._packed = on_cpu and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features]."""
        if self._packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return out
        return functional.linear(x, self._weight, self._bias)


class TorchOps:
    """Plain PyTorch, which runs anywhere."""

    is_batch_invariant = False
    takes_codes = False
    packs = False

    @property
    def saved_bytes(self) -> int:
        """As LayerOps.saved_bytes: weights are held as they come."""
        return 0

    def linear(
        self, weight: Weight, bias: Tensor | None = None, norm: Norm | None = None
    ) -> Product:
        return self._normed(norm, Linear(numbers_of(weight), bias))

    def whole(self, weight: Weight) -> Product:
        return self.linear(weight)

    def summand(
        self, weight: Weight, bias: Tensor | None = None, tiles: Tiles | None = None
    ) -> Product:
        product = self.linear(weight, bias)
        return product if tiles is None else TiledProduct(self, tiles, product)

    def per_head(self, weights: Tensor) -> Product:
        turned = weights.transpose(1, 2).contiguous()
        return lambda x: torch.bmm(x.transpose(0, 1), turned).transpose(0, 1).contiguous()

    def head(self, weight: Weight, norm: Norm | None) -> Product:
        return self._normed(norm, Linear(numbers_of(weight)))

    def embedding(self, weight: Weight) -> Embed:
        return functools.partial(torch.embedding, numbers_of(weight))

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

    def activated(self, x: Tensor, activation: Map) -> Tensor:
        return activation(x)

    def gated(self, activation: str) -> Product:
        return GATED[activation]

    def tied(self, weight: Weight, norm: Norm | None) -> tuple[Embed, Product]:
        """As LayerOps.tied; but a weight that oneDNN reorders is held twice."""
        return self.embedding(weight), self.head(weight, norm)

    def router(self, weights: RouterWeights) -> Product:
        bias = None if weights.bias is None else weights.bias.float()
        product = Linear(weights.weight.float(), bias)
        return lambda x: product(x.float())

    def route(
        self,
        config: ExpertsConfig,
        logits: Tensor,
        choice_bias: Tensor | None,
        scale: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        return route(config, logits, choice_bias, scale)

    def experts(
        self,
        config: ExpertsConfig,
        experts: Iterable[ExpertWeights],
        router: Router,
        activation: str,
        gather: Map | None = None,
    ) -> Product:
        each = [parts_of_expert(self, expert, activation) for expert in experts]
        return Experts(router, each, gather)

    def after_attention(
        self, out: Product, mlp: Product, next_qkv: Product | None
    ) -> AfterAttention:
        def run(x: Tensor, attended: Tensor) -> Tensor:
            self.accumulate(x, out(attended))
            self.accumulate(x, mlp(x))
            return x if next_qkv is None else next_qkv(x)

        return run

    def beside_attention(
        self, out: Product, mlp: Product, next_qkv: Product | None
    ) -> AfterAttention:
        def run(x: Tensor, attended: Tensor) -> Tensor:
            of_mlp = mlp(x)
            self.accumulate(x, out(attended))
            self.accumulate(x, of_mlp)
            return x if next_qkv is None else next_qkv(x)

        return run

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def scale(self, x: Tensor, factor: float) -> None:
        x.mul_(factor)

    def accumulate(self, x: Tensor, summand: Tensor, gate: Tensor | None = None) -> Tensor:
        if gate is not None:
            summand = (summand.float() * sigmoid(gate)).to(x.dtype)
        return x.add_(summand)

    def layer_norm(self, x: Tensor, norm: Norm) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], norm.weight, None, norm.eps)

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
        return (norm.weight * (wide * scale).to(norm.weight.dtype)).to(x.dtype)

    def rms_norm_of_all(self, x: Tensor, norm: Norm) -> Tensor:
        return self.rms_norm(x.view(len(x), -1), norm).view(x.shape)

    def exchange(self, x: Tensor) -> Tensor:
        return x

    def rotate_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, target: KVTarget
    ) -> Tensor:
        target.store(_rotate(k, cos, sin), v)
        return _rotate(q, cos, sin)

    def rotate(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _rotate(q, cos, sin)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.reshape(x.shape).sigmoid()

    def recurrence(
        self, x: Tensor, net: RecurrentNet, state: RecurrentState, ctx: ForwardContext
    ) -> Tensor:
        return recurrence(x, net, state, ctx)

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1)

    def likeliest(self, logprobs: Tensor, count: int) -> Tensor:
        return likeliest(logprobs, count)

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        return draw(logits, draws)

    def replay(self, key: ReplayKey, forward: Callable[[], Tensor]) -> Tensor:
        return forward()

    def to_static_buffer(self, x: Tensor) -> Tensor:
        return x

    def forget_steps(self) -> None:
        """Nothing was recorded."""


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


# activation(gate) * up, by transformers' names of the activations; it has none for clamped_swiglu.
# relu2 has no gate: of [tokens, dim].
GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_mul,
    "gelu_pytorch_tanh": gelu_mul,
    "clamped_swiglu": clamped_swiglu,
    "relu2": relu2,
}


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
