"""LayerOps of a rank: products of its outputs, and a gather where the whole is needed.

    attended (this rank's heads) -> gather -> out (this rank's rows) -> gather -> added to x
    gate_up (this rank's rows) -> gather -> down (this rank's rows) -> gather -> added to x

All experts of a layer go through the second line at once: a gather has a row for each choice of
each row, so its size is the same whichever experts were chosen.

Gathers move data and compute nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nanoengine.config.model import ModelConfig
from nanoengine.context import ReplayKey
from nanoengine.models.experts import Map, MixtureWeights, Router, Routing
from nanoengine.models.layer_ops import LayerOps
from nanoengine.models.products import Embed, Norm, Product, Tiles
from nanoengine.models.shard import Shard
from nanoengine.models.stored_codes import CodedWeight, Weight
from nanoengine.workers.group import Group


class ShardedOps:
    """Makes the products of a rank from the operations of one process."""

    def __init__(self, ops: LayerOps, shard: Shard, group: Group, model: ModelConfig) -> None:
        """model: the shape of the whole model."""
        self._ops = ops
        self._shard = shard
        self._all = [Shard(rank, shard.size) for rank in range(shard.size)]
        self._group = group
        self._model = model
        self._copied_bytes = 0  # rows of embeddings that the head holds once more
        self.is_batch_invariant = ops.is_batch_invariant
        self.takes_codes, self.packs = ops.takes_codes, ops.packs
        self.replays_graphs = ops.replays_graphs
        # A rank does these as one process does, with its own part.
        self.linear, self.gate_up, self.per_head = ops.linear, ops.gate_up, ops.per_head
        self.embedding, self.router = ops.embedding, ops.router
        self.copy, self.scale, self.accumulate = ops.copy, ops.scale, ops.accumulate
        self.after_attention = ops.after_attention
        self.beside_attention = ops.beside_attention
        self.layer_norm, self.rms_norm = ops.layer_norm, ops.rms_norm
        self.gated, self.activated = ops.gated, ops.activated
        self.rotate, self.rotate_and_store = ops.rotate, ops.rotate_and_store
        self.sigmoid_mul, self.softplus_heads = ops.sigmoid_mul, ops.softplus_heads
        self.recurrence = ops.recurrence
        self.argmax, self.likeliest, self.draw = ops.argmax, ops.likeliest, ops.draw
        self.forget_steps = ops.forget_steps

    @property
    def saved_bytes(self) -> int:
        return self._ops.saved_bytes - self._copied_bytes

    def whole(self, weight: Weight) -> Product:
        product, gather = self._ops.whole(weight), self._group.gather
        outputs = self._shard.widths(self._model.hidden_size)
        return lambda x: gather(product(x), outputs)

    def summand(
        self, weight: Weight, bias: Tensor | None = None, tiles: Tiles | None = None
    ) -> Product:
        """Its input is this rank's part, its result is whole. A tile has heads of all ranks."""
        product, gather = self._ops.summand(weight, bias, tiles), self._group.gather
        inputs = self._shard.widths(weight.shape[1])
        outputs = self._shard.widths(self._model.hidden_size)
        return lambda x: gather(product(gather(x, inputs)), outputs)

    def head(self, weight: Weight, norm: Norm | None) -> Product:
        """Its result is whole on rank 0, and empty on others."""
        product, gather = self._ops.head(weight, norm), self._group.gather_to_first
        outputs = self._shard.widths(self._model.vocab_size)

        def run(x: Tensor) -> Tensor:
            logits = gather(product(x), outputs)
            return x.new_empty(0) if logits is None else logits

        return run

    def tied(self, weight: Weight, norm: Norm | None) -> tuple[Embed, Product]:
        """Every rank holds all embeddings; its head takes its rows of them."""
        rows = self._shard.take("lm_head.weight", weight, self._model)
        if self.packs or isinstance(rows, CodedWeight):
            self._copied_bytes += rows.nbytes
        return self.embedding(weight), self.head(rows, norm)

    def route(self, routing: Routing, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Rank 0's choice, where a product may have other bits on another rank: a near tie that
        falls another way there would put together columns of two experts.
        """
        ids, weights = self._ops.route(routing, logits)
        if self._ops.is_batch_invariant:
            return ids, weights
        both = self._group.broadcast(torch.cat((ids.float(), weights), dim=1))  # ids are small
        return both[:, : ids.shape[1]].long(), both[:, ids.shape[1] :]

    def experts(
        self, weights: MixtureWeights, router: Router, activation: str, gather: Map | None = None
    ) -> Product:
        """Every rank has its rows of each expert. Sums are made of a rank's columns, and gathered.
        gather: this rank's own takes its place.
        """
        assert self._model.experts is not None
        gather_parts, outer = self._group.gather, self._shard.widths(self._model.expert_width)
        inner = self._shard.widths(self._model.experts.inner_size)
        product = self._ops.experts(
            weights, router, activation, lambda gated: gather_parts(gated, inner)
        )
        return lambda x: gather_parts(product(x), outer)

    def rms_norm_of_all(self, x: Tensor, norm: Norm) -> Tensor:
        """Of ranks that share a head, the first gives it to the others."""
        heads = [shard.heads(len(norm.weight) // x.shape[2]) for shard in self._all]
        widths = [
            x.shape[2] * len(each) * (rank == heads.index(each)) for rank, each in enumerate(heads)
        ]
        whole = self._group.gather(x.view(len(x), -1)[:, : widths[self._shard.rank]], widths)
        mine = heads[self._shard.rank]
        normed = self._ops.rms_norm(whole, norm).view(len(x), -1, x.shape[2])
        return normed[:, mine.start : mine.stop]

    def exchange(self, x: Tensor) -> Tensor:
        num, size = self._model.num_layers, x.shape[2]
        widths = [size * len(shard.layers(num)) for shard in self._all]
        whole = self._group.gather(x.flatten(1), widths).view(len(x), num, size)
        mine = self._shard.part(size)
        return whole[:, :, mine.start : mine.stop]

    def replay(self, key: ReplayKey, forward: Callable[[], Tensor]) -> Tensor:
        """Where a replay makes the gathers again."""
        return self._ops.replay(key, forward) if self._group.can_replay else forward()

    def to_static_buffer(self, x: Tensor) -> Tensor:
        return self._ops.to_static_buffer(x) if self._group.can_replay else x
