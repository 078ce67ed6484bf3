"""Runs one ScheduledBatch: builds the ForwardContext, calls the model, samples.

Knows the model, the sampler and the KV manager's attention face; decides nothing about who runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from nanoengine.context import AttentionBackend, ForwardContext, KVCache, packed
from nanoengine.devices.device import Device
from nanoengine.engine.assistant_drafter import AssistantDrafter
from nanoengine.engine.drafter import Drafts
from nanoengine.engine.drafters import AnyDrafter, make_drafter
from nanoengine.engine.logprobs import StepScores, TokenScorer
from nanoengine.engine.mtp_drafter import MtpDrafter
from nanoengine.engine.sampler import Sampler
from nanoengine.engine.step_inputs import SequenceRows, forward_context
from nanoengine.engine.step_tokens import StepTokens
from nanoengine.engine.token_masks import masked, step_masks
from nanoengine.kv.open_step import DraftStep
from nanoengine.models.decoder import Model, last
from nanoengine.models.draft_model import DraftModel
from nanoengine.sequence import ScheduledBatch, ScheduledSequence
from nanoengine.startup.parts import Parts


class OpenStep(Protocol):
    """One step's KV cache, laid out for `num_rows` sequences (kv.open_step.OpenStep)."""

    num_rows: int
    num_padding: int

    @property
    def kv(self) -> KVCache: ...
    @property
    def block_mass(self) -> Tensor | None: ...
    def draft_steps(self) -> Iterable[DraftStep]: ...
    def draft_steps_between(self, layers: Iterator[object]) -> Iterable[DraftStep]: ...
    def mark_written(self) -> None: ...
    def close(self) -> None: ...


class StepOpener(Protocol):
    """The KV manager, as far as the runner knows it."""

    def open_step(self, batch: ScheduledBatch) -> OpenStep: ...


