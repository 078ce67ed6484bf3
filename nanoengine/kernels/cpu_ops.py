"""LayerOps on a CPU: the C kernels, and products by them or by PyTorch."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from nanoengine.kernels.cpu_kernels import CpuKernels
from nanoengine.kernels.cpu_linear import CpuLinear
from nanoengine.kernels.cpu_recurrence import CpuRecurrence
from nanoengine.kernels.kernel_ops import KernelOps
from nanoengine.kernels.packed_experts import PackedApart, PackedExpert, PackedExperts
from nanoengine.kernels.packed_product import (
    PackedAfterAttention,
    PackedGateUp,
    PackedHead,
    PackedHeads,
    PackedLinear,
)
from nanoengine.models.draw import Draws
from nanoengine.models.experts import (
    Experts,
    ExpertWeights,
    Map,
    MixtureWeights,
    Router,
    Routing,
)
from nanoengine.models.layer_ops import AfterAttention, Recurrence, multiply_heads
from nanoengine.models.products import MLP, Embed, Norm, Product, TiledProduct
from nanoengine.models.rules import RecurrentNet
from nanoengine.models.stored_codes import Weight, joined


def _activate(x: Tensor, activation: Map) -> None:
    activation(x)


def _layer_norm(x: Tensor, norm: Norm, out: Tensor) -> None:
    out.copy_(functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps))


def addends(weight: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Tensors of a dtype whose sum is the weight: of bfloat16 three are all bits of a float32."""
    found, rest = [weight.to(dtype)], weight
    while len(found) < 3 and (rest := rest - found[-1].to(weight.dtype)).any():
        found.append(rest.to(dtype))
    return found


class CpuOps(KernelOps):
    """PyTorch's products, with the C kernels between them."""

    _kernels: CpuKernels

    def __init__(self, kernels: CpuKernels) -> None:
        super().__init__(kernels, kernels.tape)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        out = x.new_empty(x.shape)
        self._kernels.sigmoid_mul(x, gate, out)
        return out

    def softplus_heads(self, x: Tensor, gates: Tensor) -> None:
        self._kernels.tape.call(multiply_heads, (x, gates))

    def layer_norm(self, x: Tensor, norm: Norm) -> Tensor:
        out = x.new_empty(x.shape)
        self._kernels.tape.call(_layer_norm, (x, norm, out))
        return out

    def activated(self, x: Tensor, activation: Map) -> Tensor:
        self._kernels.tape.call(_activate, (x, activation))
        return x

    def recurrence(self, net: RecurrentNet) -> Recurrence:
        """Raises KernelBuildError."""
        run = self._rules.run
        return lambda x, state, ctx: run(x, net, state, ctx)

    @cached_property
    def _rules(self) -> CpuRecurrence:
        return CpuRecurrence.load(self._kernels.tape)

    def argmax(self, logits: Tensor) -> Tensor:
        return self._kernels.argmax(logits)

    def likeliest(self, logprobs: Tensor, count: int) -> Tensor:
        return self._kernels.likeliest(logprobs, count)

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        return self._kernels.draw(logits, draws)


