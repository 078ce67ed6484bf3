"""Keeps the thoughts of a text within a budget, and begins its form after them.

Knows token ids and the marks of thoughts (reasoning.py); no requests, no logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile

from nanoengine.sequence import Grammar
from nanoengine.text.reasoning import ReasoningSyntax, mark_ids
from nanoengine.text.tokenizer import Tokenizer

MAX_TAIL = 64  # tokens at a prompt's end that may begin the thoughts


class Phase(Enum):
    """Where a text stands: it may begin its thoughts, thinks, has ended them, and, where a header
    stands before a form, has that behind it.
    """

    BEFORE = "before"
    THINKING = "thinking"
    HEADER = "header"
    AFTER = "after"


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The tokens that thoughts begin and end with, and which of all may be thought. header: what
    stands between thoughts and a form.

    any_token, no_end: bits of token ids, the lowest first: all, and all that end no text. is_space:
    whether a token is spaces alone, which may stand before the thoughts. vocab_size: a tokenizer
    may have more tokens than the model.
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]
    header: tuple[int, ...]
    any_token: bytes
    no_end: bytes
    is_space: Callable[[int], bool]
    vocab_size: int

    @classmethod
    def of(
        cls,
        syntax: ReasoningSyntax,
        tokenizer: Tokenizer,
        vocab_size: int,
        num_tokens: int,
        eos_ids: list[int],
    ) -> ThinkingMarks:
        """Those of a model with a vocabulary of `vocab_size`. num_tokens: its tokenizer's, if these
        are more.
        """
        begin, end = mark_ids(syntax, tokenizer)
        every = bytes([0xFF]) * -(-num_tokens // 8)

        def is_space(token_id: int) -> bool:
            return tokenizer.decode([token_id], skip_special_tokens=False).isspace()

        header = (*tokenizer.encode(syntax.header, add_special_tokens=False),)
        return cls(begin, end, header, every, _with_bits(every, eos_ids, 0), is_space, vocab_size)


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a text. num: tokens of the thoughts, of what they begin with, or of the header.
    matched: how many of the last tokens are the beginning of what thoughts end with.
    """

    phase: Phase
    num: int = 0
    matched: int = 0


