"""LayerOps by fast kernels: fused operators, packed products on a CPU, graphs on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from nanoengine.config.model import ExpertsConfig
from nanoengine.context import ForwardContext, KVTarget, RecurrentState, ReplayKey
from nanoengine.errors import ConfigError
from nanoengine.kernels.cpu_kernels import CpuKernels
from nanoengine.kernels.cpu_linear import CpuLinear
from nanoengine.kernels.packed_experts import PackedApart, PackedExpert
from nanoengine.kernels.packed_product import PackedGateUp, PackedHead, PackedHeads, PackedLinear
from nanoengine.models.draw import Draws
from nanoengine.models.experts import (
    IN_A_GRAPH,
    ON_A_GPU,
    CodedExpert,
    Experts,
    ExpertWeights,
    GroupedExperts,
    Map,
    Router,
    RouterWeights,
)
from nanoengine.models.layer_ops import (
    MLP,
    AfterAttention,
    Embed,
    Norm,
    NormedProduct,
    Product,
    TiledProduct,
)
from nanoengine.models.rules import RecurrentNet
from nanoengine.models.stored_codes import CodedWeight, Weight, joined
from nanoengine.models.torch_ops import TorchOps
from nanoengine.models.ungated import relu2


class Recorder(Protocol):
    """Records a step and replays it (CallTape, CudaGraphs)."""

    def replay(self, key: ReplayKey, forward: Callable[[], Tensor]) -> Tensor:
        """As LayerOps.replay."""
        ...


class Graphs(Recorder, Protocol):
    """Also replays parts of a step (CudaGraphs)."""

    def to_static_buffer(self, x: Tensor) -> Tensor:
        """As LayerOps.to_static_buffer."""
        ...

    def piece(self, after_attention: AfterAttention) -> AfterAttention:
        """after_attention, replayed as a graph where x is in a static buffer."""
        ...

    def forget_steps(self) -> None:
        """As LayerOps.forget_steps."""
        ...


class Kernels(Protocol):
    """Small operators of one call each, documented in CpuKernels."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...
    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None: ...
    def gelu_mul(self, gate_up: Tensor, out: Tensor) -> None: ...
    def clamped_swiglu(self, gate_up: Tensor, out: Tensor) -> None: ...
    def rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, target: KVTarget
    ) -> None: ...
    def recurrence(
        self, x: Tensor, net: RecurrentNet, state: RecurrentState, ctx: ForwardContext, out: Tensor
    ) -> None: ...


class KernelOps(TorchOps):
    """Fused kernels: one call each instead of five to eight small PyTorch operators."""

    def __init__(self, kernels: Kernels, recorder: Recorder | None) -> None:
        """recorder: replays steps; None: no step is replayed."""
        self._kernels = kernels
        self._recorder = recorder

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        out = x.new_empty(x.shape)
        self._kernels.rms_norm(x, norm.weight, norm.eps, out)
        return out

    def rotate_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, target: KVTarget
    ) -> Tensor:
        self._kernels.rope_store(q, k, v, cos, sin, target)
        return q

    def gated(self, activation: str) -> Product:
        if activation == "relu2":
            return partial(self.activated, activation=relu2)
        kernels = {
            "silu": self._kernels.silu_mul,
            "gelu_pytorch_tanh": self._kernels.gelu_mul,
            "clamped_swiglu": self._kernels.clamped_swiglu,
        }
        return partial(_half_of, kernels[activation])

    def recurrence(
        self, x: Tensor, net: RecurrentNet, state: RecurrentState, ctx: ForwardContext
    ) -> Tensor:
        out = x.new_empty(x.shape[0], net.shape.value_size)
        self._kernels.recurrence(x, net, state, ctx, out)
        return out

    def replay(self, key: ReplayKey, forward: Callable[[], Tensor]) -> Tensor:
        return forward() if self._recorder is None else self._recorder.replay(key, forward)


def _activate(x: Tensor, activation: Map) -> None:
    activation(x)


def _layer_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    out.copy_(functional.layer_norm(x, x.shape[-1:], weight, None, eps))


