"""One Decoder for every architecture: the rows in architectures.py say how they differ.

layer_builder.py makes its parts. Write a new class only for a model with another order of layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from nanoengine.config.model import ModelConfig
from nanoengine.context import ForwardContext, ReplayKey
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.models.layer_builder import LayerBuilder, LayerParts, rotations
from nanoengine.models.layer_ops import AfterAttention, LayerOps
from nanoengine.models.layers import AnyAttention, LayerEnd, MixerBeside, StoredOnly
from nanoengine.models.mtp import MtpHead, MtpLayer
from nanoengine.models.products import Ends, NormedProduct, Product, head_logits, num_runs
from nanoengine.models.recurrent_builder import TensorSource
from nanoengine.models.rope import Angles, Rotary


@dataclass(frozen=True, slots=True)
class _Layer:
    """One iteration of the loop over layers. rope: the index of its kind of rotation. end: what it
    does last, where `after_attention` is not all. beside: as of LayerParts.
    """

    attention: AnyAttention
    after_attention: AfterAttention
    rope: int
    end: LayerEnd | None
    beside: MixerBeside | None = None


def last(layers: Iterator[Tensor]) -> Tensor:
    """What the last of them gives, once all have run."""
    return deque(layers, maxlen=1).pop()


def _without_mlp(ops: LayerOps, out: Product, next_qkv: Product | None) -> AfterAttention:
    """As LayerOps.after_attention, of a layer without a feed-forward."""

    def run(x: Tensor, attended: Tensor) -> Tensor:
        ops.accumulate(x, out(attended))
        return x if next_qkv is None else next_qkv(x)

    return run


class Model(Protocol):
    """What runs the steps of a model (Decoder)."""

    @property
    def mtp(self) -> MtpHead | None:
        """The head for multi-token prediction; None: there is none, or nobody asks for it."""
        ...

    @property
    def ends(self) -> Ends:
        """What an assistant takes of the model."""
        ...

    def forward(self, ctx: ForwardContext) -> Tensor:
        """Residual stream after the last layer, [tokens, hidden], or of ctx.last_rows alone.

        The next call overwrites it.
        """
        ...

    def layers(self, ctx: ForwardContext) -> Generator[Tensor]:
        """The residual stream after each layer, at the end as `forward` returns it. Between two of
        them other passes may run, but not with our products for CPUs, whose results lie in buffers.
        """
        ...

    @property
    def num_runs(self) -> int:
        """As products.num_runs."""
        ...

    def logits(self, x: Tensor, runs: Tensor | None = None) -> Tensor:
        """[rows, hidden] -> [rows, vocab], in the dtype of the weights or in fp32. runs: of tokens
        that a draft is chosen among, as in products.PartedHead; None: all.
        """
        ...


class Decoder:
    """A decoder-only transformer over tokens laid end to end."""

    def __init__(
        self, config: ModelConfig, source: TensorSource, device: torch.device, ops: LayerOps
    ) -> None:
        """`source` gives each tensor of `weight_shapes(config)` once, on `device` and in the final
        dtype; matrices may be codes if `ops` takes these.
        """
        builder = LayerBuilder(config, source, ops, device)
        embed, self._head, norm = builder.ends()
        self.ends = Ends(embed, lambda x: ops.rms_norm(x, norm))
        self._inputs = builder.layer_inputs()
        parts = [builder.layer(index) for index in range(config.num_layers)]
        self._first_qkv, *next_qkvs = (*(part.qkv for part in parts), None)
        ropes, rope_of = rotations(config)
        self._layers = [
            self._layer(ops, *each) for each in zip(parts, next_qkvs, rope_of, strict=True)
        ]
        norms_turned = ARCHITECTURES[config.architecture].norms_turned
        self._rotaries = [
            Rotary(kinds, head_dim, device, norms_turned) for head_dim, kinds in ropes.items()
        ]
        self._logit_softcap = config.final_logit_softcap
        self._logit_divisor = config.factors.logits
        self._ops = ops
        self._is_amid_a_pass = False
        self.mtp: MtpLayer | None = None
        if config.has_mtp:
            ends = embed, norm, self._head
            rotary = Rotary([config.rope], config.head_dim, device)
            self.mtp = MtpLayer(ops, builder.mtp(), ends, rotary)
            self._head = NormedProduct(ops.rms_norm, norm, self._head)

    @staticmethod
    def _layer(ops: LayerOps, part: LayerParts, next_qkv: Product | None, rope: int) -> _Layer:
        if part.mlp is None:
            return _Layer(part.attention, _without_mlp(ops, part.out, next_qkv), rope, None)
        if part.is_parallel:
            beside = ops.beside_attention(part.out, part.mlp, next_qkv)
            return _Layer(part.attention, beside, rope, None)
        if part.end is None:
            after_attention = ops.after_attention(part.out, part.mlp, next_qkv)
            return _Layer(part.attention, after_attention, rope, None, part.beside)
        after_attention = ops.after_attention(part.out, part.mlp, None)
        return _Layer(part.attention, after_attention, rope, LayerEnd(ops, *part.end, next_qkv))

    def forward(self, ctx: ForwardContext) -> Tensor:
        return last(self.layers(ctx))

    def layers(self, ctx: ForwardContext) -> Generator[Tensor]:
        """A step that is replayed is one layer."""
        x = self.ends.embed(ctx.token_ids)
        inputs = () if self._inputs is None else (self._inputs(ctx.token_ids, x),)
        angles = [rotary.angles(ctx.positions) for rotary in self._rotaries]
        # Steps other than decodes are hardly ever alike; a replay would report no mass.
        may_replay = len(x) == len(ctx.lengths) and ctx.block_mass is None
        key = ctx.kv.replay_key() if may_replay and ctx.attention.can_replay else None
        if key is not None:
            if ctx.attention.reserve(ctx.lengths):
                self._ops.forget_steps()
            shared = *chain(*angles), *inputs, ctx.query_start, ctx.kv_lens
            yield self._ops.replay(
                ReplayKey((x, *shared, *key.tensors), key.layout),
                lambda: last(self._run_layers(x, angles, inputs, ctx)),
            )
        elif self._is_amid_a_pass:  # whose static buffers are in use
            yield from self._run_layers(x, angles, inputs, ctx)
        else:
            self._is_amid_a_pass = True
            try:
                yield from self._run_layers(self._ops.to_static_buffer(x), angles, inputs, ctx)
            finally:
                self._is_amid_a_pass = False

    def _run_layers(
        self, x: Tensor, angles: Sequence[Angles], inputs: Sequence[Tensor], ctx: ForwardContext
    ) -> Iterator[Tensor]:
        """Yields x after each layer, where x = x + attention(norm(x)), then x = x + mlp(norm(x)).

        attention(x) is out(attended(qkv(x))), mlp(x) is down(gate_up(x)), or that of the experts to
        which a row goes. Kernels can fuse all that needs no KV cache, so after_attention does both
        sums, in place, and returns qkv(norm(x)) of the next layer. If an architecture has norms
        after attention and mlp, they are part of out and mlp. If it is parallel, mlp sees x as
        attention did. A mixer beside attention has its projection in qkv, and its sum comes first.
        """
        of_kinds = [*chain(*(zip(*each, strict=True) for each in angles))]
        qkv = self._first_qkv(x)
        for index, layer in enumerate(self._layers):
            given = inputs[0][:, index] if inputs else None
            if layer.beside is not None:
                qkv = layer.beside(x, qkv, of_kinds[layer.rope], ctx)
            if ctx.last_rows is not None and layer is self._layers[-1]:
                yield self._last_rows(layer, x, qkv, of_kinds[layer.rope], given, ctx)
                return
            qkv = layer.after_attention(x, layer.attention(qkv, of_kinds[layer.rope], ctx))
            if layer.end is not None:
                qkv = layer.end(x, given)
            yield x

    def run(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """The residual stream after the last layer, of what comes into the first, [tokens, hidden],
        which may be overwritten. It is not replayed.
        """
        angles = [rotary.angles(ctx.positions) for rotary in self._rotaries]
        return last(self._run_layers(x, angles, (), ctx))

    def _last_rows(
        self,
        layer: _Layer,
        x: Tensor,
        qkv: Tensor,
        angles: Angles,
        given: Tensor | None,
        ctx: ForwardContext,
    ) -> Tensor:
        """x after the last layer, of ctx.last_rows alone: [m, hidden]. given: its inputs.

        Of the other tokens nothing is read any more but their KV. Where no row is wanted, as in the
        middle of a prompt, nothing is attended to, unless its mass is to be reported.
        """
        is_stored_only = not ctx.last_rows and ctx.block_mass is None
        at = replace(ctx, attention=StoredOnly()) if is_stored_only else ctx
        attended, rows = layer.attention(qkv, angles, at), ctx.logit_rows
        wanted = self._ops.to_static_buffer(x[rows])
        if ctx.last_rows:
            layer.after_attention(wanted, attended[rows])
            if layer.end is not None:
                layer.end(wanted, None if given is None else given[rows])
        return wanted

    @property
    def num_runs(self) -> int:
        return num_runs(self._head)

    def logits(self, x: Tensor, runs: Tensor | None = None) -> Tensor:
        """A cap makes the least that it lets through of -inf, hardly a chance."""
        logits, softcap = head_logits(self._head, x, runs), self._logit_softcap
        if self._logit_divisor != 1:
            logits.div_(self._logit_divisor)
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)
