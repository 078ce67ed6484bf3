"""The layers of a decoder, each a small object around its weights. They know the context, no
checkpoint.

Activations are [tokens, features]: the tokens of all sequences laid end to end.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from nanoengine.context import ForwardContext
from nanoengine.models.layer_ops import Head, LayerOps, Norm, Product

Normalize = Callable[[Tensor], Tensor]  # over the last dimension


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
