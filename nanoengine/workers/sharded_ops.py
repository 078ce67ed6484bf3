"""LayerOps of a rank: products of its outputs, and a gather where the whole is needed.

    attended (this rank's heads) -> gather -> out (this rank's rows) -> gather -> added to x
    gate_up (this rank's rows) -> gather -> down (this rank's rows) -> gather -> added to x

All experts of a layer go through the second line at once: a gather has a row for each choice of
each row, so its size is the same whichever experts were chosen.

Gathers move data and compute nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from nanoengine.config.model import ExpertsConfig, ModelConfig
from nanoengine.context import ForwardContext, KVTarget, RecurrentState, ReplayKey
from nanoengine.models.draw import Draws
from nanoengine.models.experts import ExpertWeights, Map, Router, RouterWeights
from nanoengine.models.layer_ops import AfterAttention, Embed, LayerOps, Norm, Product, Tiles
from nanoengine.models.rules import RecurrentNet
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

    @property
    def is_batch_invariant(self) -> bool:
        return self._ops.is_batch_invariant

    @property
    def takes_codes(self) -> bool:
        return self._ops.takes_codes

    @property
    def packs(self) -> bool:
        return self._ops.packs

    @property
    def saved_bytes(self) -> int:
        return self._ops.saved_bytes - self._copied_bytes

    def linear(
        self, weight: Weight, bias: Tensor | None = None, norm: Norm | None = None
    ) -> Product:
        return self._ops.linear(weight, bias, norm)

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

    def per_head(self, weights: Tensor) -> Product:
        """Of this rank's heads."""
        return self._ops.per_head(weights)

    def gate_up(
        self,
        gate: Weight,
        up: Weight,
        biases: tuple[Tensor, Tensor] | None,
        norm: Norm | None,
        activation: str,
    ) -> Product:
        return self._ops.gate_up(gate, up, biases, norm, activation)

    def embedding(self, weight: Weight) -> Embed:
        return self._ops.embedding(weight)

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

    def router(self, weights: RouterWeights) -> Product:
        """Every rank has all of it."""
        return self._ops.router(weights)

    def route(
        self,
        config: ExpertsConfig,
        logits: Tensor,
        choice_bias: Tensor | None,
        scale: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Rank 0's choice, where a product may have other bits on another rank: a near tie that
        falls another way there would put together columns of two experts.
        """
        ids, weights = self._ops.route(config, logits, choice_bias, scale)
        if self._ops.is_batch_invariant:
            return ids, weights
        both = self._group.broadcast(torch.cat((ids.float(), weights), dim=1))  # ids are small
        return both[:, : config.top_k].long(), both[:, config.top_k :]

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._ops.copy(target, source)

    def scale(self, x: Tensor, factor: float) -> None:
        self._ops.scale(x, factor)

    def accumulate(self, x: Tensor, summand: Tensor, gate: Tensor | None = None) -> Tensor:
        return self._ops.accumulate(x, summand, gate)

    def experts(
        self,
        config: ExpertsConfig,
        experts: Iterable[ExpertWeights],
        router: Router,
        activation: str,
        gather: Map | None = None,
    ) -> Product:
        """Every rank has its rows of each expert. Sums are made of a rank's columns, and gathered.
        gather: this rank's own takes its place.
        """
        assert self._model.experts is not None
        gather_parts, hidden = self._group.gather, self._shard.widths(self._model.hidden_size)
        inner = self._shard.widths(self._model.experts.inner_size)
        product = self._ops.experts(
            *(config, experts, router, activation), lambda gated: gather_parts(gated, inner)
        )
        return lambda x: gather_parts(product(x), hidden)

    def after_attention(
        self, out: Product, mlp: Product, next_qkv: Product | None
    ) -> AfterAttention:
        return self._ops.after_attention(out, mlp, next_qkv)

    def beside_attention(
        self, out: Product, mlp: Product, next_qkv: Product | None
    ) -> AfterAttention:
        return self._ops.beside_attention(out, mlp, next_qkv)

    def layer_norm(self, x: Tensor, norm: Norm) -> Tensor:
        return self._ops.layer_norm(x, norm)

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        return self._ops.rms_norm(x, norm)

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

    def gated(self, activation: str) -> Product:
        return self._ops.gated(activation)

    def activated(self, x: Tensor, activation: Map) -> Tensor:
        return self._ops.activated(x, activation)

    def rotate(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self._ops.rotate(q, cos, sin)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return self._ops.sigmoid_mul(x, gate)

    def recurrence(
        self, x: Tensor, net: RecurrentNet, state: RecurrentState, ctx: ForwardContext
    ) -> Tensor:
        return self._ops.recurrence(x, net, state, ctx)

    def rotate_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, target: KVTarget
    ) -> Tensor:
        return self._ops.rotate_and_store(q, k, v, cos, sin, target)

    def argmax(self, logits: Tensor) -> Tensor:
        return self._ops.argmax(logits)

    def likeliest(self, logprobs: Tensor, count: int) -> Tensor:
        return self._ops.likeliest(logprobs, count)

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        return self._ops.draw(logits, draws)

    def replay(self, key: ReplayKey, forward: Callable[[], Tensor]) -> Tensor:
        """Where a replay makes the gathers again."""
        return self._ops.replay(key, forward) if self._group.can_replay else forward()

    def to_static_buffer(self, x: Tensor) -> Tensor:
        return self._ops.to_static_buffer(x) if self._group.can_replay else x

    def forget_steps(self) -> None:
        self._ops.forget_steps()
