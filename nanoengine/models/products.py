"""Products that a decoder is built of, in PyTorch, and those put together from other products.

layer_ops.py makes them; kernels have their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

# [tokens, in_features] -> [tokens, out_features], the norm, bias and activation included.
Product = Callable[[Tensor], Tensor]
Embed = Callable[[Tensor], Tensor]  # int64 [tokens] -> [tokens, hidden]
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
    dtype of the weight. So with a weight in fp32 only the result is rounded. bias: LayerNorm's; of
    the dtype of the weight.
    """

    weight: Tensor
    eps: float
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Ends:
    """embed: token ids -> embeddings, as the first layer gets them. normed: what the last layer
    gives -> what the output head sees.
    """

    embed: Embed
    normed: Product


@dataclass(frozen=True, slots=True)
class Tiles:
    """The order of heads in a weight's inputs: so many tiles, each with one head of every group.

    Activations have the heads of a group, `count`, side by side. size: numbers of a head.
    """

    count: int
    size: int


RmsNorm = Callable[[Tensor, Norm], Tensor]
Copy = Callable[[Tensor, Tensor], None]


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


def normed(rms_norm: RmsNorm, norm: Norm | None, product: Product) -> Product:
    """product(norm(x)), or product(x). rms_norm: LayerOps'."""
    return product if norm is None else NormedProduct(rms_norm, norm, product)


class NormedProduct:
    """product(norm(x)), with the two kept apart: a kernel may add to x and normalise it at once."""

    def __init__(self, rms_norm: RmsNorm, norm: Norm, product: Product) -> None:
        self._rms_norm, self.norm, self.product = rms_norm, norm, product

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features]."""
        return self.product(self._rms_norm(x, self.norm))


class TiledProduct:
    """product(x), whose weight has the order of `tiles`. A kernel may fuse the product alone."""

    def __init__(self, copy: Copy, tiles: Tiles, product: Product) -> None:
        """copy: LayerOps'."""
        self._copy, self._tiles, self.product = copy, tiles, product

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in_features] -> [tokens, out_features]."""
        return self.product(self.tiled(x))

    def tiled(self, x: Tensor) -> Tensor:
        """A copy of x, [tokens, in_features], in the order of the weight."""
        count, size = self._tiles.count, self._tiles.size
        groups = x.view(len(x), x.shape[1] // (count * size), count, size)
        tiles, made = groups.transpose(1, 2), x.new_empty(x.shape)
        self._copy(made.view(tiles.shape), tiles)
        return made


@dataclass(frozen=True, slots=True)
class MLP:
    """down(gate_up(x)), of which a kernel may fuse the parts."""

    gate_up: Product
    down: Product

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return self.down(self.gate_up(x))


def num_runs(head: Product) -> int:
    """The runs of token ids that logits may be asked for alone; 0: only those of all tokens."""
    return head.num_runs if isinstance(head, PartedHead) else 0


def head_logits(head: Product, x: Tensor, runs: Tensor | None) -> Tensor:
    """The logits of all tokens, or, of a PartedHead, of `runs`."""
    if runs is None or not isinstance(head, PartedHead):
        return head(x)
    return head.of_runs(x, runs)