class PackedOps(CpuOps):
    """Products by our own kernel, with norm, gating and residual sum fused onto them: of numbers or
    codes, with activations in float32 or bfloat16.
    """

    is_batch_invariant = True
    packs = True

    def __init__(self, kernels: CpuKernels, products: CpuLinear) -> None:
        super().__init__(kernels)
        self._products = products
        self.takes_codes = products.takes_codes

    @property
    def saved_bytes(self) -> int:
        """As LayerOps.saved_bytes: numbers that fit 16 bits are held in these."""
        return self._products.saved_bytes

    def linear(
        self, weight: Weight, bias: Tensor | None = None, norm: Norm | None = None
    ) -> PackedLinear:
        fused = None if norm is None else (norm.weight, norm.eps)
        return self._products.pack(weight, bias, fused)

    def gate_up(
        self, gate: Weight, up: Weight, bias: Tensor | None, norm: Norm | None, activation: str
    ) -> Product:
        if norm is None:
            return super().gate_up(gate, up, bias, norm, activation)
        fused = norm.weight, norm.eps
        packed = self._products.pack_gate_up(gate, up, bias, fused, activation)
        return super().gate_up(gate, up, bias, norm, activation) if packed is None else packed

    def per_head(self, weights: Tensor) -> Product:
        return PackedHeads([self._products.pack(weight) for weight in weights])

    def embedding(self, weight: Weight) -> Embed:
        if not isinstance(weight, Tensor):
            return self._products.pack(weight).gather_rows
        embed, dtype = super().embedding(self._products.narrowed(weight)), weight.dtype
        return lambda token_ids: embed(token_ids).to(dtype)

    def tied(self, weight: Weight, norm: Norm | None) -> tuple[Embed, Product]:
        packed = self.linear(weight, None, norm)
        return packed.gather_rows, PackedHead(packed)

    def router(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """A weight in float32 is multiplied as the sum of numbers in the dtype of activations."""
        parts, biases = addends(weight, self._products.dtype), [bias, None, None]
        products = [self._products.pack(*each) for each in zip(parts, biases, strict=False)]

        def logits(x: Tensor) -> Tensor:
            made = products[0].in_float(x)
            for product in products[1:]:
                self._kernels.add(made, product.in_float(x))
            return made

        return logits if len(products) > 1 else products[0].in_float

    def route(self, routing: Routing, logits: Tensor) -> tuple[Tensor, Tensor]:
        return self._products.route(routing, logits)

    def rotate(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        self._kernels.rotate(q, cos, sin)
        return q

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._kernels.tape.call(super().copy, (target, source))

    def scale(self, x: Tensor, factor: float) -> None:
        self._kernels.tape.call(super().scale, (x, factor))

    def accumulate(self, x: Tensor, summand: Tensor, gate: Tensor | None = None) -> Tensor:
        self._kernels.add(x, summand, gate)
        return x

    def experts(
        self, weights: MixtureWeights, router: Router, activation: str, gather: Map | None = None
    ) -> Product:
        """Calls of C if each weight of an expert is of one format."""
        each = [self._expert(expert, activation) for expert in weights.experts]
        if self._are_one_call(each):
            return PackedExperts(self._products.workspace, router, each, gather)
        return Experts(router, each, gather)

    def _expert(self, expert: ExpertWeights, activation: str) -> PackedExpert:
        """Gate and up, in one weight where they can be; and down."""
        if expert.gate is None:
            up = PackedApart(self.linear(expert.up), self.gated(activation), activation)
            return up, self._products.pack(expert.down)
        bias, of_down = expert.biases or (None, None)
        gate_up = self._products.pack_gate_up(expert.gate, expert.up, bias, None, activation)
        down = self._products.pack(expert.down, of_down)
        if gate_up is not None:
            return gate_up, down
        both = self.linear(joined(expert.gate_up), bias)
        return PackedApart(both, self.gated(activation), activation), down

    def _are_one_call(self, experts: list[PackedExpert]) -> bool:
        """Whether C takes the experts: each is two weights, or each is three."""
        counts = {
            len(gate_up.weights) if isinstance(gate_up, PackedGateUp) or gate_up.is_one_call else 0
            for gate_up, _ in experts
        }
        return all(len(down.weights) == 1 for _, down in experts) and counts in ({1}, {2})

    def after_attention(
        self, out: Product, mlp: Product, next_qkv: Product | None
    ) -> AfterAttention:
        """One call of C if all products are packed with what goes around them."""
        if isinstance(out, TiledProduct):
            then, tiled = self.after_attention(out.product, mlp, next_qkv), out.tiled
            return lambda x, attended: then(x, tiled(attended))
        if (
            isinstance(out, PackedLinear)
            and isinstance(mlp, MLP)
            and isinstance(mlp.gate_up, PackedGateUp)
            and isinstance(mlp.down, PackedLinear)
            and (next_qkv is None or isinstance(next_qkv, PackedLinear))
        ):
            products = out, mlp.gate_up, mlp.down
            return PackedAfterAttention(self._products.workspace, products, next_qkv)
        return super().after_attention(out, mlp, next_qkv)
