"""Drafter: guesses by decode steps of the model itself over the part of the KV on the device, or of
a draft model.

No byte crosses the link for a draft: tokens go from step to step on the device. What a draft writes
is overwritten by the step that checks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nanoengine.context import AttentionBackend, ForwardContext
from nanoengine.devices.device import Device
from nanoengine.engine.draft_vocabulary import DraftVocabulary
from nanoengine.engine.sampler import Sampler
from nanoengine.engine.step_inputs import SequenceRows, forward_context
from nanoengine.engine.token_masks import masked
from nanoengine.kv.open_step import DraftStep
from nanoengine.models.decoder import Model
from nanoengine.models.draft_model import DraftModel
from nanoengine.sequence import ScheduledBatch, Sequence

NOT_DRAFTED = 0  # the guess where no draft was made; it is checked like all guesses


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts of a step: int64 [n] on the device. places: for each item that drafted, the
    indices of its drafts, in order.
    """

    tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    places: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, drafted: Iterable[tuple[DraftStep, Tensor]]) -> Drafts:
        """drafted: each step, and the token that each of its rows sampled."""
        made: list[Tensor] = []
        places: dict[int, list[int]] = {}
        num_made = 0
        for step, tokens in drafted:
            made.append(tokens)
            for place, item in enumerate(step.items, num_made):
                places.setdefault(item, []).append(place)
            num_made += len(step.items)
        return cls(torch.cat(made), places) if made else cls()

    def fill(self, batch: ScheduledBatch, token_ids: list[int]) -> ScheduledBatch:
        """The batch with these drafts as guesses. token_ids: `tokens` on the host."""
        if not batch.num_drafts:
            return batch
        items = []
        for index, item in enumerate(batch.items):
            made = [token_ids[place] for place in self.places.get(index, ())]
            missing = [NOT_DRAFTED] * (item.num_drafts - len(made))
            items.append(item.with_drafts((*made, *missing)))
        return replace(batch, items=tuple(items))

    def read(self, batch: ScheduledBatch, device: Device) -> ScheduledBatch:
        """The batch with these drafts as guesses, if what may follow them depends on them."""
        if not any(item.num_drafts and item.seq.follows_output for item in batch.items):
            return batch
        return self.fill(batch, device.read_back(self.tokens).tolist())


@dataclass(frozen=True, slots=True)
class SampledStates:
    """Hidden states of the rows that sample in a step, [rows, hidden]. rows: (seq_id, position) ->
    index of the row.
    """

    hidden: Tensor
    rows: Mapping[tuple[int, int], int]

    @classmethod
    def of(cls, hidden: Tensor, sampled: Iterable[tuple[Sequence, int]]) -> SampledStates:
        """sampled: the sequence and the position of each row."""
        return cls(hidden, {(s.seq_id, at): row for row, (s, at) in enumerate(sampled)})

    def before(self, seqs: Seq[Sequence], step: DraftStep, device: Device) -> Tensor:
        """Those of the token before each newest one, [rows of the step, hidden]; zeros where the
        step did not sample it.
        """
        keys = [(seq.seq_id, at - 1) for seq, at in zip(seqs, step.positions, strict=True)]
        rows = [self.rows.get(key, len(self.hidden)) for key in keys]
        zeros = self.hidden.new_zeros(1, self.hidden.shape[1])
        return torch.cat((self.hidden, zeros))[device.tensor(rows, torch.int64)]


@dataclass(eq=False)
class Drafter:
    """Runs the draft steps of a batch. The host waits for drafts only if a grammar limits the
    tokens after them. Penalties and bad words do not count earlier drafts of the same step.
    """

    model: Model | DraftModel
    attention: AttentionBackend
    sampler: Sampler
    vocabulary: DraftVocabulary
    device: Device

    def draft(self, batch: ScheduledBatch, steps: Iterable[DraftStep]) -> Drafts:
        """Run the steps one after the other; each begins with what the one before it sampled."""
        return Drafts.of(self._drafted(batch, steps))

    def _drafted(
        self, batch: ScheduledBatch, steps: Iterable[DraftStep]
    ) -> Iterator[tuple[DraftStep, Tensor]]:
        known: dict[Sequence, tuple[int, ...]] = {}  # the drafts that a grammar must know
        before: tuple[DraftStep, Tensor] | None = None
        runs: Tensor | None = None
        for step in steps:
            seqs = step.sequences(batch)
            ctx = draft_context(seqs, step, self.attention, self.device)
            if before is None:
                runs = self.vocabulary.runs(seqs)
            else:
                newest = rows_of(step, *before, self.device)
                ctx.token_ids[: len(newest)] = newest
            hidden = self.model.forward(ctx)[: len(seqs)]
            logits = masked(self.model.logits(hidden, runs), _masks(seqs, known), self.device)
            positions = [position + 1 for position in step.positions]
            tokens = self.sampler.sample(logits, seqs, positions).clamp_(min=0)
            if any(seq.grammar is not None for seq in seqs):
                sampled = self.device.read_back(tokens).tolist()
                for seq, token in zip(seqs, sampled, strict=True):
                    known[seq] = (*known.get(seq, ()), token)
            before = step, tokens
            yield before


def _masks(seqs: list[Sequence], known: Mapping[Sequence, tuple[int, ...]]) -> dict[int, bytes]:
    """The mask of each row whose token a grammar limits, after what was drafted; none after the end
    of a text.
    """
    masks = {}
    for row, seq in enumerate(seqs):
        drafted = known.get(seq, ())
        if seq.grammar is not None and len(made := seq.grammar.masks(drafted)) > len(drafted):
            masks[row] = made[-1]
    return masks


def draft_context(
    seqs: list[Sequence], step: DraftStep, attention: AttentionBackend, device: Device
) -> ForwardContext:
    """The context of a draft step, one row a sequence; token 0 where the host does not know it."""
    rows = [
        SequenceRows(seq.token_ids[position : position + 1] or [0], position, num_keys, 1)
        for seq, position, num_keys in zip(seqs, step.positions, step.num_keys, strict=True)
    ]
    return forward_context(rows, step.num_rows, step.kv, attention, device)


def rows_of(step: DraftStep, before: DraftStep, made: Tensor, device: Device) -> Tensor:
    """The rows of `made`, [rows of the step before, ...], that belong to the items of a step."""
    if step.items == before.items:
        return made
    return made[device.tensor([*map(before.items.index, step.items)], torch.int64)]


def padded(rows: Tensor, num_rows: int) -> Tensor:
    """The rows, [rows, ...], with zeros after them."""
    if len(rows) == num_rows:
        return rows
    made = rows.new_zeros(num_rows, *rows.shape[1:])
    made[: len(rows)] = rows
    return made
