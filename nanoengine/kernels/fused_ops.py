"""LayerOps by fast kernels: fused operators, packed products on a CPU, graphs on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from nanoengine.context import KVTarget, StepInputs
from nanoengine.kernels.cpu_kernels import CpuKernels
from nanoengine.kernels.cpu_linear import CpuLinear, PackedGateUp, PackedLinear
from nanoengine.models.layer_ops import (
    Bridge,
    GateUp,
    Head,
    Linear,
    Multiply,
    Norm,
    Product,
    TorchOps,
)
from nanoengine.models.quant import Quantizer


class Tape(Protocol):
    """Does again what a step did (CallTape, CudaGraphs)."""

    def run(self, inputs: StepInputs, forward: Callable[[], Tensor]) -> Tensor:
        """See LayerOps.repeat."""
        ...


class Graphs(Tape, Protocol):
    """Does parts of a step again, too (CudaGraphs)."""

    def begin(self, x: Tensor) -> Tensor:
        """See LayerOps."""
        ...

    def piece(self, bridge: Bridge) -> Bridge:
        """The bridge, done as before where `begin` gave its residual stream."""
        ...


class Kernels(Protocol):
    """Small operators that are one call each; as CpuKernels documents them."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...
    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None: ...
    def argmax(self, logits: Tensor) -> Tensor: ...
    def rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, target: KVTarget
    ) -> None: ...


class KernelOps(TorchOps):
    """The fused kernels: one call each instead of five to eight small PyTorch operators."""

    def __init__(
        self, kernels: Kernels, tape: Tape | None, quantizer: Quantizer | None = None
    ) -> None:
        """tape: what does a step again; None: every step is done anew."""
        super().__init__(quantizer)
        self._kernels = kernels
        self._tape = tape

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See LayerOps."""
        out = x.new_empty(x.shape)
        self._kernels.rms_norm(x, weight, eps, out)
        return out

    def rotate_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, target: KVTarget
    ) -> Tensor:
        """See LayerOps."""
        self._kernels.rope_store(q, k, v, cos, sin, target)
        return q

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See LayerOps."""
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._kernels.silu_mul(gate_up, out)
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        """See LayerOps."""
        return self._kernels.argmax(logits)

    def repeat(self, inputs: StepInputs, forward: Callable[[], Tensor]) -> Tensor:
        """See LayerOps."""
        return forward() if self._tape is None else self._tape.run(inputs, forward)


class PackedOps(KernelOps):
    """bfloat16 products by our own kernel, with norm, silu and residual sum fused onto them.

    With a quantizer these are the head and what it leaves.
    """

    def __init__(
        self, kernels: CpuKernels, products: CpuLinear, quantizer: Quantizer | None = None
    ) -> None:
        super().__init__(kernels, kernels.tape, quantizer)
        self._products = products
        self.is_batch_invariant = quantizer is None

    def _linear(
        self, weight: Tensor, bias: Tensor | None, norm: Norm | None, quantized: Multiply | None
    ) -> Product:
        if quantized is not None:
            return super()._linear(weight, bias, norm, quantized)
        return self._products.pack(weight, bias, norm)

    def gate_up(
        self, gate: Tensor, up: Tensor, biases: tuple[Tensor, Tensor] | None, norm: Norm
    ) -> GateUp:
        """See LayerOps."""
        if self._quantizer is not None:
            return super().gate_up(gate, up, biases, norm)
        return self._products.pack_gate_up(gate, up, biases, norm)

    def head(self, weight: Tensor, norm: Norm | None) -> Head:
        """See LayerOps. Gives the fp32 sums: bfloat16 makes ties of what a token depends on."""
        return self._products.pack(weight, None, norm).in_float

    def tied(self, weight: Tensor, norm: Norm | None) -> tuple[Callable[[Tensor], Tensor], Head]:
        """See LayerOps."""
        head = self._products.pack(weight, None, norm)
        return head.gather_rows, head.in_float

    def bridge(
        self, out: Product, gate_up: GateUp, down: Product, following: Product | None
    ) -> Bridge:
        """See LayerOps."""
        if self._quantizer is not None:
            return super().bridge(out, gate_up, down, following)
        assert isinstance(out, PackedLinear) and isinstance(down, PackedLinear)
        assert isinstance(gate_up, PackedGateUp)
        assert following is None or isinstance(following, PackedLinear)
        return self._products.bridge(out, gate_up, down, following)


class GpuKernels(Kernels, Protocol):
    """Those of a GPU."""

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """residual += x, then out = norm(residual) * weight."""
        ...


class GpuLinear(Linear):
    """A product by PyTorch whose norm stands apart, so that a residual sum can be fused with it."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        norm: Norm | None,
        kernels: GpuKernels,
        quantized: Multiply | None = None,
    ) -> None:
        super().__init__(weight, bias, None, quantized)
        self._before = norm
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        """See Product."""
        if self._before is None:
            return super().__call__(x)
        normed = x.new_empty(x.shape)
        self._kernels.rms_norm(x, *self._before, normed)
        return super().__call__(normed)

    def after_sum(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual += x, in place; then self(residual)."""
        assert self._before is not None
        normed = x.new_empty(x.shape)
        self._kernels.add_rms_norm(residual, x, *self._before, normed)
        return super().__call__(normed)


class GpuGateUp:
    """Gate and up in one product, then silu and their product."""

    def __init__(self, both: GpuLinear, silu_mul: Callable[[Tensor], Tensor]) -> None:
        self._both = both
        self._silu_mul = silu_mul

    def __call__(self, x: Tensor) -> Tensor:
        """See GateUp."""
        return self._silu_mul(self._both(x))

    def after_sum(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual += x, in place; then self(residual)."""
        return self._silu_mul(self._both.after_sum(residual, x))


class GpuOps(KernelOps):
    """PyTorch's products, and fused kernels between them: a residual sum and the norm after it are
    one.
    """

    _kernels: GpuKernels

    def __init__(
        self, kernels: GpuKernels, graphs: Graphs | None, quantizer: Quantizer | None = None
    ) -> None:
        """graphs: None: every step is done anew."""
        super().__init__(kernels, graphs, quantizer)
        self._graphs = graphs

    def _linear(
        self, weight: Tensor, bias: Tensor | None, norm: Norm | None, quantized: Multiply | None
    ) -> GpuLinear:
        return GpuLinear(weight, bias, norm, self._kernels, quantized)

    def gate_up(
        self, gate: Tensor, up: Tensor, biases: tuple[Tensor, Tensor] | None, norm: Norm
    ) -> GpuGateUp:
        """See LayerOps."""
        bias = None if biases is None else torch.cat(biases)
        both = self.linear(torch.cat((gate, up)), bias, norm)
        assert isinstance(both, GpuLinear)
        return GpuGateUp(both, self.silu_mul)

    def bridge(
        self, out: Product, gate_up: GateUp, down: Product, following: Product | None
    ) -> Bridge:
        """See LayerOps."""
        assert isinstance(gate_up, GpuGateUp)
        assert following is None or isinstance(following, GpuLinear)

        def run(residual: Tensor, attended: Tensor) -> Tensor:
            fed = down(gate_up.after_sum(residual, out(attended)))
            return residual.add_(fed) if following is None else following.after_sum(residual, fed)

        return run if self._graphs is None else self._graphs.piece(run)

    def begin(self, x: Tensor) -> Tensor:
        """See LayerOps."""
        return x if self._graphs is None else self._graphs.begin(x)
