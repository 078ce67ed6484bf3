"""Runs one ScheduledBatch: builds the ForwardContext, calls the model, samples.

Knows the model, the sampler and the KV manager's attention face; decides nothing about who runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nanoengine.context import AttentionBackend, ForwardContext, KVCache, packed
from nanoengine.devices.device import Device, Readable
from nanoengine.engine.logprobs import StepScores, TokenScorer
from nanoengine.engine.sampler import Sampler
from nanoengine.models.decoder import Decoder
from nanoengine.sequence import ScheduledBatch
from nanoengine.startup.parts import Parts


class OpenStep(Protocol):
    """One step's KV cache, laid out for `num_rows` sequences (kv.open_step.OpenStep)."""

    num_rows: int

    @property
    def kv(self) -> KVCache: ...
    def mark_written(self) -> None: ...
    def close(self) -> None: ...


class StepOpener(Protocol):
    """The KV manager, as far as the runner knows it."""

    def open_step(self, batch: ScheduledBatch) -> OpenStep: ...


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What a step samples: the next token of each item of its batch that does, in order, and those
    after its guesses.

    tokens: int64 [n], on the device; numbers: the same on their way to the host, as are the scores
    that requests ask for.
    """

    batch: ScheduledBatch
    tokens: Tensor
    numbers: Readable
    scores: StepScores


class ModelRunner:
    """ScheduledBatch -> ForwardContext -> logits -> tokens."""

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        kv: StepOpener,
        sampler: Sampler,
        device: Device,
    ) -> None:
        self.model = model
        self.attention = attention
        self._kv = kv
        self.sampler = sampler
        self._scorer = TokenScorer(model.logits, device)
        self._device = device

    def run(self, batch: ScheduledBatch) -> list[int]:
        """The tokens that the items of the batch sample, in order."""
        return self.launch(batch).numbers.tolist()

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch, before: StepTokens | None = None) -> StepTokens:
        """Begin the step. before: the one that computes the tokens which `batch` is ahead of."""
        step = self._kv.open_step(batch)
        try:
            ctx = self.context(batch, step, before)
            hidden = self.model.forward(ctx)
            step.mark_written()
        finally:
            step.close()
        scores = self._scorer.score_prompts(batch, hidden)
        drawn = [
            (item.seq, item.start + item.num_tokens - item.num_samples + number)
            for item in batch.items
            for number in range(1, item.num_samples + 1)
        ]
        if not drawn:
            nothing = torch.empty(0, dtype=torch.int64)
            return StepTokens(batch, nothing, nothing, scores)
        logits = self.model.logits(hidden[ctx.logit_rows])
        seqs, positions = zip(*drawn, strict=True)
        tokens = self.sampler.sample(logits, seqs, positions)
        numbers = self._device.read_back(tokens)
        scores = self._scorer.score_sampled(scores, seqs, logits, tokens)
        return StepTokens(batch, tokens, numbers, scores)

    def context(
        self, batch: ScheduledBatch, step: OpenStep, before: StepTokens | None
    ) -> ForwardContext:
        """The forward context of a batch, over the KV cache of its step. Rows of it past the real
        sequences have a token, and no keys.

        before: the step that samples the tokens which some of these sequences begin with.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        starts, kv_lens = [0], []
        logit_rows: list[int] = []
        for item in batch.items:
            begin = item.start
            end = begin + item.num_tokens
            token_ids += item.seq.token_ids[begin:end] or [0]  # 0: `before` knows it
            token_ids += item.guesses
            positions += range(begin, end)
            starts.append(len(token_ids))
            kv_lens.append(end)
            logit_rows += range(len(token_ids) - item.num_samples, len(token_ids))
        lengths = [*zip((item.num_tokens for item in batch.items), kv_lens, strict=True)]
        for _ in range(len(lengths), step.num_rows):
            lengths.append((1, 0))
            token_ids.append(0)
            positions.append(0)
            starts.append(len(token_ids))
            kv_lens.append(0)
        make = self._device.tensor
        tokens, at, rows = packed(make, (token_ids, positions, logit_rows), torch.int64)
        query_start, lens = packed(make, (starts, kv_lens), torch.int32)
        if before is not None:
            tokens = self._with_sampled(tokens, batch, starts, before)
        return ForwardContext(
            token_ids=tokens,
            positions=at,
            query_start=query_start,
            kv_lens=lens,
            lengths=tuple(lengths),
            logit_rows=rows,
            kv=step.kv,
            attention=self.attention,
        )

    def _with_sampled(
        self, tokens: Tensor, batch: ScheduledBatch, starts: list[int], before: StepTokens
    ) -> Tensor:
        """The tokens of a batch, with those that the step before it samples."""
        sampled = [item.seq.seq_id for item in before.batch.items if item.samples]
        places = {seq_id: place for place, seq_id in enumerate(sampled)}
        rows = [
            (row, places[item.seq.seq_id])
            for row, item in zip(starts, batch.items, strict=False)
            if item.start == item.seq.num_tokens
        ]
        if rows:
            to, at = packed(self._device.tensor, [*zip(*rows, strict=True)], torch.int64)
            tokens[to] = before.tokens[at].clamp(min=0)  # NO_TOKEN: of a request that fails
        return tokens


def make_runner(parts: Parts, kv: StepOpener, device: Device) -> ModelRunner:
    """The runner of an engine's parts over a KV cache."""
    sampler = Sampler(parts.ops.argmax, device.tensor)
    return ModelRunner(parts.model.decoder, parts.attention, kv, sampler, device)
