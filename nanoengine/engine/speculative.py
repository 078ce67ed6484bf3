"""Which tokens of a sequence are guessed for a step; the same forward pass checks them.

Where a grammar leaves one way to go on, that is the guess.

Prompt lookup (Saxena 2023): texts repeat themselves, so the tokens that followed an earlier
occurrence of the last tokens are likely to follow again. A guess needs no draft model; a wrong one
costs its rows in the forward pass. Where it finds nothing, or was wrong lately, the step may draft
(drafter.py), or take what the model's own head guesses (mtp_drafter.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nanoengine.config.engine import EngineConfig
from nanoengine.sequence import DraftLength, ScheduledSequence, Sequence

LONGEST, SHORTEST = 4, 2  # tokens that must repeat
DOUBTFUL = 16  # steps after a wrong guess in which drafts go first; then twice as many, and so on
MOST_DOUBTFUL = 256
CAREFUL = 2  # guesses of a step that may have been drafts, until some were right
# Tokens of a step and sequence that a grammar forces. A single one is not worth it: no step with
# guesses is replayed.
LEAST_FORCED, MOST_FORCED = 2, 16


@dataclass(frozen=True, slots=True)
class Guesses:
    """Guesses for a sequence: tokens, and how many are to be drafted after them. has_drafted: as
    in ScheduledSequence.
    """

    tokens: tuple[int, ...] = ()
    num_drafts: int = 0
    has_drafted: bool = False

    def __len__(self) -> int:
        return len(self.tokens) + self.num_drafts

    def first(self, most: int) -> Guesses:
        """At most so many of them."""
        tokens = self.tokens[:most]
        num_drafts = min(self.num_drafts, most - len(tokens))
        return Guesses(tokens, num_drafts, self.has_drafted and most > 0)

    def of(self, seq: Sequence, num_tokens: int) -> ScheduledSequence:
        """The sequence with so many tokens in a step, these guesses among them."""
        return ScheduledSequence(
            seq,
            num_tokens,
            guesses=self.tokens,
            num_drafts=self.num_drafts,
            has_drafted=self.has_drafted,
        )


def guesses_for(seq: Sequence, most: int, num_looked_up: int, drafts: bool) -> Guesses:
    """Guesses at what follows a decoding sequence: what its grammar forces; else up to
    `num_looked_up` by lookup; if it finds none, what the model's own head guesses, or drafts, where
    these are allowed: they would keep other decodes waiting. most: of any of them.
    """
    most = min(most, seq.request.max_total_tokens - seq.num_tokens - 1)
    if most < 1 or seq.is_prefill or not seq.may_guess:
        return Guesses()
    forced = () if seq.grammar is None else seq.grammar.forced()[: min(most, MOST_FORCED)]
    if len(forced) >= LEAST_FORCED:
        return Guesses(forced)
    guesser, draft_length, known = seq.guesser, _length(seq, drafts), seq.next_guesses
    if guesser is not None and (draft_length is None or guesser.is_trusted):
        if draft_length is not None and guesser.is_careful:
            num_looked_up = min(num_looked_up, CAREFUL)
        found = guesser.guess(seq.token_ids, min(most, num_looked_up))
        if found:
            return Guesses(found)
    if known is not None and seq.mtp_length is None:
        return Guesses(known[:most], has_drafted=bool(known))
    if draft_length is None:
        return Guesses()
    number = min(most, draft_length.choose())
    if seq.mtp_length is None:
        return Guesses(num_drafts=number)
    if known is None or not number:
        return Guesses()
    return Guesses(known, number - 1, has_drafted=True)


def _length(seq: Sequence, drafts: bool = True) -> DraftLength | None:
    """How many tokens are drafted for a sequence, by its model's own head or, where `drafts` are
    allowed, by the whole of it.
    """
    return seq.mtp_length or (seq.draft_length if drafts else None)


def is_draft_due(seqs: Iterable[Sequence], drafts: bool) -> bool:
    """Whether one of these decoding sequences drafts in its next step, or begins to time steps.
    drafts: as in guesses_for.
    """
    lengths = (_length(seq, drafts) for seq in seqs)
    return any(length is not None and length.is_due for length in lengths)


def most_guesses(config: EngineConfig, max_tokens: int) -> int:
    """Most guesses of a step and sequences that run in it: memory for their logits is planned.
    max_tokens: most tokens of a step.
    """
    return min(max_tokens, config.sampled_rows)


def record_guesses(item: ScheduledSequence, num_right: int, is_timed: bool) -> None:
    """Count the guesses of a step that has ended. is_timed: whether it only decoded, and all."""
    seq, num_guesses = item.seq, len(item.guesses)
    has_rested = seq.next_guesses is not None and seq.mtp_length is None
    seq.metrics.num_guessed += num_guesses
    seq.metrics.num_accepted += num_right
    if seq.guesser is not None:
        seq.guesser.record(0 if item.has_drafted else num_guesses, num_right)
    length = _length(seq)
    if length is not None and (item.has_drafted or not num_guesses):
        is_timed &= not has_rested
        length.record(num_guesses, num_right, is_timed, item.num_ahead > 0)


class PromptLookup:
    """Finds earlier occurrences of the end of one growing sequence."""

    def __init__(self) -> None:
        self._tokens: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._num_tokens = 0
        self._num_doubtful = 0  # steps that it sits out
        self._doubt = DOUBTFUL  # how many it is to sit out next
        self._was_right = False

    @property
    def is_trusted(self) -> bool:
        """Whether its guesses are worth more than drafts: not after one that was mostly wrong."""
        return self._num_doubtful == 0

    @property
    def is_careful(self) -> bool:
        """Whether few guesses may take the place of drafts, as the last ones were not right."""
        return not self._was_right

    def record(self, num_guesses: int, num_right: int) -> None:
        """What became of its guesses in a step; 0: it made none."""
        self._num_doubtful = max(0, self._num_doubtful - 1)
        if not num_guesses:
            return
        self._was_right = 2 * num_right >= num_guesses
        if self._was_right:
            self._doubt = DOUBTFUL
        else:
            self._num_doubtful = self._doubt
            self._doubt = min(2 * self._doubt, MOST_DOUBTFUL)

    def guess(self, token_ids: Seq[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens that followed the last occurrence of the longest repeated suffix;
        none if no two tokens repeat. token_ids must only grow from call to call.
        """
        tokens, num = self._grown(token_ids), len(token_ids)
        if most < 1 or num <= SHORTEST:
            return ()
        ends = np.flatnonzero(tokens[: num - 1] == tokens[num - 1])
        found = None
        for length in range(2, LONGEST + 1):
            ends = ends[ends >= length - 1] if length <= num else ends[:0]
            ends = ends[tokens[ends - length + 1] == tokens[num - length]] if len(ends) else ends
            if not len(ends):
                break
            found = int(ends[-1])
        if found is None:
            return ()
        return tuple(tokens[found + 1 : found + 1 + most].tolist())

    def _grown(self, token_ids: Seq[int]) -> npt.NDArray[np.int32]:
        """All tokens as an array; copies new ones into a buffer that doubles when it is full."""
        num = len(token_ids)
        if num > len(self._tokens):
            room = np.empty(2 * num, np.int32)
            room[: self._num_tokens] = self._tokens[: self._num_tokens]
            self._tokens = room
        self._tokens[self._num_tokens : num] = token_ids[self._num_tokens :]
        self._num_tokens = num
        return self._tokens[:num]
