"""Drafts without a model, for tests that compare answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from nanoengine.context import MakeTensor
from nanoengine.engine.drafter import Drafts
from nanoengine.kv.open_step import DraftStep
from nanoengine.outputs import RequestOutput
from nanoengine.sequence import ScheduledBatch


def _on_host(numbers: object, dtype: torch.dtype) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


class FixedDrafter:
    """Makes the drafts of a function of (sequence id, position), without a model."""

    def __init__(self, token: Callable[[int, int], int], tensor: MakeTensor = _on_host) -> None:
        self._token, self._tensor = token, tensor

    def draft(self, batch: ScheduledBatch, steps: Iterable[DraftStep]) -> Drafts:
        made: list[int] = []
        places: dict[int, list[int]] = {}
        for step in steps:
            for item, position in zip(step.items, step.positions, strict=True):
                places.setdefault(item, []).append(len(made))
                made.append(self._token(batch.items[item].seq.seq_id, position + 1))
        tokens = self._tensor(made, torch.int64)
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
