"""Drafter: guesses by decode steps of the model itself over the part of the KV on the device.

No byte crosses the link for a draft: tokens go from step to step on the device. What a draft writes
is overwritten by the step that checks it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from nanoengine.context import AttentionBackend, KVCache
from nanoengine.devices.device import Device
from nanoengine.engine.sampler import Sampler
from nanoengine.engine.step_inputs import SequenceRows, forward_context
from nanoengine.engine.token_masks import masked
from nanoengine.models.decoder import Model
from nanoengine.sequence import ScheduledBatch

NOT_DRAFTED = 0  # stands where no draft was made; it is checked as all guesses are


class DraftStep(Protocol):
    """A decode step that drafts (kv.open_step.DraftStep): the batch's items that have a row in it,
    their positions, and the keys that they see.
    """

    @property
    def kv(self) -> KVCache: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def items(self) -> tuple[int, ...]: ...
    @property
    def positions(self) -> tuple[int, ...]: ...
    @property
    def num_keys(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts of a step: int64 [n] on the device. places: for each item that drafted, where its
    drafts are, in order.
    """

    tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    places: dict[int, list[int]] = field(default_factory=dict)

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


class Drafter:
    """Runs the draft steps of a batch. The host waits for drafts only where a grammar says which
    tokens may follow them. Penalties and bad words do not know the drafts before one of a step.
    """

    def __init__(
        self, model: Model, attention: AttentionBackend, sampler: Sampler, device: Device
    ) -> None:
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._device = device

    def draft(self, batch: ScheduledBatch, steps: Iterable[DraftStep]) -> Drafts:
        """Run the steps one after the other; each begins with what the one before it drew."""
        made: list[Tensor] = []
        places: dict[int, list[int]] = {}
        known: dict[int, tuple[int, ...]] = {}
        num_made = 0
        for step in steps:
            newest = {item: at[-1] for item, at in places.items()}
            made.append(self._next(batch, step, newest, made, self._masks(batch, step, known)))
            self._read(batch, step, made[-1], known)
            for place, item in enumerate(step.items, num_made):
                places.setdefault(item, []).append(place)
            num_made += len(step.items)
        return Drafts(torch.cat(made), places) if made else Drafts()

    def _next(
        self,
        batch: ScheduledBatch,
        step: DraftStep,
        newest: dict[int, int],
        made: list[Tensor],
        masks: dict[int, bytes],
    ) -> Tensor:
        """What each row of a step draws, int64 [rows]. newest: where among all that was made the
        newest draft of each item is. masks: of rows whose tokens a grammar limits.
        """
        seqs = [batch.items[item].seq for item in step.items]
        rows = [
            SequenceRows(seq.token_ids[position : position + 1] or [0], position, num_keys, 1)
            for seq, position, num_keys in zip(seqs, step.positions, step.num_keys, strict=True)
        ]
        ctx = forward_context(rows, step.num_rows, step.kv, self._attention, self._device)
        if made:
            num_before = sum(map(len, made[:-1]))
            at = [newest[item] - num_before for item in step.items]
            last = made[-1]
            is_same = at == [*range(len(last))]
            ctx.token_ids[: len(rows)] = (
                last if is_same else last[self._device.tensor(at, torch.int64)]
            )
        hidden = self._model.forward(ctx)
        logits = masked(self._model.logits(hidden[: len(rows)]), masks, self._device)
        positions = [position + 1 for position in step.positions]
        return self._sampler.sample(logits, seqs, positions).clamp_(min=0)

    def _masks(
        self, batch: ScheduledBatch, step: DraftStep, known: dict[int, tuple[int, ...]]
    ) -> dict[int, bytes]:
        """The masks of a step's rows after what was drafted; none after the end of a text."""
        masks = {}
        for row, item in enumerate(step.items):
            grammar, drafted = batch.items[item].seq.grammar, known.get(item, ())
            if grammar is not None and len(made := grammar.masks(drafted)) > len(drafted):
                masks[row] = made[-1]
        return masks

    def _read(
        self,
        batch: ScheduledBatch,
        step: DraftStep,
        tokens: Tensor,
        known: dict[int, tuple[int, ...]],
    ) -> None:
        """Note the drafts that grammars must know."""
        if any(batch.items[item].seq.grammar is not None for item in step.items):
            for item, token in zip(
                step.items, self._device.read_back(tokens).tolist(), strict=True
            ):
                known[item] = (*known.get(item, ()), token)