def addends(weight: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Tensors of a dtype whose sum is the weight: of bfloat16 three are all bits of a float32."""
    found, rest = [weight.to(dtype)], weight
    while len(found) < 3 and (rest := rest - found[-1].to(weight.dtype)).any():
        found.append(rest.to(dtype))
    return found


def _half_of(kernel: Callable[[Tensor, Tensor], None], gate_up: Tensor) -> Tensor:
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    kernel(gate_up, out)
    return out


class CpuOps(KernelOps):
    """PyTorch's products, with the C kernels between them."""

    _kernels: CpuKernels

    def __init__(self, kernels: CpuKernels) -> None:
        super().__init__(kernels, kernels.tape)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        out = x.new_empty(x.shape)
        self._kernels.sigmoid_mul(x, gate, out)
        return out

    def layer_norm(self, x: Tensor, norm: Norm) -> Tensor:
        out = x.new_empty(x.shape)
        self._kernels.tape.call(_layer_norm, (x, norm.weight, norm.eps, out))
        return out

    def activated(self, x: Tensor, activation: Map) -> Tensor:
        self._kernels.tape.call(_activate, (x, activation))
        return x

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
        self.takes_codes = products.with_codes

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
        self,
        gate: Weight,
        up: Weight,
        biases: tuple[Tensor, Tensor] | None,
        norm: Norm | None,
        activation: str,
    ) -> Product:
        if norm is None:
            return super().gate_up(gate, up, biases, norm, activation)
        fused = norm.weight, norm.eps
        packed = self._products.pack_gate_up(gate, up, biases, fused, activation)
        return super().gate_up(gate, up, biases, norm, activation) if packed is None else packed

    def per_head(self, weights: Tensor) -> Product:
        return PackedHeads([self._products.pack(weight) for weight in weights])

    def head(self, weight: Weight, norm: Norm | None) -> Product:
        return self.tied(weight, norm)[1]

    def embedding(self, weight: Weight) -> Embed:
        if not isinstance(weight, Tensor):
            return self._products.pack(weight).gather_rows
        embed, dtype = super().embedding(self._products.narrowed(weight)), weight.dtype
        return lambda token_ids: embed(token_ids).to(dtype)

    def tied(self, weight: Weight, norm: Norm | None) -> tuple[Embed, Product]:
        packed = self.linear(weight, None, norm)
        return packed.gather_rows, PackedHead(packed)

    def router(self, weights: RouterWeights) -> Product:
        """A weight in float32 is multiplied as the sum of numbers in the dtype of activations."""
        parts, biases = addends(weights.weight, self._products.dtype), [weights.bias, None, None]
        products = [self._products.pack(*each) for each in zip(parts, biases, strict=False)]

        def logits(x: Tensor) -> Tensor:
            made = products[0].in_float(x)
            for product in products[1:]:
                self._kernels.add(made, product.in_float(x))
            return made

        return logits if len(products) > 1 else products[0].in_float

    def route(
        self,
        config: ExpertsConfig,
        logits: Tensor,
        choice_bias: Tensor | None,
        scale: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        return self._products.route(config, logits, choice_bias, scale)

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
        self,
        config: ExpertsConfig,
        experts: Iterable[ExpertWeights],
        router: Router,
        activation: str,
        gather: Map | None = None,
    ) -> Product:
        """Calls of C if each weight of an expert is of one format."""
        each = [self._expert(expert, activation) for expert in experts]
        if self._are_one_call(each):
            return self._products.experts(router, each, gather)
        return Experts(router, each, gather)

    def _expert(self, expert: ExpertWeights, activation: str) -> PackedExpert:
        """Gate and up, in one weight where they can be; and down."""
        if expert.gate is None:
            up = PackedApart(self.linear(expert.up), self.gated(activation), activation)
            return up, self._products.pack(expert.down)
        biases, of_down = None, None
        if expert.biases is not None:
            *of_both, of_down = expert.biases
            biases = of_both[0], of_both[1]
        gate_up = self._products.pack_gate_up(expert.gate, expert.up, biases, None, activation)
        down = self._products.pack(expert.down, of_down)
        if gate_up is not None:
            return gate_up, down
        both = self.linear(joined(expert.gate_up), None if biases is None else torch.cat(biases))
        return PackedApart(both, self.gated(activation), activation), down

    def _are_one_call(self, experts: list[PackedExpert]) -> bool:
        """Whether C takes the experts: each is two weights, or each is three."""
        counts = {
            len(gate_up.weights) if isinstance(gate_up, PackedGateUp) or gate_up.is_one_call else 0
            for gate_up, _ in experts
        }
        return all(down.has_one_weight for _, down in experts) and counts in ({1}, {2})

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
            return self._products.after_attention(out, mlp.gate_up, mlp.down, next_qkv)
        return super().after_attention(out, mlp, next_qkv)


class GpuKernels(Kernels, Protocol):
    """The kernels that a GPU has in addition."""

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """residual += x, then out = norm(residual) * weight."""
        ...


