"""DraftModel: a model that guesses tokens for a larger one, with KV of its own (Leviathan et al.,
arXiv 2211.17192).

Its keys and values lie in the blocks of the larger model's, in layers behind those. After each step
of the larger model it stores those of the step's tokens, whoever guessed them; its own guesses are
draft steps before a step (engine/drafter.py), and that step overwrites what they stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from nanoengine.config.model import ModelConfig
from nanoengine.context import (
    AttentionBackend,
    ForwardContext,
    KVCache,
    KVChunk,
    KVTarget,
    RecurrentState,
    ReplayKey,
)
from nanoengine.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class KVBehind:
    """The layers of a KV cache from number `first` on."""

    kv: KVCache
    first: int

    def target(self, layer: int) -> KVTarget:
        return self.kv.target(self.first + layer)

    def read(self, layer: int) -> Iterable[KVChunk]:
        return self.kv.read(self.first + layer)

    def state(self, layer: int) -> RecurrentState:
        return self.kv.state(layer)

    def replay_key(self) -> ReplayKey | None:
        """None: its steps are not replayed."""
        return None


@dataclass(frozen=True, slots=True)
class DraftModel:
    """decoder: its operations are its own, as what these give lies in buffers. attention: for its
    layers. first: how many layers with attention the larger model has. vocab_size: of the larger
    model; a token that only one of the two has is padding.
    """

    decoder: Decoder
    attention: AttentionBackend
    config: ModelConfig
    first: int
    vocab_size: int
    weight_bytes: int

    def forward(self, ctx: ForwardContext) -> Tensor:
        """As decoder.Model.forward, of a step of the larger model's KV."""
        tokens = ctx.token_ids.clamp(max=self.config.vocab_size - 1)
        own = replace(ctx, attention=self.attention, kv=KVBehind(ctx.kv, self.first))
        return self.decoder.run(self.decoder.ends.embed(tokens), own)

    def store(self, ctx: ForwardContext) -> None:
        """Store the keys and values of a step's tokens, which its layers make."""
        self.forward(replace(ctx, last_rows=(), block_mass=None))

    @property
    def num_runs(self) -> int:
        """As products.num_runs; 0 also where the larger model has tokens that this one lacks."""
        return 0 if self.config.vocab_size < self.vocab_size else self.decoder.num_runs

    def logits(self, x: Tensor, runs: Tensor | None = None) -> Tensor:
        """[rows, hidden] -> [rows, vocab] of the larger model's vocabulary. runs: as in
        decoder.Model.logits.
        """
        logits = self.decoder.logits(x, runs)
        return functional.pad(logits, (0, self.vocab_size - logits.shape[1]), value=-torch.inf)
