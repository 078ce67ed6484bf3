"""MtpDrafter: guesses by the MTP head (multi-token prediction, models/mtp.py).

The head runs over the rows of each step once their tokens are sampled. It stores its keys and
values, and guesses the token after each one sampled. Further guesses are decode steps of the head
alone, each from its hidden states of the one before; the step that checks them overwrites their KV.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoengine.context import AttentionBackend, ForwardContext
from nanoengine.devices.device import Device
from nanoengine.engine.draft_vocabulary import DraftVocabulary
from nanoengine.engine.drafter import Drafts, SampledStates, draft_context, padded, rows_of
from nanoengine.engine.sampler import Sampler
from nanoengine.kv.open_step import DraftStep
from nanoengine.models.mtp import MtpHead
from nanoengine.sequence import ScheduledBatch, Sequence


@dataclass(eq=False)
class MtpDrafter:
    """Runs the head of a model. Penalties, bad words and grammars do not limit what it guesses."""

    head: MtpHead
    attention: AttentionBackend
    sampler: Sampler
    vocabulary: DraftVocabulary
    device: Device
    _made: SampledStates | None = None  # the head's, in the newest step

    def draft(self, batch: ScheduledBatch, steps: Iterable[DraftStep]) -> Drafts:
        """The drafts after the first guess of each item: as Drafter.draft."""
        return Drafts.of(self._drafted(batch, steps))

    def _drafted(
        self, batch: ScheduledBatch, steps: Iterable[DraftStep]
    ) -> Iterator[tuple[DraftStep, Tensor]]:
        before: DraftStep | None = None
        runs: Tensor | None = None
        for step in steps:
            seqs = step.sequences(batch)
            if before is None:
                runs = self.vocabulary.runs(seqs)
                next_ids = [batch.items[item].guesses[-1] for item in step.items]
                tokens = self.device.tensor(next_ids, torch.int64)
                assert self._made is not None
                given = self._made.before(seqs, step, self.device)
            else:
                tokens = rows_of(step, before, tokens, self.device)
                given = rows_of(step, before, given, self.device)
            given = self._next(seqs, step, tokens, given)
            tokens = self._draw(given, seqs, [at + 2 for at in step.positions], runs)
            yield step, tokens
            before = step

    def _next(self, seqs: list[Sequence], step: DraftStep, tokens: Tensor, given: Tensor) -> Tensor:
        """Run a draft step; returns the head's hidden states, [rows, hidden]. tokens: the ones
        after the rows', int64 [rows]. given: as in MtpHead.
        """
        ctx = draft_context(seqs, step, self.attention, self.device)
        num_rows = len(ctx.token_ids)
        return self.head(ctx, padded(tokens, num_rows), padded(given, num_rows))[: len(seqs)]

    def _draw(
        self, made: Tensor, seqs: Seq[Sequence], positions: Seq[int], runs: Tensor | None
    ) -> Tensor:
        logits = self.head.logits(made, runs)
        return self.sampler.sample(logits, seqs, positions).clamp_(min=0)

    def guess(
        self, batch: ScheduledBatch, ctx: ForwardContext, hidden: Tensor, tokens: Tensor
    ) -> Tensor:
        """Run the head over a step; returns the guess after each token that it samples, int64 [n];
        [0] if no sequence may check one.

        hidden: [tokens, hidden], of the model's last layer. tokens: the sampled ones, int64 [n].
        """
        next_ids: list[int] = []
        sampled = batch.sampled
        for item in batch.items:
            stop = item.start + item.num_tokens
            known = item.seq.token_ids[item.start + 1 : stop + 1 - item.num_samples]
            next_ids += known + [0] * item.num_samples
        next_ids += [0] * (len(ctx.token_ids) - len(next_ids))
        following = self.device.tensor(next_ids, torch.int64)
        if sampled:
            following[ctx.logit_rows] = tokens.clamp(min=0)  # NO_TOKEN: of a request that fails
        made = self.head.after_model(ctx, following, hidden)[ctx.logit_rows]
        self._made = SampledStates.of(made, sampled)
        if not any(map(_wants_guess, dict(sampled))):
            return tokens[:0]
        seqs, positions = zip(*sampled, strict=True)
        return self._draw(made, seqs, [at + 2 for at in positions], self.vocabulary.runs(seqs))


def _wants_guess(seq: Sequence) -> bool:
    """Whether the next step may check a guess: the output head costs as much as layers."""
    return seq.may_guess and (seq.mtp_length is None or seq.mtp_length.is_due)
