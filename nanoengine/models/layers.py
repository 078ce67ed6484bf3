"""Attention, and what recurrent layers have in its place. They take their step from the
ForwardContext and know no checkpoint.

Activations are [tokens, features]: the tokens of all sequences laid end to end.
"""

from __future__ import annotations

from torch import Tensor

from nanoengine.context import ForwardContext
from nanoengine.models.delta_net import DeltaNet
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
        has_gate: bool = False,
    ) -> None:
        """layer: counted among those with KV. norms: of q and of k, over each head, or over all of
        them where the weight is as long. has_gate: a gate for each head follows v.
        """
        self._ops = ops
        self._layer = layer
        self._heads = [num_heads, num_kv_heads, num_kv_heads, *[num_heads] * has_gate]
        self._norms = norms

    def __call__(self, qkv: Tensor, cos: Tensor, sin: Tensor, ctx: ForwardContext) -> Tensor:
        """[tokens, (heads + 2 kv_heads) x head_dim] -> attended values [tokens, heads x head_dim].

        With a gate there are `heads` more. qkv may be overwritten.
        """
        tokens = qkv.shape[0]
        fused = qkv.view(tokens, sum(self._heads), -1)
        q, k, v, *gates = fused.split_with_sizes(self._heads, dim=1)
        if self._norms is not None:
            q, k = (self._normed(*each) for each in zip((q, k), self._norms, strict=True))
        target = ctx.kv.target(self._layer)
        q = self._ops.rotate_and_store(q, k, v, cos, sin, target)
        attended = ctx.attention.run(self._layer, q, ctx).view(tokens, -1)
        return self._ops.sigmoid_mul(attended, gates[0]) if gates else attended

    def _normed(self, heads: Tensor, norm: Norm) -> Tensor:
        if len(norm.weight) == heads.shape[2]:
            return self._ops.rms_norm(heads, norm)
        return self._ops.rms_norm(heads.flatten(1), norm).view(heads.shape)


class DeltaLayer:
    """A gated delta rule over the state of each sequence."""

    def __init__(self, ops: LayerOps, layer: int, net: DeltaNet) -> None:
        """layer: counted among the recurrent ones."""
        self._ops, self._layer, self._net = ops, layer, net

    def __call__(self, projected: Tensor, cos: Tensor, sin: Tensor, ctx: ForwardContext) -> Tensor:
        """[tokens, sum(net.sizes)] -> [tokens, value_heads x value_dim]. Nothing is rotated."""
        return self._ops.gated_delta(projected, self._net, ctx.kv.state(self._layer), ctx)
