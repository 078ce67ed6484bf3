"""StepTokens: the tokens that a step samples, on their way to the host."""

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
    """The tokens that a step samples: for each item in order, those after its guesses and the next.

    tokens: int64 [n], on the device. drafts: the guesses that the step made for itself; of_resting:
    those for the next steps of resting sequences. numbers: tokens, drafts, of_resting and then the
    MTP head's guess after each token, on their way to the host. scores: those asked for.
    """

    batch: ScheduledBatch
    tokens: Tensor
    numbers: Readable
    scores: StepScores
    drafts: Drafts
    of_resting: Drafts

    def read(self) -> tuple[ScheduledBatch, list[int], list[int]]:
        """Wait for the step. Returns its batch with the drafts as guesses, the tokens that its
        items sample, and the MTP head's guess after each; [] if there is none.
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
        """Which tokens of the next batch this step samples: (row there, index in `tokens`). starts:
        the first row of each item.
        """
        sampled = [item.seq.seq_id for item in self.batch.items if item.samples]
        places = {seq_id: place for place, seq_id in enumerate(sampled)}
        return [
            (row, places[item.seq.seq_id])
            for row, item in zip(starts, batch.items, strict=False)
            if item.start == item.seq.num_tokens
        ]