@dataclass(eq=False)
class ModelRunner:
    """ScheduledBatch -> ForwardContext -> logits -> tokens."""

    model: Model
    attention: AttentionBackend
    kv: StepOpener
    sampler: Sampler
    scorer: TokenScorer
    device: Device
    drafter: AnyDrafter
    draft_model: DraftModel | None = None

    @property
    def mtp(self) -> MtpDrafter | None:
        """The drafter, if it is the MTP head's."""
        return self.drafter if isinstance(self.drafter, MtpDrafter) else None

    def run(self, batch: ScheduledBatch) -> list[int]:
        """The tokens that the items of the batch sample, in order."""
        return self.launch(batch).read()[1]

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch, before: StepTokens | None = None) -> StepTokens:
        """Begin a step. before: the previous step, if its tokens are not read yet."""
        self.device.begin_step()
        step = self.kv.open_step(batch)
        try:
            drafts = self.drafter.draft(batch, step.draft_steps())
            ctx = self._context(batch, step, before, drafts)
            of_resting = Drafts()
            with closing(self.model.layers(ctx)) as layers:
                if batch.resting:
                    between = step.draft_steps_between(layers)
                    of_resting = self.drafter.draft(batch.of_resting, between)
                hidden = last(layers)
            if self.draft_model is not None:
                self.draft_model.store(ctx)
            # The MTP head stores KV of the sampled tokens: it needs the open step.
            computed = batch, ctx, hidden, (drafts, of_resting), step.num_padding
            sampled = self._sample(*computed) if self.mtp else None
            step.mark_written()
        finally:
            step.close()
        return sampled or self._sample(*computed)

    def _sample(
        self,
        batch: ScheduledBatch,
        ctx: ForwardContext,
        hidden: Tensor,
        all_drafts: tuple[Drafts, Drafts],
        num_padding: int,
    ) -> StepTokens:
        """Sample the tokens of a step. hidden: the model's last states, [tokens, hidden].
        all_drafts: those of the step's sequences, and those of the resting ones.
        """
        drafts, of_resting = all_drafts
        prompts = tuple(self.scorer.score_prompts(batch, hidden))
        if not len(ctx.logit_rows):
            nothing = torch.empty(0, dtype=torch.int64)
            if self.mtp is not None:
                self.mtp.guess(batch, ctx, hidden, nothing)
            scores = StepScores(prompts, None)
            return StepTokens(batch, nothing, nothing, scores, drafts, of_resting)
        wanted = hidden if len(ctx.logit_rows) == len(hidden) else hidden[ctx.logit_rows]
        if isinstance(self.drafter, AssistantDrafter):
            self.drafter.see(batch, wanted)
        logits = self._logits(wanted, hidden[len(hidden) - num_padding :])
        known = drafts.read(batch, self.device)
        seqs, places = zip(*known.sampled, strict=True)
        positions = [at + 1 for at in places]
        guesses = [item.guesses[:num] for item in known.items for num in range(item.num_samples)]
        masks = step_masks(known)  # their logits are a copy, which none but the sampler holds
        tokens = self.sampler.sample(masked(logits, masks, self.device), seqs, positions, guesses)
        parts = [tokens, *(each.tokens for each in all_drafts if each.places)]
        if self.mtp is not None:
            parts.append(self.mtp.guess(batch, ctx, hidden, tokens))
        numbers = self.device.read_back(torch.cat(parts) if len(parts) > 1 else tokens)
        scores = StepScores(prompts, self.scorer.score_sampled(seqs, logits, tokens))
        return StepTokens(batch, tokens, numbers, scores, drafts, of_resting)

    def _logits(self, rows: Tensor, padding: Tensor) -> Tensor:
        """The logits of the rows that sample. Those of `padding` are computed with them, so that
        the number of rows does not depend on guesses.
        """
        both = torch.cat((rows, padding)) if len(padding) else rows
        return self.model.logits(both)[: len(rows)]

    def _context(
        self, batch: ScheduledBatch, step: OpenStep, before: StepTokens | None, drafts: Drafts
    ) -> ForwardContext:
        """A step's context. `before`, `drafts`: with the tokens that only the device knows."""
        rows = [
            SequenceRows(
                _known_tokens(item), item.start, item.start + item.num_tokens, item.num_samples
            )
            for item in batch.items
        ]
        logits_alone = not (batch.is_decode or self.mtp or batch.scores_prompts)
        ctx = forward_context(
            rows, step.num_rows, step.kv, self.attention, self.device, step.block_mass, logits_alone
        )
        starts = [0, *accumulate(item.num_tokens for item in batch.items)]
        if before is not None:
            self._copy_tokens(ctx.token_ids, before.places(batch, starts), before.tokens)
        places = (
            (starts[i] + 1 + len(batch.items[i].guesses) + n, at)
            for i, ats in drafts.places.items()
            for n, at in enumerate(ats)
        )
        self._copy_tokens(ctx.token_ids, [*places], drafts.tokens)
        return ctx

    def _copy_tokens(self, tokens: Tensor, places: list[tuple[int, int]], source: Tensor) -> None:
        """Copy tokens on the device. places: (index in `tokens`, index in `source`) of each."""
        if places:
            to, at = packed(self.device.tensor, [*zip(*places, strict=True)], torch.int64)
            tokens[to] = source[at].clamp(min=0)  # NO_TOKEN: of a request that fails


def _known_tokens(item: ScheduledSequence) -> list[int]:
    """The tokens of an item, with 0 where the device computes them."""
    known = [*item.seq.token_ids[item.start : item.start + item.num_tokens], *item.guesses]
    return known + [0] * (item.num_tokens - len(known))


def make_runner(parts: Parts, kv: StepOpener, device: Device) -> ModelRunner:
    """The runner of an engine's parts over a KV cache."""
    decoder = parts.model.decoder
    sampler = Sampler(parts.ops, device.tensor)
    scorer = TokenScorer(decoder.logits, parts.ops.likeliest, device)
    drafter = make_drafter(parts, sampler, device)
    draft = parts.model.draft
    return ModelRunner(decoder, parts.attention, kv, sampler, scorer, device, drafter, draft)
