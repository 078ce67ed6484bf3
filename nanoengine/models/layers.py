"""The attention layer, which takes its step from the ForwardContext and knows no checkpoint.

Activations are [tokens, features]: the tokens of all sequences laid end to end.
"""

from __future__ import annotations

from torch import Tensor

from nanoengine.context import ForwardContext
from nanoengine.models.layer_ops import LayerOps, Norm


class Attention:
    """Optional per-head norms, rotary embedding, and one call each to the KV cache and backend."""

    def __init__(
        self,
        ops: LayerOps,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_norms: tuple[Norm, Norm] | None = None,
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
            q, k = self._ops.rms_norm(q, q_norm), self._ops.rms_norm(k, k_norm)
        target = ctx.kv.target(self._layer)
        q = self._ops.rotate_and_store(q, k, v, cos, sin, target)
        return ctx.attention.run(self._layer, q, ctx).view(tokens, -1)
