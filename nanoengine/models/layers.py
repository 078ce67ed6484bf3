"""Attention, and what recurrent layers have in its place. They take their step from the
ForwardContext and know no checkpoint.

Activations are [tokens, features]: the tokens of all sequences laid end to end.
"""

from __future__ import annotations

from torch import Tensor

from nanoengine.config.model import LatentConfig
from nanoengine.context import ForwardContext
from nanoengine.models.architecture import HeadGate
from nanoengine.models.delta_net import KimiNet
from nanoengine.models.layer_ops import LayerOps
from nanoengine.models.products import Embed, Norm, Product
from nanoengine.models.rope import Angles
from nanoengine.models.rules import RecurrentNet


class Attention:
    """Optional norms, rotary embedding, and one call each to the KV cache and backend."""

    def __init__(
        self,
        ops: LayerOps,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        norms: tuple[Norm, ...] = (),
        norms_turned: bool = False,
        has_gate: bool = False,
        sinks: Tensor | None = None,
        values_are_keys: bool = False,
        factor: float = 1.0,
        head_gate: HeadGate = "",
    ) -> None:
        """layer: counted among those with attention. norms: of q, of k and perhaps of v, over each
        head, or over all of them where the weight is as long. norms_turned: those come after the
        rotation; then angles have those of no rotation, too. has_gate: a gate for each head follows
        v; head_gate: a number for each head does, as in Architecture. sinks: as in
        AttentionBackend.run. values_are_keys: v is not there, but is k. factor: of what is attended
        to.
        """
        self._ops = ops
        self._layer = layer
        num_kv = 1 if values_are_keys else 2
        self._heads = [num_heads, *[num_kv_heads] * num_kv, *[num_heads] * has_gate]
        self._values_are_keys = values_are_keys
        self._norms, self._norms_turned = norms, norms_turned
        self._sinks, self._factor = sinks, factor
        self._head_gate = head_gate

    def __call__(self, qkv: Tensor, angles: Angles, ctx: ForwardContext) -> Tensor:
        """[tokens, (heads + 2 kv_heads) x head_dim] -> attended values [tokens, heads x head_dim].

        With a gate there are `heads` more, or `heads` numbers more. qkv may be overwritten.
        """
        cos, sin, *of_queries = angles
        tokens, of_heads = qkv.shape[0], None
        if self._head_gate:
            num_heads = self._heads[0]
            qkv, of_heads = qkv.split_with_sizes([qkv.shape[1] - num_heads, num_heads], dim=1)
        fused = qkv.view(tokens, sum(self._heads), -1)
        q, k, *others = fused.split_with_sizes(self._heads, dim=1)
        v, *gates = [k, *others] if self._values_are_keys else others
        if self._norms_turned:
            q, k = self._ops.rotate(q, cos, sin), self._ops.rotate(k, cos, sin)
            (cos, sin), of_queries = of_queries, []
        if self._norms:
            heads = q, k, v
            q, k, v = *map(self._normed, heads, self._norms), *heads[len(self._norms) :]
        target = ctx.kv.target(self._layer)
        q = self._ops.rotate_and_store(q, k, v, cos, sin, target)
        if of_queries:
            q = self._ops.rotate(q, *of_queries)
        attended = ctx.attention.run(self._layer, q, ctx, self._sinks).view(tokens, -1)
        if self._factor != 1:
            self._ops.scale(attended, self._factor)
        if of_heads is not None and self._head_gate == "softplus":
            self._ops.softplus_heads(attended, of_heads)
        elif of_heads is not None:
            return gated_heads(self._ops, attended, of_heads)
        return self._ops.sigmoid_mul(attended, gates[0]) if gates else attended

    def _normed(self, heads: Tensor, norm: Norm) -> Tensor:
        is_of_each = len(norm.weight) == heads.shape[2]
        return (self._ops.rms_norm if is_of_each else self._ops.rms_norm_of_all)(heads, norm)


class StoredOnly:
    """What attends to nothing, where nobody wants what a layer gives (context.AttentionBackend)."""

    name, can_replay, is_batch_invariant = "none", False, True

    def reserve(self, lengths: tuple[tuple[int, int], ...]) -> bool:
        """False: it needs none."""
        return False

    def run(
        self, layer: int, q: Tensor, ctx: ForwardContext, sinks: Tensor | None = None
    ) -> Tensor:
        """q, once the copies that the layer would read have come to their end."""
        for _chunk in ctx.kv.read(layer):
            pass
        return q