class GpuProduct(Protocol):
    """A product with a weight of codes, documented in CodedProduct of triton_codes.py."""

    def __call__(self, x: Tensor) -> Tensor: ...
    def in_float(self, x: Tensor) -> Tensor: ...
    def gather_rows(self, token_ids: Tensor) -> Tensor: ...


class GpuProducts(Protocol):
    """Makes products with weights of codes, documented in TritonCodes."""

    def pack(self, weight: CodedWeight, bias: Tensor | None = None) -> GpuProduct: ...
    def experts(
        self,
        router: Router,
        weights: list[CodedExpert],
        gated: Map,
        gather: Map | None,
    ) -> Map: ...


class GpuOps(KernelOps):
    """PyTorch's products, and our own of codes, with fused kernels between them: a sum and the norm
    after it are one.
    """

    _kernels: GpuKernels

    takes_codes = True

    def __init__(self, kernels: GpuKernels, graphs: Graphs | None, products: GpuProducts) -> None:
        """graphs: None: no step is replayed."""
        super().__init__(kernels, graphs)
        self._graphs = graphs
        self._products = products

    def linear(
        self, weight: Weight, bias: Tensor | None = None, norm: Norm | None = None
    ) -> Product:
        if isinstance(weight, Tensor):
            return super().linear(weight, bias, norm)
        return self._normed(norm, self._products.pack(weight, bias))

    def head(self, weight: Weight, norm: Norm | None) -> Product:
        return self.tied(weight, norm)[1]

    def embedding(self, weight: Weight) -> Embed:
        if isinstance(weight, Tensor):
            return super().embedding(weight)
        return self._products.pack(weight).gather_rows

    def tied(self, weight: Weight, norm: Norm | None) -> tuple[Embed, Product]:
        """The head of codes gives the fp32 sums."""
        if isinstance(weight, Tensor):
            return self.embedding(weight), super().head(weight, norm)
        packed = self._products.pack(weight)
        return packed.gather_rows, self._normed(norm, packed.in_float)

    def experts(
        self,
        config: ExpertsConfig,
        experts: Iterable[ExpertWeights],
        router: Router,
        activation: str,
        gather: Map | None = None,
    ) -> Product:
        """Raises ConfigError where PyTorch's grouped product would make the host wait: always, or
        in a graph.
        """
        others, gated = iter(experts), self.gated(activation)
        first = next(others)
        stored: Iterable[ExpertWeights] = chain((first,), others)
        if CodedExpert.of(first) is not None:
            stored = list(stored)  # a layer of them, as codes
            coded = [found for each in stored if (found := CodedExpert.of(each)) is not None]
            if len(coded) == config.count and len({each.formats for each in coded}) == 1:
                return self._products.experts(router, coded, gated, gather)
        if first.up.dtype is not torch.bfloat16:
            raise ConfigError(ON_A_GPU)
        grouped = GroupedExperts(router, stored, config.count, gated, gather)
        if self._graphs is not None and grouped.host_waits:
            raise ConfigError(IN_A_GRAPH)
        return grouped

    def after_attention(
        self, out: Product, mlp: Product, next_qkv: Product | None
    ) -> AfterAttention:
        run = self._unrecorded(out, mlp, next_qkv)
        return run if self._graphs is None else self._graphs.piece(run)

    def beside_attention(
        self, out: Product, mlp: Product, next_qkv: Product | None
    ) -> AfterAttention:
        run = super().beside_attention(out, mlp, next_qkv)
        return run if self._graphs is None else self._graphs.piece(run)

    def _unrecorded(self, out: Product, mlp: Product, next_qkv: Product | None) -> AfterAttention:
        first = mlp.gate_up if isinstance(mlp, MLP) else mlp
        if not isinstance(first, NormedProduct) or not isinstance(next_qkv, NormedProduct | None):
            return super().after_attention(out, mlp, next_qkv)

        def run(x: Tensor, attended: Tensor) -> Tensor:
            summand = self._add(x, out(attended), first)
            if isinstance(mlp, MLP):
                summand = mlp.down(summand)
            return x.add_(summand) if next_qkv is None else self._add(x, summand, next_qkv)

        return run

    def _add(self, x: Tensor, summand: Tensor, then: NormedProduct) -> Tensor:
        """x += summand, in place; then(x). The sum and the norm of `then` are one kernel."""
        norm, normed = then.norm, x.new_empty(x.shape)
        self._kernels.add_rms_norm(x, summand, norm.weight, norm.eps, normed)
        return then.product(normed)

    def to_static_buffer(self, x: Tensor) -> Tensor:
        return x if self._graphs is None else self._graphs.to_static_buffer(x)

    def forget_steps(self) -> None:
        if self._graphs is not None:
            self._graphs.forget_steps()
