"""Pieces of an answer: its text, its thoughts and its calls of tools, as they come."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

Result = TypeVar("Result")

MAX_END = 64  # characters of what ends a part of an answer
MAX_HELD_SPACES = 256  # before the end of a part, of which they are not


class Kind(Enum):
    """What a piece belongs to."""

    CONTENT = "content"
    REASONING = "reasoning"
    NAME = "name"
    ARGUMENTS = "arguments"


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one kind. call: of a name and of arguments, which call of the answer; a call's name
    comes once and whole, then its arguments, which are the text of a JSON object. end: of content,
    where it ends in the answer, in characters.
    """

    kind: Kind
    text: str
    call: int = 0
    end: int = field(default=0, compare=False)


Steps = Generator[Piece | None, None, Result]  # None: more text is needed


class PieceReader(ABC):
    """Splits a text that comes in parts. How it is cut into parts changes no piece but its length.

    A subclass says in `_read` what it takes from `left`, the text that nobody has taken yet.
    """

    def __init__(self) -> None:
        self.left = ""
        self.has_ended = False
        self._end = 0  # where what is left ends in the answer
        self._steps = self._read()

    def feed(self, text: str, end: int) -> list[Piece]:
        """The pieces that more text makes certain. end: where it ends in the answer; but for the
        first one, it follows the text before without a gap.
        """
        self.left += text
        self._end = end
        return self._pieces()

    def end(self) -> list[Piece]:
        """The pieces of what is left, as no more text comes."""
        self.has_ended = True
        return self._pieces()

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Give out pieces, and None where more text is needed."""

    def _pieces(self) -> list[Piece]:
        found = []
        for piece in self._steps:
            if piece is None:
                break
            if piece.text:
                end = self._end - len(self.left)
                found.append(Piece(piece.kind, piece.text, piece.call, end))
        return found

    def take(self, length: int) -> str:
        """The beginning of what is left, which is left no more."""
        taken, self.left = self.left[:length], self.left[length:]
        return taken

    def skip_spaces(self, spaces: str | None = None) -> Steps[bool]:
        """Take spaces up to the next other character; False if the text ends before it. spaces:
        which ones; None: all that Unicode has.
        """
        while not (left := self.left.lstrip(spaces)) and not self.has_ended:
            yield None
        self.left = left
        return bool(left)

    def before(self, ends: re.Pattern[str], most: float = math.inf) -> Steps[str | None]:
        """Take what comes before `ends`, and what that matches, of up to MAX_END characters. None,
        and nothing is taken, if over `most` characters come before, or the text ends.
        """
        start = 0
        while (found := ends.search(self.left, start)) is None:
            if self.has_ended or len(self.left) > most:
                return None
            start = max(0, len(self.left) - MAX_END)
            yield None
        if found.start() > most:
            return None
        taken = self.take(found.start())
        self.take(found.end() - found.start())
        return taken

    def past(self, at: int, mark: str) -> Steps[int | None]:
        """Where a mark ends that stands at `at`, after spaces; None if something else does."""
        while True:
            found = self.left[at:].lstrip()
            if found.startswith(mark):
                return len(self.left) - len(found) + len(mark)
            if self.has_ended or not mark.startswith(found):
                return None
            yield None

    def skip(self, mark: str) -> Steps[bool]:
        """Take a mark, and spaces before it, if it comes next."""
        end = yield from self.past(0, mark)
        self.take(end or 0)
        return end is not None

    def until(self, marks: tuple[str, ...], kind: Kind, call: int = 0) -> Steps[str | None]:
        """Give out the text before the first of the marks as it comes, and take that mark, too.
        Returns it; None if the text ends before.
        """
        while True:
            at, mark = first_of(self.left, marks)
            if mark:
                yield Piece(kind, self.take(at), call)
                self.take(len(mark))
                return mark
            held = 0 if self.has_ended else num_held_back(self.left, marks)
            yield Piece(kind, self.take(len(self.left) - held), call)
            if self.has_ended:
                return None
            yield None


def first_of(text: str, marks: Iterable[str]) -> tuple[int, str]:
    """Where the first of the marks stands, and which it is; "" if there is none."""
    found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    at, _, mark = min(found, default=(-1, 0, ""))
    return at, mark


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces with neighbours of one kind as one; names stay alone, and contents with something
    between them in the answer.
    """
    made: list[Piece] = []
    for piece in pieces:
        if made and _goes_on(made[-1], piece):
            made[-1] = Piece(piece.kind, made[-1].text + piece.text, piece.call, piece.end)
        else:
            made.append(piece)
    return made


def _goes_on(last: Piece, piece: Piece) -> bool:
    if (last.kind, last.call) != (piece.kind, piece.call) or piece.kind is Kind.NAME:
        return False
    return piece.kind is not Kind.CONTENT or last.end == piece.end - len(piece.text)


def num_held_back(text: str, stops: Iterable[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of a stop string.

    As text grows, `len(text)` minus this never falls: the start of a stop string stays one.
    """
    return HeldBack(stops).num(text)


class HeldBack:
    """`num_held_back` of a text that grows. It looks no more at what was found to begin no stop,
    so that its work for a step does not grow with the lengths of stops.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._starts = dict.fromkeys(stops, 0)  # where one that may have begun does

    def num(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a proper prefix of a stop string."""
        for stop, start in self._starts.items():
            at = text.find(stop[0], max(start, len(text) - len(stop) + 1))
            while at >= 0 and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1)
            self._starts[stop] = len(text) if at < 0 else at
        return len(text) - min(self._starts.values(), default=len(text))
