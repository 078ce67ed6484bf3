"""LayerOps on a GPU: Triton kernels, products of codes, and parts of a step as graphs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from nanoengine.errors import ConfigError
from nanoengine.kernels.cuda_graph import CudaGraphs
from nanoengine.kernels.kernel_ops import KernelOps, Kernels
from nanoengine.models.experts import (
    IN_A_GRAPH,
    ON_A_GPU,
    CodedExpert,
    ExpertWeights,
    GroupedExperts,
    Map,
    MixtureWeights,
    Router,
)
from nanoengine.models.layer_ops import (
    MLP,
    AfterAttention,
    Embed,
    Norm,
    NormedProduct,
    Product,
    normed,
)
from nanoengine.models.stored_codes import CodedWeight, Weight


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
        self, router: Router, weights: list[CodedExpert], gated: Map, gather: Map | None
    ) -> Map: ...


class GpuOps(KernelOps):
    """PyTorch's products, and our own of codes, with fused kernels between them: a sum and the norm
    after it are one.
    """

    _kernels: GpuKernels

    takes_codes = True

    def __init__(
        self, kernels: GpuKernels, graphs: CudaGraphs | None, products: GpuProducts
    ) -> None:
        """graphs: None: no step is replayed."""
        super().__init__(kernels, graphs)
        self._graphs = graphs
        self._products = products

    def linear(
        self, weight: Weight, bias: Tensor | None = None, norm: Norm | None = None
    ) -> Product:
        if isinstance(weight, Tensor):
            return super().linear(weight, bias, norm)
        return normed(self, norm, self._products.pack(weight, bias))

    def embedding(self, weight: Weight) -> Embed:
        if isinstance(weight, Tensor):
            return super().embedding(weight)
        return self._products.pack(weight).gather_rows

    def tied(self, weight: Weight, norm: Norm | None) -> tuple[Embed, Product]:
        """The head of codes gives the fp32 sums."""
        if isinstance(weight, Tensor):
            return super().tied(weight, norm)
        packed = self._products.pack(weight)
        return packed.gather_rows, normed(self, norm, packed.in_float)

    def experts(
        self, weights: MixtureWeights, router: Router, activation: str, gather: Map | None = None
    ) -> Product:
        """Raises ConfigError where PyTorch's grouped product would make the host wait: always, or
        in a graph.
        """
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
        grouped = GroupedExperts(router, stored, count, gated, gather)
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
