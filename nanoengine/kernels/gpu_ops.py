"""LayerOps on a GPU: Triton kernels, products of codes, and parts of a step as graphs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor

from nanoengine.errors import ConfigError
from nanoengine.kernels import triton_draw
from nanoengine.kernels.cuda_graph import CudaGraphs
from nanoengine.kernels.kernel_ops import KernelOps
from nanoengine.kernels.triton_codes import TritonCodes
from nanoengine.kernels.triton_kernels import TritonKernels
from nanoengine.kernels.triton_recurrence import recurrence
from nanoengine.models.draw import Draws
from nanoengine.models.experts import (
    IN_A_GRAPH,
    NOT_OF_8_ON_A_GPU,
    ON_A_GPU,
    CodedExpert,
    ExpertWeights,
    GroupedExperts,
    Map,
    MixtureWeights,
    Router,
)
from nanoengine.models.layer_ops import AfterAttention, Recurrence
from nanoengine.models.products import MLP, Embed, Norm, NormedProduct, Product, normed
from nanoengine.models.rules import RecurrentNet
from nanoengine.models.stored_codes import Weight


class GpuOps(KernelOps):
    """PyTorch's products, and our own of codes; a sum and the norm after it are one kernel."""

    _kernels: TritonKernels

    takes_codes = True
    replays_graphs = True

    def __init__(self, graphs: CudaGraphs | None) -> None:
        """graphs: None: no step is replayed."""
        super().__init__(TritonKernels(), graphs)
        self._graphs = graphs
        self._products = TritonCodes()

    def linear(
        self, weight: Weight, bias: Tensor | None = None, norm: Norm | None = None
    ) -> Product:
        if isinstance(weight, Tensor):
            return super().linear(weight, bias, norm)
        return normed(self.rms_norm, norm, self._products.pack(weight, bias))

    def embedding(self, weight: Weight) -> Embed:
        if isinstance(weight, Tensor):
            return super().embedding(weight)
        return self._products.pack(weight).gather_rows

    def tied(self, weight: Weight, norm: Norm | None) -> tuple[Embed, Product]:
        """The head of codes gives the fp32 sums."""
        if isinstance(weight, Tensor):
            return super().tied(weight, norm)
        packed = self._products.pack(weight)
        return packed.gather_rows, normed(self.rms_norm, norm, packed.in_float)

    def experts(
        self, weights: MixtureWeights, router: Router, activation: str, gather: Map | None = None
    ) -> Product:
        """Raises ConfigError where PyTorch's grouped product cannot run, or the host would wait."""
        others, gated = iter(weights.experts), self.gated(activation)
        first, count = next(others), weights.routing.config.count
        stored: Iterable[ExpertWeights] = chain((first,), others)
        if CodedExpert.of(first) is not None:
            stored = list(stored)  # a layer of them, as codes
            coded = [found for each in stored if (found := CodedExpert.of(each)) is not None]
            if len(coded) == count and len({each.formats for each in coded}) == 1:
                return self._products.experts(router, coded, gated, gather)
        if first.up.dtype is not torch.bfloat16:
            raise ConfigError(ON_A_GPU)
        inputs = first.up.shape[1], first.down.shape[1]
        if any(size % 8 for size in inputs):
            raise ConfigError(NOT_OF_8_ON_A_GPU.format(*inputs))
        grouped = GroupedExperts(router, stored, count, gated, gather)
        if self._graphs is not None and grouped.host_waits:
            raise ConfigError(IN_A_GRAPH)
        return grouped

    def recurrence(self, net: RecurrentNet) -> Recurrence:
        return lambda x, state, ctx: recurrence(x, net, state, ctx)

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

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        return triton_draw.draw(logits, draws)

    def to_static_buffer(self, x: Tensor) -> Tensor:
        return x if self._graphs is None else self._graphs.to_static_buffer(x)

    def forget_steps(self) -> None:
        if self._graphs is not None:
            self._graphs.forget_steps()