def gated_heads(ops: LayerOps, attended: Tensor, gates: Tensor) -> Tensor:
    """[tokens, heads x dim], and gates [tokens, heads], by the sigmoids of which heads are
    multiplied.
    """
    of_each = attended.new_empty(*gates.shape, attended.shape[1] // gates.shape[1])
    ops.copy(of_each, gates.view(*gates.shape, 1))
    return ops.sigmoid_mul(attended, of_each)


class SharedKVAttention:
    """Attention over the keys and values that an earlier layer has stored."""

    def __init__(self, ops: LayerOps, layer: int, num_heads: int, norm: Norm) -> None:
        """layer: counted among those with attention. norm: of each head of q."""
        self._ops, self._layer, self._num_heads, self._norm = ops, layer, num_heads, norm

    def __call__(self, q: Tensor, angles: Angles, ctx: ForwardContext) -> Tensor:
        """[tokens, heads x head_dim] -> attended values of that shape."""
        heads = self._ops.rms_norm(q.view(len(q), self._num_heads, -1), self._norm)
        rotated = self._ops.rotate(heads, *angles)
        return ctx.attention.run(self._layer, rotated, ctx).view(q.shape)


class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), absorbed: a head's query goes to
    the latent space, where the one row of a token is its key and, but for the rotated part, its
    value; what a head attends to comes back from there.

    A row is [turned, latent, turned, latent], the halves of each, so that the pairs of the rotation
    are (i, i + row_dim / 2); it leaves the pairs of the latent as they are.
    """

    def __init__(
        self,
        ops: LayerOps,
        layer: int,
        num_heads: int,
        shape: LatentConfig,
        query: Product | None,
        norm: Norm,
        to_row: Product,
        from_row: Product,
        *,
        has_head_gate: bool,
    ) -> None:
        """layer: counted among those with attention. query: from its vector, the norm included;
        None: queries are there. norm: of the latent. to_row, from_row: LayerOps.per_head; the first
        gives zeros, the second multiplies by zeros where rows are turned. has_head_gate: qkv ends
        with a number of each head, by whose sigmoid what it gives is multiplied.
        """
        self._ops, self._layer, self._num_heads, self._shape = ops, layer, num_heads, shape
        self._query, self._norm, self._to_row, self._from_row = query, norm, to_row, from_row
        self._num_gates = num_heads if has_head_gate else 0

    def __call__(self, qkv: Tensor, angles: Angles, ctx: ForwardContext) -> Tensor:
        """[tokens, q_rank or heads x query_dim, + row_dim, + gates] -> values of that many heads,
        [tokens, heads x value_dim].
        """
        cos, sin, *of_queries = angles
        shape, tokens, num_gates = self._shape, len(qkv), self._num_gates
        sizes = qkv.shape[1] - shape.row_dim - num_gates, shape.kv_rank, shape.rope_dim, num_gates
        q, latent, turned, gates = qkv.split_with_sizes(sizes, dim=1)
        if self._query is not None:
            q = self._query(q)
        q = q.view(tokens, self._num_heads, shape.query_dim)
        rows = self._to_row(q[..., : shape.nope_dim])
        self._set_turned(rows, q[..., shape.nope_dim :])
        k = qkv.new_empty(tokens, 1, shape.row_dim)
        self._set_turned(k, turned.view(tokens, 1, -1))
        latent = self._ops.rms_norm(latent, self._norm)
        self._ops.copy(
            k.view(tokens, 2, -1)[..., shape.rope_dim // 2 :], latent.view(tokens, 2, -1)
        )
        target = ctx.kv.target(self._layer)
        rows = self._ops.rotate_and_store(rows, k, k, cos, sin, target)
        if of_queries:
            rows = self._ops.rotate(rows, *of_queries)
        attended = ctx.attention.run(self._layer, rows, ctx)
        made = self._from_row(attended.view(rows.shape)).view(tokens, -1)
        return gated_heads(self._ops, made, gates) if num_gates else made

    def _set_turned(self, rows: Tensor, turned: Tensor) -> None:
        """The part of rows [tokens, heads, row_dim] that is turned: [tokens, heads, rope_dim]."""
        halves = (*rows.shape[:2], 2, -1)
        self._ops.copy(rows.view(halves)[..., : turned.shape[2] // 2], turned.view(halves))


class RecurrentLayer:
    """A recurrent rule over the state of each sequence."""

    def __init__(self, ops: LayerOps, layer: int, net: RecurrentNet) -> None:
        """layer: counted among the recurrent ones."""
        self._ops, self._layer, self._run = ops, layer, ops.recurrence(net)

    def __call__(self, projected: Tensor, angles: Angles, ctx: ForwardContext) -> Tensor:
        """[tokens, sum(shape.sizes)] -> [tokens, value_heads x value_dim]. Nothing is rotated."""
        return self._run(projected, ctx.kv.state(self._layer), ctx)


AnyAttention = Attention | SharedKVAttention | LatentAttention | RecurrentLayer


class KimiLayer(RecurrentLayer):
    """The same, whose decays and gate are products of two short vectors."""

    def __init__(
        self, ops: LayerOps, layer: int, net: KimiNet, decays: Product, gate: Product
    ) -> None:
        super().__init__(ops, layer, net)
        self._shape, self._decays, self._gate = net.shape, decays, gate

    def __call__(self, projected: Tensor, angles: Angles, ctx: ForwardContext) -> Tensor:
        """[tokens, channels + heads + key_dim + value_dim] -> [tokens, heads x value_dim]."""
        shape = self._shape
        mixed, shares, decays, gate = projected.split_with_sizes(
            [shape.channels, shape.num_value_heads, shape.key_dim, shape.value_dim], dim=1
        )
        x = projected.new_empty(len(projected), sum(shape.sizes))
        parts = mixed, self._gate(gate), shares, self._decays(decays)
        for target, part in zip(x.split_with_sizes(shape.sizes, dim=1), parts, strict=True):
            self._ops.copy(target, part)
        return super().__call__(x, angles, ctx)


class MixerBeside:
    """A recurrent layer that has attention beside it (Falcon-H1, arXiv 2507.22448)."""

    def __init__(self, ops: LayerOps, width: int, mixer: RecurrentLayer, out: Product) -> None:
        """width: of qkv, before which the mixer's projection does not begin."""
        self._ops, self._width, self._mixer, self._out = ops, width, mixer, out

    def __call__(self, x: Tensor, projected: Tensor, angles: Angles, ctx: ForwardContext) -> Tensor:
        """[tokens, width + sum(shape.sizes)] -> qkv. Adds what the mixer gives to x, in place."""
        sizes = self._width, projected.shape[1] - self._width
        qkv, mixed = projected.split_with_sizes(sizes, dim=1)
        self._ops.accumulate(x, self._out(self._mixer(mixed, angles, ctx)))
        return qkv


