"""Which tokens of a sequence are guessed for a step; the same forward pass checks them.

Tokens that a grammar forces are guessed first. Then comes prompt lookup (Saxena 2023): the tokens
that followed an earlier occurrence of the last tokens are likely to follow again. If lookup finds
nothing, or was wrong lately, the step may draft (drafter.py) or take the guesses of the MTP head
(mtp_drafter.py). A wrong guess costs its rows in the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nanoengine.sequence import DraftLength, ScheduledSequence, Sequence

LONGEST, SHORTEST = 4, 2  # tokens that must repeat
DOUBTFUL = 16  # steps in which drafts go first after a wrong guess; doubled after each further one
MOST_DOUBTFUL = 256
CAREFUL = 2  # most guesses in place of drafts, until some were right
# Forced tokens that are guesses of a step. One alone does not pay: steps with guesses are not
# replayed.
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
        """The first guesses, `most` at the most."""
        tokens = self.tokens[:most]
        num_drafts = min(self.num_drafts, most - len(tokens))
        return Guesses(tokens, num_drafts, self.has_drafted and most > 0)

    def of(self, seq: Sequence, num_tokens: int) -> ScheduledSequence:
        """The item of a step that computes `num_tokens` tokens, these guesses among them."""
        return ScheduledSequence(
            seq,
            num_tokens,
            guesses=self.tokens,
            num_drafts=self.num_drafts,
            has_drafted=self.has_drafted,
        )


def guesses_for(seq: Sequence, most: int, num_looked_up: int, drafts: bool) -> Guesses:
    """At most `most` guesses at what follows a decoding sequence: the tokens that its grammar
    forces; else up to `num_looked_up` by lookup; else the MTP head's, or drafts. drafts: whether
    they are allowed, as other decodes wait for them.
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
    """What chooses how many tokens to draft: by the MTP head or, if allowed, by the model."""
    return seq.mtp_length or (seq.draft_length if drafts else None)


def is_draft_due(seqs: Iterable[Sequence], drafts: bool) -> bool:
    """Whether one of these drafts in its next step, or begins to time steps."""
    lengths = (_length(seq, drafts) for seq in seqs)
    return any(length is not None and length.is_due for length in lengths)


def record_guesses(item: ScheduledSequence, num_right: int, is_timed: bool) -> None:
    """Count the guesses of a step that has ended. is_timed: it had all decodes and no prefill."""
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
        self._num_doubtful = 0  # steps in which drafts still go first
        self._doubt = DOUBTFUL  # the same, after the next wrong guess
        self._was_right = False

    @property
    def is_trusted(self) -> bool:
        """Whether its guesses go before drafts: not for some steps after wrong ones."""
        return self._num_doubtful == 0

    @property
    def is_careful(self) -> bool:
        """Whether it may make only a few guesses in place of drafts: its last ones were wrong."""
        return not self._was_right

    def record(self, num_guesses: int, num_right: int) -> None:
        """Note how many of its guesses in a step were right; num_guesses is 0 if it made none."""
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
