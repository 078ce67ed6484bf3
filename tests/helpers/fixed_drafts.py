"""Drafts without a model, for tests that compare answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from nanoengine.engine.drafter import Drafts, DraftStep
from nanoengine.outputs import RequestOutput
from nanoengine.sequence import ScheduledBatch


class FixedDrafter:
    """Makes the drafts of a function of (sequence id, position), without a model."""

    def __init__(self, token: Callable[[int, int], int]) -> None:
        self._token = token

    def draft(self, batch: ScheduledBatch, steps: Iterable[DraftStep]) -> Drafts:
        made: list[int] = []
        places: dict[int, list[int]] = {}
        for step in steps:
            for item, position in zip(step.items, step.positions, strict=True):
                places.setdefault(item, []).append(len(made))
                made.append(self._token(batch.items[item].seq.seq_id, position + 1))
        tokens = torch.tensor(made, dtype=torch.int64)
        return Drafts(tokens, places)


def scored(outputs: list[RequestOutput]) -> list[tuple[list[int], Tensor]]:
    """Ids and log probabilities."""
    made = [output.outputs[0] for output in outputs]
    return [
        (
            m.token_ids,
            torch.tensor([e[t].logprob for e, t in zip(m.logprobs, m.token_ids, strict=True)]),
        )
        for m in made
    ]
