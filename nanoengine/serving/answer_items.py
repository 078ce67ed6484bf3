"""Groups what an answer says into items: texts, thoughts and calls, in the order of the answer.

The two APIs whose answers are lists of items write them: responses_answers.py, messages_answers.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from nanoengine.text.answer_parser import AnswerParser, new_id
from nanoengine.text.answer_pieces import Kind, Piece


class Step(Enum):
    """What happens to an item."""

    BEGINS = "begins"
    GROWS = "grows"
    ENDS = "ends"


@dataclass(slots=True)
class Item:
    """A text, thoughts, or a call, whose kind is NAME; text: of a call, its arguments. index: which
    one of the answer. id: of a call. end: of a text, where it ends in the answer so far. entries:
    log-probabilities of its tokens.
    """

    kind: Kind
    index: int
    name: str = ""
    text: str = ""
    id: str = field(default_factory=new_id)
    end: int = 0
    entries: list[dict[str, Any]] = field(default_factory=list)


class AnswerItems:
    """The items of one answer, which come with its text. An answer that says nothing has an empty
    text. has_ended: no more items come.
    """

    def __init__(self, parser: AnswerParser) -> None:
        self.items: list[Item] = []
        self.has_ended = False
        self._parser = parser

    @property
    def has_calls(self) -> bool:
        """Whether a tool is called."""
        return any(item.kind is Kind.NAME for item in self.items)

    def feed(self, text: str, is_last: bool) -> Iterator[tuple[Step, Item, str]]:
        """What more text does to items: the step, the item, and its new text. is_last: no more text
        comes, so that the last item ends.
        """
        for piece in self._parser.read(text, is_last):
            if not self._goes_on_with(piece):
                yield from self._end()
                yield Step.BEGINS, self._begun(piece.kind, piece.text), ""
            if piece.kind is not Kind.NAME:
                self.items[-1].text += piece.text
                self.items[-1].end = piece.end
                yield Step.GROWS, self.items[-1], piece.text
        if is_last:
            if not self.items:
                yield Step.BEGINS, self._begun(Kind.CONTENT, ""), ""
            self.has_ended = True
            yield from self._end()

    def _goes_on_with(self, piece: Piece) -> bool:
        kind = Kind.NAME if piece.kind is Kind.ARGUMENTS else piece.kind
        return bool(self.items) and self.items[-1].kind is kind and piece.kind is not Kind.NAME

    def _begun(self, kind: Kind, text: str) -> Item:
        name = text if kind is Kind.NAME else ""
        self.items.append(Item(kind, len(self.items), name))
        return self.items[-1]

    def _end(self) -> Iterator[tuple[Step, Item, str]]:
        if self.items:
            yield Step.ENDS, self.items[-1], ""