class ThinkingState:
    """Where one text stands in its thoughts, and after them in its form, if it must have one."""

    def __init__(
        self, marks: ThinkingMarks, is_open: bool, budget: int | None, form: Grammar | None
    ) -> None:
        """is_open: the prompt has begun the thoughts. budget: most tokens of them."""
        self._marks = marks
        self._budget = budget
        self._form = form
        self._place = Place(Phase.THINKING if is_open else Phase.BEFORE)
        self._may_begin = not is_open and self._is_new(marks.begin[0])

    def accept(self, token_id: int) -> bool:
        """Go on by a token; True if the text is complete. Raises what the form raises."""
        self._place, is_forms = self._after(self._place, token_id)
        return is_forms and self._form is not None and self._form.accept(token_id)

    def masks(self, guesses: tuple[int, ...]) -> list[bytes]:
        """Which tokens may come next, and which after each guess, as far as guesses fit: bits of
        token ids, the lowest first. The state stays as it is.
        """
        made: list[bytes] = []
        place = self._place
        for number, guess in enumerate((*guesses, None)):
            if place.phase is Phase.AFTER:
                return made + self._form_masks(guesses[number:])
            made.append(self._mask(place))
            if guess is None or not made[-1][guess >> 3] >> (guess & 7) & 1:
                break
            place, is_forms = self._after(place, guess)
            if is_forms:
                return made + self._form_masks(guesses[number:])[1:]
        return made

    def forced(self) -> tuple[int, ...]:
        """Tokens that alone may come next: the end of thoughts at their budget, or the form's."""
        return tokens_within(self._marks.vocab_size, self._forced())

    def is_end(self, token_id: int) -> bool:
        """As of the form."""
        return self._form is not None and self._form.is_end(token_id)

    def _forced(self) -> tuple[int, ...]:
        place = self._place
        if place.phase is Phase.AFTER:
            return () if self._form is None else self._form.forced()
        if place.phase is Phase.BEFORE and place.num and self._form is not None:
            return self._marks.begin[place.num :]
        if place.phase is Phase.HEADER:
            return self._marks.header[place.num :]
        return self._marks.end[place.matched :] if self._is_spent(place) else ()

    def _is_spent(self, place: Place) -> bool:
        """Whether the thoughts must end here."""
        is_thinking = place.phase is Phase.THINKING
        return is_thinking and self._budget is not None and place.num >= self._budget

    def _after(self, place: Place, token_id: int) -> tuple[Place, bool]:
        """The place after a token, and whether the token is the form's."""
        marks = self._marks
        if place.phase is Phase.AFTER:
            return place, True
        if place.phase is Phase.BEFORE:
            if self._form is None and not place.num and marks.is_space(token_id):
                return place, False
            if not self._may_begin or token_id != marks.begin[place.num]:
                return Place(Phase.AFTER), True
            if place.num + 1 < len(marks.begin):
                return Place(Phase.BEFORE, place.num + 1), False
            return Place(Phase.THINKING), False
        if place.phase is Phase.HEADER:
            return self._in_header(place.num + 1), False
        matched = self._matched(place.matched, token_id)
        if matched == len(marks.end):
            return self._in_header(0), False
        return Place(Phase.THINKING, place.num + 1, matched), False

    def _in_header(self, num: int) -> Place:
        """Behind so many of its tokens."""
        is_whole = self._form is None or num == len(self._marks.header)
        return Place(Phase.AFTER) if is_whole else Place(Phase.HEADER, num)

    def _is_new(self, token_id: int) -> bool:
        """Whether a token begins thoughts and no form: the first of several could be the form's."""
        if self._form is None or len(self._marks.begin) == 1:
            return True
        (first,) = self._form.masks(())
        return not first[token_id >> 3] >> (token_id & 7) & 1

    def _matched(self, matched: int, token_id: int) -> int:
        """How many tokens of the end the text ends with after one more."""
        end = self._marks.end
        tail = (*end[:matched], token_id)
        return next(n for n in range(len(tail), -1, -1) if tail[len(tail) - n :] == end[:n])

    def _mask(self, place: Place) -> bytes:
        marks = self._marks
        if place.phase is Phase.THINKING:
            if self._is_spent(place):
                return _with_bits(bytes(len(marks.any_token)), [marks.end[place.matched]], 1)
            return marks.any_token if self._form is None else marks.no_end
        if self._form is None:
            return marks.any_token
        if place.num or place.phase is Phase.HEADER:
            only = marks.header if place.phase is Phase.HEADER else marks.begin
            return _with_bits(bytes(len(marks.any_token)), [only[place.num]], 1)
        (first,) = self._form.masks(())
        return _with_bits(first, marks.begin[:1], 1) if self._may_begin else first

    def _form_masks(self, guesses: tuple[int, ...]) -> list[bytes]:
        if self._form is None:
            return [self._marks.any_token] * (len(guesses) + 1)
        return self._form.masks(guesses)


def tokens_within(vocab_size: int, token_ids: Iterable[int]) -> tuple[int, ...]:
    """The tokens before the first one that the model does not have."""
    return tuple(takewhile(vocab_size.__gt__, token_ids))


def begins_open(syntax: ReasoningSyntax, tokenizer: Tokenizer, prompt: list[int]) -> bool:
    """Whether a prompt has begun the thoughts of its answer."""
    tail = tokenizer.decode(prompt[-MAX_TAIL:], skip_special_tokens=False)
    return syntax.is_open_after(tail)


def _with_bits(mask: bytes, token_ids: tuple[int, ...] | list[int], value: int) -> bytes:
    """A mask with the bits of some tokens set or cleared."""
    made = bytearray(mask)
    for token_id in token_ids:
        bit = 1 << (token_id & 7)
        made[token_id >> 3] = made[token_id >> 3] | bit if value else made[token_id >> 3] & ~bit
    return bytes(made)