class LayerInputs:
    """A vector for each layer and token: of its id, and of its embedding (Gemma 3n's and 4's
    per-layer embeddings).
    """

    def __init__(self, ops: LayerOps, embed: Embed, project: Product, norm: Norm) -> None:
        """embed, project: give [tokens, layers x size], of ids and of embeddings."""
        self._ops, self._embed, self._project, self._norm = ops, embed, project, norm

    def __call__(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """int64 [tokens] and their embeddings [tokens, hidden] -> [tokens, layers, size]. A rank
        has some layers' `embed` and `project`, and gets its columns of all layers' inputs.
        """
        shape = len(x), -1, len(self._norm.weight)
        projected = self._project(x).mul_(x.shape[1] ** -0.5).view(shape)
        of_ids = self._embed(token_ids).view(shape)
        made = self._ops.rms_norm(projected, self._norm).add_(of_ids).mul_(2**-0.5)
        return self._ops.exchange(made)


class InputGate:
    """What a layer makes of its vector of LayerInputs."""

    def __init__(self, ops: LayerOps, gate: Product, gated: Product, project: Product) -> None:
        """gated: [tokens, 2 x size] -> activation(first half) * second half."""
        self._ops, self._gate, self._gated, self._project = ops, gate, gated, project

    def __call__(self, x: Tensor, given: Tensor) -> Tensor:
        """[tokens, hidden] and [tokens, size] -> [tokens, hidden], to be added to x."""
        both = given.new_empty(len(given), 2, given.shape[1])
        self._ops.copy(both[:, 0], self._gate(x))
        self._ops.copy(both[:, 1], given)
        return self._project(self._gated(both.view(len(given), -1)))


class LayerEnd:
    """What some models do after a layer's feed-forward, in place:

    x = x + gate(x, given)  # if they have LayerInputs
    x = x * scalar
    """

    def __init__(
        self, ops: LayerOps, gate: InputGate | None, scalar: float, next_qkv: Product | None
    ) -> None:
        self._ops, self._gate, self._scalar, self._next_qkv = ops, gate, scalar, next_qkv

    def __call__(self, x: Tensor, given: Tensor | None) -> Tensor:
        """x and the layer's inputs -> the next layer's qkv, or x after the last layer."""
        if self._gate is not None and given is not None:
            self._ops.accumulate(x, self._gate(x, given))
        self._ops.scale(x, self._scalar)
        return x if self._next_qkv is None else self._next_qkv(x)
