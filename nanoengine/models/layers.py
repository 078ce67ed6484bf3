"""The attention layer, which takes its step from the ForwardContext and knows no checkpoint.

Activations are [tokens, features]: the tokens of all sequences laid end to end.
"""

from __future__ import annotations

from torch import Tensor

from nanoengine.context import ForwardContext
from nanoengine.models.layer_ops import LayerOps, Norm


class Attention:
    """Optional norms, rotary embedding, and one call each to the KV cache and backend."""

    def __init__(
        self,
        ops: LayerOps,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        norms: tuple[Norm, Norm] | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """norms: of q and of k, over each head, or over all of them where the weight is as long.
        sinks: as in AttentionBackend.run.
        """
        self._ops = ops
        self._layer = layer
        self._heads = [num_heads, num_kv_heads, num_kv_heads]
        self._norms = norms
        self._sinks = sinks

    def __call__(self, qkv: Tensor, cos: Tensor, sin: Tensor, ctx: ForwardContext) -> Tensor:
        """[tokens, (heads + 2 kv_heads) x head_dim] -> attended values [tokens, heads x head_dim].

        qkv may be overwritten.
        """
        tokens = qkv.shape[0]
        fused = qkv.view(tokens, sum(self._heads), -1)
        q, k, v = fused.split_with_sizes(self._heads, dim=1)
        if self._norms is not None:
            q, k = (self._normed(*each) for each in zip((q, k), self._norms, strict=True))
        target = ctx.kv.target(self._layer)
        q = self._ops.rotate_and_store(q, k, v, cos, sin, target)
        return ctx.attention.run(self._layer, q, ctx, self._sinks).view(tokens, -1)

    def _normed(self, heads: Tensor, norm: Norm) -> Tensor:
        if len(norm.weight) == heads.shape[2]:
            return self._ops.rms_norm(heads, norm)
        return self._ops.rms_norm(heads.flatten(1), norm).view(heads.shape)
