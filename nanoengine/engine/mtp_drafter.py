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
from nanoengine.engine.drafter import Drafts, draft_context, rows_of
from nanoengine.engine.sampler import Sampler
from nanoengine.kv.open_step import DraftStep
from nanoengine.models.mtp import MtpHead
from nanoengine.sequence import ScheduledBatch, Sequence


@dataclass(frozen=True, slots=True)
class _Made:
    """The head's hidden states of the rows that sample in a step, [rows, hidden]. rows: (seq_id,
    position) -> index of the row.
    """

    hidden: Tensor
    rows: dict[tuple[int, int], int]


class MtpDrafter:
    """Runs the head of a model. Penalties, bad words and grammars do not limit what it guesses."""

    def __init__(
        self,
        head: MtpHead,
        attention: AttentionBackend,
        sampler: Sampler,
        vocabulary: DraftVocabulary,
        device: Device,
    ) -> None:
        self._head = head
        self._attention = attention
        self._sampler = sampler
        self._vocabulary = vocabulary
        self._device = device
        self._made: _Made | None = None  # of the newest step

    def draft(self, batch: ScheduledBatch, steps: Iterable[DraftStep]) -> Drafts:
        """The drafts after the first guess of each item: as Drafter.draft."""
        return Drafts.of(self._drafted(batch, steps))

    def _drafted(
        self, batch: ScheduledBatch, steps: Iterable[DraftStep]
    ) -> Iterator[tuple[DraftStep, Tensor]]:
        before: DraftStep | None = None
        runs: Tensor | None = None
        for step in steps:
            if before is None:
                runs = self._vocabulary.runs(batch.items[item].seq for item in step.items)
                next_ids = [batch.items[item].guesses[-1] for item in step.items]
                tokens, given = self._device.tensor(next_ids, torch.int64), self._known(batch, step)
            else:
                tokens = rows_of(step, before, tokens, self._device)
                given = rows_of(step, before, given, self._device)
            tokens, given = self._next(batch, step, tokens, given, runs)
            yield step, tokens
            before = step

    def _known(self, batch: ScheduledBatch, step: DraftStep) -> Tensor:
        """The head's hidden states of the token before each item's newest one, [rows, hidden];
        zeros if the newest step did not sample there.
        """
        known = self._made
        assert known is not None
        seqs = (batch.items[item].seq for item in step.items)
        keys = [(seq.seq_id, at - 1) for seq, at in zip(seqs, step.positions, strict=True)]
        rows = [known.rows.get(key, len(known.hidden)) for key in keys]
        zeros = known.hidden.new_zeros(1, known.hidden.shape[1])
        return torch.cat((known.hidden, zeros))[self._device.tensor(rows, torch.int64)]

    def _next(
        self,
        batch: ScheduledBatch,
        step: DraftStep,
        tokens: Tensor,
        given: Tensor,
        runs: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Run a draft step; returns the token of each row, int64 [rows], and the head's hidden
        states. tokens: the ones after the rows'. given, runs: as in MtpHead.
        """
        seqs = [batch.items[item].seq for item in step.items]
        ctx = draft_context(batch, step, self._attention, self._device)
        num, num_padded = len(seqs), len(ctx.token_ids)
        next_ids = tokens.new_zeros(num_padded)
        next_ids[:num] = tokens
        padded = given.new_zeros(num_padded, given.shape[1])
        padded[:num] = given
        made = self._head(ctx, next_ids, padded)[:num]
        positions = [position + 2 for position in step.positions]
        return self._draw(made, seqs, positions, runs), made

    def _draw(
        self, made: Tensor, seqs: Seq[Sequence], positions: Seq[int], runs: Tensor | None
    ) -> Tensor:
        logits = self._head.logits(made, runs)
        return self._sampler.sample(logits, seqs, positions).clamp_(min=0)

    def guess(
        self, batch: ScheduledBatch, ctx: ForwardContext, hidden: Tensor, tokens: Tensor
    ) -> Tensor:
        """Run the head over a step; returns the guess after each token that it samples, int64 [n];
        [0] if no sequence may check one.

        hidden: [tokens, hidden], of the model's last layer. tokens: the sampled ones, int64 [n].
        """
        next_ids: list[int] = []
        sampled = []
        for item in batch.items:
            stop = item.start + item.num_tokens
            known = item.seq.token_ids[item.start + 1 : stop + 1 - item.num_samples]
            next_ids += known + [0] * item.num_samples
            sampled += [(item.seq, at) for at in range(stop - item.num_samples, stop)]
        next_ids += [0] * (len(ctx.token_ids) - len(next_ids))
        following = self._device.tensor(next_ids, torch.int64)
        if sampled:
            following[ctx.logit_rows] = tokens.clamp(min=0)  # NO_TOKEN: of a request that fails
        made = self._head.after_model(ctx, following, hidden)[ctx.logit_rows]
        self._made = _Made(made, {(s.seq_id, at): row for row, (s, at) in enumerate(sampled)})
        if not any(map(_wants_guess, dict(sampled))):
            return tokens[:0]
        seqs, positions = zip(*sampled, strict=True)
        return self._draw(made, seqs, [at + 2 for at in positions], self._vocabulary.runs(seqs))


def _wants_guess(seq: Sequence) -> bool:
    """Whether the next step may check a guess: the output head costs as much as layers."""
    return seq.may_guess and (seq.mtp_length is None or seq.mtp_length.is_due)
