"""AssistantDrafter: guesses by a small model that reads the KV of the large one (assistant.py).

All guesses of a step are draft steps before it. They store nothing, so that there is nothing to
overwrite.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from nanoengine.context import AttentionBackend
from nanoengine.devices.device import Device
from nanoengine.engine.draft_vocabulary import DraftVocabulary
from nanoengine.engine.drafter import Drafts, SampledStates, draft_context, padded, rows_of
from nanoengine.engine.sampler import Sampler
from nanoengine.kv.open_step import DraftStep
from nanoengine.models.assistant import Assistant
from nanoengine.sequence import ScheduledBatch


@dataclass(eq=False)
class AssistantDrafter:
    """Runs an assistant. Penalties, bad words and grammars do not limit what it guesses."""

    assistant: Assistant
    attention: AttentionBackend
    sampler: Sampler
    vocabulary: DraftVocabulary
    device: Device
    _seen: SampledStates | None = None  # by the model's output head, in the newest step

    def see(self, batch: ScheduledBatch, hidden: Tensor) -> None:
        """Keep what the output head sees of the rows that sample: hidden, [rows, hidden], is of the
        model's last layer.
        """
        self._seen = SampledStates.of(self.assistant.seen(hidden), batch.sampled)

    def draft(self, batch: ScheduledBatch, steps: Iterable[DraftStep]) -> Drafts:
        """As Drafter.draft."""
        return Drafts.of(self._drafted(batch, steps))

    def _drafted(
        self, batch: ScheduledBatch, steps: Iterable[DraftStep]
    ) -> Iterator[tuple[DraftStep, Tensor]]:
        before: DraftStep | None = None
        runs: Tensor | None = None
        for number, step in enumerate(steps):
            seqs = step.sequences(batch)
            ctx = draft_context(seqs, step, self.attention, self.device)
            if before is None:
                assert self._seen is not None
                runs = self.vocabulary.runs(seqs)
                tokens, given = ctx.token_ids, self._seen.before(seqs, step, self.device)
            else:
                tokens = rows_of(step, before, tokens, self.device)
                given = rows_of(step, before, given, self.device)
            num_rows = len(ctx.token_ids)
            made = self.assistant(ctx, padded(tokens, num_rows), padded(given, num_rows))
            made = made[: len(seqs)]
            places = [at + 1 + number for at in step.positions]
            logits = self.assistant.logits(made, runs)
            tokens = self.sampler.sample(logits, seqs, places).clamp_(min=0)
            given = self.assistant.after(made)
            yield step, tokens
            before = step
