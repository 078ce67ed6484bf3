"""MtpLayer: the MTP head, for multi-token prediction (DeepSeek-V3, arXiv 2412.19437).

Of a position it takes the token after it and what the model's output head sees there, and guesses
the token after that one. It has one decoder layer, with KV of its own; embedding and output head
are the model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nanoengine.context import ForwardContext
from nanoengine.models.layer_ops import AfterAttention, LayerOps
from nanoengine.models.layers import AnyAttention
from nanoengine.models.products import Embed, Norm, Product, head_logits, num_runs
from nanoengine.models.rope import Rotary


@dataclass(frozen=True, slots=True)
class MtpParts:
    """What the head computes, in this order.

    norms: of the embedding and of what the model gave. join: [tokens, 2 x hidden] -> qkv's input,
    the embedding first. norm: before the output head.
    """

    norms: tuple[Norm, Norm]
    join: Product
    qkv: Product
    attention: AnyAttention
    after_attention: AfterAttention
    norm: Norm


class MtpHead(Protocol):
    """What guesses the token after the next one, for all rows of a step (MtpLayer)."""

    def __call__(self, ctx: ForwardContext, next_ids: Tensor, given: Tensor) -> Tensor:
        """Store the head's keys and values of a step's rows; returns what its guesses come from,
        [tokens, hidden], which `given` of a row further may be.

        next_ids: int64 [tokens], the token after each row's. given: [tokens, hidden], what this
        gave for the row before.
        """
        ...

    def after_model(self, ctx: ForwardContext, next_ids: Tensor, x: Tensor) -> Tensor:
        """The same where the row before is the model's. x: [tokens, hidden], after its last layer,
        of the rows themselves.
        """
        ...

    @property
    def num_runs(self) -> int:
        """As products.num_runs."""
        ...

    def logits(self, x: Tensor, runs: Tensor | None = None) -> Tensor:
        """[rows, hidden] -> [rows, vocab]. runs: as in decoder.Model.logits."""
        ...


class MtpLayer:
    """The MtpHead of a decoder: one more layer, between its embedding and its output head."""

    def __init__(
        self, ops: LayerOps, parts: MtpParts, ends: tuple[Embed, Norm, Product], rotary: Rotary
    ) -> None:
        """ends: the model's embedding, its last norm, and its output head without the norm."""
        self._ops, self._parts, self._rotary = ops, parts, rotary
        self._embed, self._model_norm, self._head = ends

    def __call__(self, ctx: ForwardContext, next_ids: Tensor, given: Tensor) -> Tensor:
        parts, rms_norm = self._parts, self._ops.rms_norm
        embedded = rms_norm(self._embed(next_ids), parts.norms[0])
        x = parts.join(torch.cat((embedded, rms_norm(given, parts.norms[1])), dim=1))
        angles = tuple(each[0] for each in self._rotary.angles(ctx.positions))
        attended = parts.attention(parts.qkv(x), angles, ctx)
        parts.after_attention(x, attended)
        return rms_norm(x, parts.norm)

    def after_model(self, ctx: ForwardContext, next_ids: Tensor, x: Tensor) -> Tensor:
        """The head sees what the model's output head does: x after the last norm."""
        return self(ctx, next_ids, self._ops.rms_norm(x, self._model_norm))

    @property
    def num_runs(self) -> int:
        return num_runs(self._head)

    def logits(self, x: Tensor, runs: Tensor | None = None) -> Tensor:
        return head_logits(self._head, x, runs)
