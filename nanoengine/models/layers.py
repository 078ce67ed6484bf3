"""The layers of a decoder, each a small object around its weights. They know the context, no
checkpoint.

Activations are [tokens, features]: the tokens of all sequences laid end to end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from nanoengine.context import ForwardContext, KVTarget, StepInputs
from nanoengine.kernels.cpu_kernels import CpuKernels
from nanoengine.kernels.cpu_linear import CpuLinear, PackedGateUp, PackedLinear
from nanoengine.models.quant import Quantizer

Norm = tuple[Tensor, float]  # weight and epsilon of an RMSNorm
Normalize = Callable[[Tensor], Tensor]  # over the last dimension
Multiply = Callable[[Tensor], Tensor]  # x -> x @ weight.T
Head = Callable[[Tensor], Tensor]  # residual stream -> logits
GateUp = Callable[[Tensor], Tensor]  # x -> act(gate(norm(x))) * up(norm(x))
# (residual, attended) -> following(residual); the residual stream, added to, where nothing follows.
Bridge = Callable[[Tensor, Tensor], Tensor]


class Product(Protocol):
    """norm(x) @ weight.T + bias; the norm and the bias where it was made with them."""

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features]."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """residual += self(x) in place, the product rounded first."""
        ...


class LayerOps(Protocol):
    """Makes the products of a model and does the small operators between them."""

    @property
    def is_batch_invariant(self) -> bool:
        """Whether the bits of a row depend on that row alone."""
        ...

    def linear(
        self, weight: Tensor, bias: Tensor | None = None, norm: Norm | None = None
    ) -> Product:
        """weight is [out_features, in_features]."""
        ...

    def gate_up(
        self, gate: Tensor, up: Tensor, biases: tuple[Tensor, Tensor] | None, norm: Norm
    ) -> GateUp:
        """x -> silu(gate(x)) * up(x), both of norm(x), in one product."""
        ...

    def head(self, weight: Tensor, norm: Norm | None) -> Head:
        """The product that gives the logits; its weight is never quantised."""
        ...

    def tied(self, weight: Tensor, norm: Norm | None) -> tuple[Callable[[Tensor], Tensor], Head]:
        """Token ids -> rows of the weight, and the head with the same weight, held once."""
        ...

    def bridge(
        self, out: Product, gate_up: GateUp, down: Product, following: Product | None
    ) -> Bridge:
        """All between two attentions: `out` of the attended values and the gated feed-forward, down
        of gate_up (arXiv 2002.05202), each added to the residual stream; then the product that
        follows, if any.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension; x is [tokens, dim] or [tokens, heads, dim].

        Statistics in fp32; the weight is applied after rounding, as transformers does
        (arXiv 1910.07467).
        """
        ...

    def rotate_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, target: KVTarget
    ) -> Tensor:
        """Turn the pairs (i, i + head_dim / 2) of q and k, store k and v, and return q.

        q, k and v are [tokens, heads, head_dim]; q and k may be overwritten.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [tokens, 2 * dim]."""
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """[rows, vocab] -> int64 [rows]: the first place of the largest value, NaN above all."""
        ...

    def repeat(self, inputs: StepInputs, forward: Callable[[], Tensor]) -> Tensor:
        """forward(), which reads `inputs`; it may be done as in the step before on their values.

        What it returns is overwritten by the next step.
        """
        ...

    def begin(self, x: Tensor) -> Tensor:
        """The residual stream x of a step that is not repeated, maybe at another place, where the
        next step overwrites it.
        """
        ...


class Linear:
    """A product by PyTorch. On a CPU bfloat16 weights are reordered once into oneDNN's layout."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        norm: Callable[[Tensor], Tensor] | None = None,
        quantized: Multiply | None = None,
    ) -> None:
        """quantized: the product with the weight, quantised, which takes its place."""
        self._bias = bias
        self._norm = norm
        self._quantized = quantized
        if quantized is not None:
            return
        self._packed = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """See Product."""
        if self._norm is not None:
            x = self._norm(x)
        if self._quantized is not None:
            product = self._quantized(x)
            return product if self._bias is None else product.add_(self._bias)
        if self._packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return out
        return functional.linear(x, self._weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """See Product."""
        residual += self(x)


class TorchOps:
    """Plain PyTorch: runs anywhere."""

    is_batch_invariant = False

    def __init__(self, quantizer: Quantizer | None = None) -> None:
        """quantizer: what the weights of the layers are given to; None: they stay as they are."""
        self._quantizer = quantizer

    def linear(
        self, weight: Tensor, bias: Tensor | None = None, norm: Norm | None = None
    ) -> Product:
        """See LayerOps."""
        quantized = None if self._quantizer is None else self._quantizer.product(weight)
        return self._linear(weight, bias, norm, quantized)

    def head(self, weight: Tensor, norm: Norm | None) -> Head:
        """See LayerOps."""
        return self._linear(weight, None, norm, None)

    def _linear(
        self, weight: Tensor, bias: Tensor | None, norm: Norm | None, quantized: Multiply | None
    ) -> Product:
        if norm is None:
            return Linear(weight, bias, None, quantized)
        norm_weight, eps = norm
        return Linear(weight, bias, lambda x: self.rms_norm(x, norm_weight, eps), quantized)

    def gate_up(
        self, gate: Tensor, up: Tensor, biases: tuple[Tensor, Tensor] | None, norm: Norm
    ) -> GateUp:
        """See LayerOps."""
        both = self.linear(
            torch.cat((gate, up)), None if biases is None else torch.cat(biases), norm
        )
        return lambda x: self.silu_mul(both(x))

    def tied(self, weight: Tensor, norm: Norm | None) -> tuple[Callable[[Tensor], Tensor], Head]:
        """See LayerOps. A weight that oneDNN reorders is kept twice."""
        return functools.partial(torch.embedding, weight), self.head(weight, norm)

    def bridge(
        self, out: Product, gate_up: GateUp, down: Product, following: Product | None
    ) -> Bridge:
        """See LayerOps."""
        return plain_bridge(out, gate_up, down, following)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See LayerOps."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * (wide * scale).to(x.dtype)

    def rotate_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, target: KVTarget
    ) -> Tensor:
        """See LayerOps."""
        target.store(_rotate(k, cos, sin), v)
        return _rotate(q, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See LayerOps."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def argmax(self, logits: Tensor) -> Tensor:
        """See LayerOps."""
        return logits.argmax(dim=-1)

    def repeat(self, inputs: StepInputs, forward: Callable[[], Tensor]) -> Tensor:
        """See LayerOps."""
        return forward()

    def begin(self, x: Tensor) -> Tensor:
        """See LayerOps."""
        return x


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


def plain_bridge(out: Product, gate_up: GateUp, down: Product, following: Product | None) -> Bridge:
    """LayerOps.bridge of any products, one after the other."""

    def run(residual: Tensor, attended: Tensor) -> Tensor:
        out.add_to(residual, attended)
        down.add_to(residual, gate_up(residual))
        return residual if following is None else following(residual)

    return run


class OffsetNorm:
    """x / rms(x) * (1 + weight), Gemma's RMSNorm: in fp32 throughout and rounded once, at the end.

    As 1 + weight is kept in fp32, a 16-bit model loses nothing of a small weight, and this is what
    transformers computes but for the order of the sum of squares. Nothing is fused with it.
    """

    def __init__(self, ops: LayerOps, norm: Norm) -> None:
        """norm: with the weight as stored, 1 not yet added."""
        weight, self._eps = norm
        self._weight = weight.float() + 1
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, dim] or [tokens, heads, dim], as the result."""
        return self._ops.rms_norm(x.float(), self._weight, self._eps).to(x.dtype)


class NormedProduct:
    """A product, and norms apart from it: of what goes in, of what comes out."""

    def __init__(
        self,
        product: Product | Head,
        before: Normalize | None = None,
        after: Normalize | None = None,
    ) -> None:
        self._product, self._before, self._after = product, before, after

    def __call__(self, x: Tensor) -> Tensor:
        """See Product."""
        out = self._product(x if self._before is None else self._before(x))
        return out if self._after is None else self._after(out)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """See Product."""
        residual += self(x)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up of [tokens, 2 * dim]; GELU by its formula with tanh (arXiv 1606.08415)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


class Attention:
    """Optional per-head norms, rotary embedding, and one call each to the KV cache and backend."""

    def __init__(
        self,
        ops: LayerOps,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_norms: tuple[Normalize, Normalize] | None = None,
    ) -> None:
        """head_norms: over each head of q and of k."""
        self._ops = ops
        self._layer = layer
        self._heads = [num_heads, num_kv_heads, num_kv_heads]
        self._head_norms = head_norms

    def __call__(self, qkv: Tensor, cos: Tensor, sin: Tensor, ctx: ForwardContext) -> Tensor:
        """[tokens, (heads + 2 kv_heads) x head_dim] -> attended values [tokens, heads x head_dim].

        qkv may be overwritten.
        """
        tokens = qkv.shape[0]
        fused = qkv.view(tokens, sum(self._heads), -1)
        q, k, v = fused.split_with_sizes(self._heads, dim=1)
        if self._head_norms is not None:
            q_norm, k_norm = self._head_norms
            q, k = q_norm(q), k_norm(k)
        target = ctx.kv.target(self._layer)
        q = self._ops.rotate_and_store(q, k, v, cos, sin, target)
        return ctx.attention.run(self._layer, q, ctx).view(tokens, -1)
