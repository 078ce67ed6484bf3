"""Reads the arguments of a call as Gemma 4 writes them: {key:value,...}, keys without quotes, texts
between quotes of their own. Gives them out as JSON, as they come.

Source: the chat template of Gemma 4 (google/gemma-4-12B-it).
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

from nanoengine.text.answer_pieces import Kind, Piece, PieceReader, Steps, num_held_back
from nanoengine.text.checked_json import strict_json

CLOSERS = {"{": "}", "[": "]"}
# What the template writes of Python's values that are no texts and no numbers.
PYTHON_NAMES = {"None": None, "True": True, "False": False}
KEY_ENDS, VALUE_ENDS = re.compile("(?=[:,}])"), re.compile(r"(?=[,}\]])")
MAX_WORD = 4096  # characters of a key, or of a value without quotes


class BareObject:
    """Takes one object from the text of `reader`, which begins with it."""

    def __init__(self, reader: PieceReader, quote: str, call: int) -> None:
        """quote: the mark before and after a text. call: the pieces are arguments of this one."""
        self._reader = reader
        self._quote = quote
        self._call = call
        self._open: list[str] = []  # what closes each open bracket
        self._is_key = False  # whether a key comes next

    def read(self) -> Steps[None]:
        """Give out the object. It ends where its brackets do, or with the text."""
        reader = self._reader
        while (yield from reader.skip_spaces()):
            mark = yield from self._mark()
            if mark == self._quote:
                yield from self._text()
            elif mark == "":
                yield from self._word()
            else:
                reader.take(1)
                yield self._piece(self._after(mark))
                if not self._open:
                    return

    def _mark(self) -> Steps[str]:
        """What comes next: the quote, a bracket, a comma or a colon; "" before anything else."""
        if (yield from self._reader.past(0, self._quote)) is not None:
            return self._quote
        first = self._reader.left[0]
        return first if first in "{}[],:" else ""

    def _after(self, mark: str) -> str:
        """What a mark is in JSON. A bracket closes the one that was opened last, whatever it is."""
        if mark in CLOSERS:
            self._open.append(CLOSERS[mark])
        elif mark in "}]":
            mark = self._open.pop()
        in_object = bool(self._open) and self._open[-1] == "}"
        self._is_key = in_object and mark in "{,"
        return f"{mark} " if mark in ",:" else mark

    def _text(self) -> Steps[None]:
        """Give out a text as it comes. Between quotes nothing is escaped."""
        reader, quote = self._reader, self._quote
        reader.take(len(quote))
        yield self._piece('"')
        while (at := reader.left.find(quote)) < 0 and not reader.has_ended:
            certain = len(reader.left) - num_held_back(reader.left, (quote,))
            yield self._piece(inside(reader.take(certain)))
            yield None
        text = reader.take(len(reader.left) if at < 0 else at)
        yield self._piece(inside(text) + ('"' if at >= 0 else ""))
        reader.take(len(quote))

    def _word(self) -> Steps[None]:
        """Give out a key, or a value that is no text."""
        ends = KEY_ENDS if self._is_key else VALUE_ENDS
        yield self._piece((yield from word(self._reader, ends, self._is_key)))

    def _piece(self, text: str) -> Piece:
        return Piece(Kind.ARGUMENTS, text, self._call)


def inside(text: str) -> str:
    """A part of a text as JSON has it between quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def word(reader: PieceReader, ends: re.Pattern[str], is_key: bool) -> Steps[str]:
    """Take a key or a value without quotes, up to `ends` or of MAX_WORD characters, and return it
    as JSON: a key as a text, a value as what JSON or Python reads, or else as a text.
    """
    found = yield from reader.before(ends, MAX_WORD)
    text = (reader.take(MAX_WORD) if found is None else found).rstrip()
    value: Any = text
    if not is_key:
        with suppress(ValueError):
            value = PYTHON_NAMES[text] if text in PYTHON_NAMES else strict_json(text)
    return json.dumps(value, ensure_ascii=False)
