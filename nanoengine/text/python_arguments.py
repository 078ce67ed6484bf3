"""Reads the arguments of a call as Python writes them: key="text", other=[1, None]. Gives them out
as JSON, as they come.

Sources: the chat templates of LFM2.5 (LiquidAI/LFM2.5-8B-A1B) and OLMo 3.
"""

from __future__ import annotations

import re

from nanoengine.text.answer_pieces import Kind, Piece, PieceReader, Steps
from nanoengine.text.bare_object import inside, word

OPENERS = {"{": "{", "[": "[", "(": "["}  # JSON has no tuples
CLOSERS = {"{": "}", "[": "]", "(": "]"}
KEY_ENDS, VALUE_ENDS = re.compile(r"(?=[=:,)}\]])"), re.compile(r"(?=[:,)}\]])")
ESCAPE = re.compile(
    r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|([0-7]{1,3})|(.))", re.DOTALL
)
MAX_ESCAPE = 10  # characters
# What follows a backslash; another character keeps it.
ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}
ESCAPED |= {mark: mark for mark in "\\'\"/"}
MAX_SPACES = 16  # between a text and what follows it


class PythonArguments:
    """Takes the arguments of one call from the text of `reader`, which begins behind their "("."""

    def __init__(self, reader: PieceReader, call: int) -> None:
        """call: the pieces are arguments of this one."""
        self._reader = reader
        self._call = call
        self._open = ["}"]  # what closes each open bracket in JSON
        self._is_key = True  # whether a key comes next
        self._comma = ""  # before the next value; Python may end a list with one

    def read(self) -> Steps[None]:
        """Give out the arguments as an object. They end where their brackets do, or with the
        text.
        """
        reader = self._reader
        yield self._piece("{")
        while (yield from reader.skip_spaces()):
            first = reader.left[0]
            if first in "'\"":
                yield from self._text()
            elif first not in "{[()]}:=,":
                yield from self._word()
            else:
                reader.take(1)
                yield self._piece(self._mark(first))
                if not self._open:
                    return

    def _mark(self, mark: str) -> str:
        """What a mark is in JSON. A bracket closes the one that was opened last, whatever it is."""
        if mark in OPENERS:
            made = self._next() + OPENERS[mark]
            self._open.append(CLOSERS[mark])
            self._is_key = mark == "{"
            return made
        if mark in ")]}":
            self._comma = ""
            self._is_key = False
            return self._open.pop()
        self._is_key = mark == "," and self._open[-1] == "}"
        self._comma = ", " if mark == "," else ""
        return ": " if mark in ":=" else ""

    def _next(self) -> str:
        """The comma before a key or a value, if one is due."""
        comma, self._comma = self._comma, ""
        return comma

    def _text(self) -> Steps[None]:
        """Give out a text as it comes."""
        reader = self._reader
        quote = yield from self._quote()
        special = re.compile(rf"[\\{quote[0]}]")
        yield self._piece(self._next() + '"')
        while True:
            found = special.search(reader.left)
            yield self._piece(inside(reader.take(found.start() if found else len(reader.left))))
            if found is None and reader.has_ended:
                return
            if found is None:
                yield None
            elif found[0] == "\\":
                while len(reader.left) < MAX_ESCAPE and not reader.has_ended:
                    yield None
                yield self._piece(self._escape())
            elif (yield from self._is_end(quote)):
                reader.take(len(quote))
                yield self._piece('"')
                return
            else:
                yield self._piece(inside(reader.take(1)))

    def _quote(self) -> Steps[str]:
        """Take what a text begins with: a quote, or three of them."""
        reader = self._reader
        quote = reader.left[0]
        while reader.left in (quote, quote * 2) and not reader.has_ended:
            yield None
        is_long = reader.left.startswith(quote * 3)
        return reader.take(3 if is_long else 1)

    def _is_end(self, quote: str) -> Steps[bool]:
        """Whether a quote ends the text. Models leave apostrophes without a backslash, so one quote
        does only where the text can end.
        """
        reader = self._reader
        while True:
            if len(quote) == 3:
                is_short = quote.startswith(reader.left) and reader.left != quote
                if not is_short or reader.has_ended:
                    return reader.left.startswith(quote)
            else:
                rest = reader.left[1 : MAX_SPACES + 2].lstrip()
                if rest or reader.has_ended or len(reader.left) > MAX_SPACES + 1:
                    return not rest or rest[0] in ",:)]}"
            yield None

    def _escape(self) -> str:
        """Take what a backslash begins, as JSON has it."""
        found = ESCAPE.match(self._reader.left)
        if found is None:  # the text ends
            return inside(self._reader.take(1))
        self._reader.take(found.end())
        *digits, mark = found.groups()
        if mark is not None:
            return inside(ESCAPED.get(mark, found[0]))
        code = next(int(text, 8 if text is digits[3] else 16) for text in digits if text)
        if 0xD800 <= code < 0xE000:  # half of a character
            return f"\\u{code:04x}"
        return inside(chr(code) if code < 0x110000 else found[0])

    def _word(self) -> Steps[None]:
        """Give out a key, or a value that is no text."""
        ends = KEY_ENDS if self._is_key else VALUE_ENDS
        made = yield from word(self._reader, ends, self._is_key)
        yield self._piece(self._next() + made)

    def _piece(self, text: str) -> Piece:
        return Piece(Kind.ARGUMENTS, text, self._call)
