"""What a decoder asks for: products and the small operators between them; all of it by PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from nanoengine.context import KVTarget, StepInputs
from nanoengine.models.quant import Quantizer

Norm = tuple[Tensor, float]  # weight and epsilon of an RMSNorm
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


def plain_bridge(out: Product, gate_up: GateUp, down: Product, following: Product | None) -> Bridge:
    """LayerOps.bridge of any products, one after the other."""

    def run(residual: Tensor, attended: Tensor) -> Tensor:
        out.add_to(residual, attended)
        down.add_to(residual, gate_up(residual))
        return residual if following is None else following(residual)

    return run


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
