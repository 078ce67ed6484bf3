"""StepTokens: what a step samples, on its way to the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

from torch import Tensor

from nanoengine.devices.device import Readable
from nanoengine.engine.drafter import Drafts
from nanoengine.engine.logprobs import StepScores
from nanoengine.sequence import ScheduledBatch


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What a step samples: the next token of each item of its batch that does, in order, and those
    after its guesses.

    tokens: int64 [n], on the device. drafts: the guesses that the step made itself; of_resting:
    those that it made for steps of others. numbers: all on their way to the host, then what the
    model's own head guesses after each token, if it has one; so are the scores that requests ask
    for.
    """

    batch: ScheduledBatch
    tokens: Tensor
    numbers: Readable
    scores: StepScores
    drafts: Drafts
    of_resting: Drafts

    def read(self) -> tuple[ScheduledBatch, list[int], list[int]]:
        """Wait for the step: its batch with the drafts as guesses, the tokens that its items
        sample, and what the model's own head guesses after each; []: nothing.
        """
        left = iter(self.numbers.tolist())
        tokens, drafts, of_resting = (
            [*islice(left, len(made))]
            for made in (self.tokens, self.drafts.tokens, self.of_resting.tokens)
        )
        batch = self.drafts.fill(self.batch, drafts)
        filled = self.of_resting.fill(batch.of_resting, of_resting).items
        resting = tuple(filled[index] for index in self.of_resting.places)
        return replace(batch, resting=resting), tokens, [*left]

    def places(self, batch: ScheduledBatch, starts: list[int]) -> list[tuple[int, int]]:
        """Rows of a batch, which begin at `starts`, whose tokens this step samples, and where."""
        sampled = [item.seq.seq_id for item in self.batch.items if item.samples]
        places = {seq_id: place for place, seq_id in enumerate(sampled)}
        return [
            (row, places[item.seq.seq_id])
            for row, item in zip(starts, batch.items, strict=False)
            if item.start == item.seq.num_tokens
        ]
