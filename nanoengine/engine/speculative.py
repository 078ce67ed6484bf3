"""Which tokens of a sequence are guessed for a step; the same forward pass checks them.

Where a grammar leaves one way to go on, that is the guess.

Prompt lookup (Saxena 2023): texts repeat themselves, so the tokens that followed an earlier
occurrence of the last tokens are likely to follow again. A guess needs no draft model; a wrong one
costs its rows in the forward pass. Where it finds nothing, or was wrong lately, the step may draft
(drafter.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nanoengine.config.engine import EngineConfig
from nanoengine.sequence import ScheduledSequence, Sequence

LONGEST, SHORTEST = 4, 2  # tokens that must repeat
DOUBTFUL = 16  # steps after a wrong guess in which drafts go first
# Tokens of a step and sequence that a grammar forces. A single one is not worth it: no step with
# guesses is replayed.
LEAST_FORCED, MOST_FORCED = 2, 16


@dataclass(frozen=True, slots=True)
class Guesses:
    """Guesses for a sequence: tokens, or how many are to be drafted."""

    tokens: tuple[int, ...] = ()
    num_drafts: int = 0

    def __len__(self) -> int:
        return len(self.tokens) + self.num_drafts

    def first(self, most: int) -> Guesses:
        """At most so many of them."""
        return Guesses(self.tokens[:most], min(self.num_drafts, most))


def guesses_for(seq: Sequence, most: int, num_looked_up: int, drafts: bool) -> Guesses:
    """Guesses at what follows a decoding sequence: what its grammar forces; else up to
    `num_looked_up` by lookup; if it finds none, drafts, where they are allowed: they would keep
    other decodes waiting. most: of any of them.
    """
    most = min(most, seq.request.max_total_tokens - seq.num_tokens - 1)
    if most < 1 or seq.is_prefill or not seq.may_guess:
        return Guesses()
    forced = () if seq.grammar is None else seq.grammar.forced()[: min(most, MOST_FORCED)]
    if len(forced) >= LEAST_FORCED:
        return Guesses(forced)
    guesser, draft_length = seq.guesser, seq.draft_length if drafts else None
    if guesser is not None and (draft_length is None or guesser.is_trusted):
        found = guesser.guess(seq.token_ids, min(most, num_looked_up))
        if found:
            return Guesses(found)
    if draft_length is None:
        return Guesses()
    return Guesses(num_drafts=min(most, draft_length.choose()))


def is_draft_due(seqs: Iterable[Sequence]) -> bool:
    """Whether one of these decoding sequences drafts in its next step, or begins to time steps."""
    return any(seq.draft_length is not None and seq.draft_length.is_due for seq in seqs)


def most_guesses(config: EngineConfig, max_tokens: int) -> int:
    """Most guesses of a step and sequences that run in it. max_tokens: most tokens of a step.

    If nobody asked for any, as many as there may be sequences: memory for their logits is planned.
    """
    if config.asks_for_guesses:
        return max_tokens
    return min(max_tokens, max(config.max_num_seqs, 2 * MOST_FORCED))


def record_guesses(item: ScheduledSequence, num_right: int, is_decode: bool) -> None:
    """Count the guesses of a step that has ended. is_decode: whether the step only decoded."""
    seq, num_guesses = item.seq, len(item.guesses)
    seq.metrics.num_guessed += num_guesses
    seq.metrics.num_accepted += num_right
    if seq.guesser is not None:
        seq.guesser.record(0 if item.has_drafted else num_guesses, num_right)
    if seq.draft_length is not None and (item.has_drafted or not num_guesses):
        seq.draft_length.record(num_guesses, num_right, is_decode, item.num_ahead > 0)


class PromptLookup:
    """Finds earlier occurrences of the end of one growing sequence."""

    def __init__(self) -> None:
        self._tokens: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._num_tokens = 0
        self._num_doubtful = 0  # steps that it sits out

    @property
    def is_trusted(self) -> bool:
        """Whether its guesses are worth more than drafts: not after one that was mostly wrong."""
        return self._num_doubtful == 0

    def record(self, num_guesses: int, num_right: int) -> None:
        """What became of its guesses in a step; 0: it made none."""
        self._num_doubtful = max(0, self._num_doubtful - 1)
        if 2 * num_right < num_guesses:
            self._num_doubtful = DOUBTFUL

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
