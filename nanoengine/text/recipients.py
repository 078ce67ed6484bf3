"""Reads an answer that is a row of messages, each to a recipient: Muse Glimmer's.

    to=self<|message|>thoughts<|eom|><|start|>assistant to=user<|message|>content<|eot|>

A prompt ends with `<|start|>assistant`. Sources: the quoted parts of the model's chat template, and
vLLM's and SGLang's parsers.
"""

from __future__ import annotations

import re

from nanoengine.text.answer_pieces import Kind, Piece, PieceReader, Steps, first_of, num_held_back

START, MESSAGE = "<|start|>", "<|message|>"
ENDS = ("<|eom|>", "<|eot|>", START)
MAX_WORD = 64  # characters of a role and of a recipient
SPACES, ROLE = r"\s{0,16}", rf"\w{{0,{MAX_WORD}}}"
TO = rf"to=([^\s<]{{1,{MAX_WORD}}})"
HEADER = re.compile(
    rf"{SPACES}(?:{re.escape(START)}{SPACES}{ROLE}{SPACES})?(?:{TO}{SPACES})?{re.escape(MESSAGE)}"
)
# The parts of it that have come.
HEADER_BEGINS = re.compile(HEADER.pattern.removesuffix(re.escape(MESSAGE)))
# The model may go on to another recipient without an end: this is before its mark then.
SWITCH = re.compile(rf"{SPACES}(?<!\w){TO}$")
MAY_SWITCH = re.compile(rf"{SPACES}(?:(?<!\w)(?:t|to|to=[^\s<]{{0,{MAX_WORD}}}))?$")
MAX_SWITCH = 128  # characters of the last two


class RecipientParser(PieceReader):
    """Splits an answer into thoughts, which are messages to the model itself, and content. Calls of
    tools are content, too.
    """

    def __init__(self, is_open: bool) -> None:
        """is_open: whether the prompt has begun the thoughts."""
        self._is_open = is_open
        super().__init__()

    def _read(self) -> Steps[None]:
        recipient = "self" if self._is_open else (yield from self._header())
        while recipient is not None:
            kind = Kind.REASONING if recipient == "self" else Kind.CONTENT
            recipient = yield from self._message(kind)

    def _header(self) -> Steps[str | None]:
        """Take the header of a message; who it is for, the user if there is none. None: the text
        has ended, perhaps within a header.
        """
        while True:
            if found := HEADER.match(self.left):
                self.take(found.end())
                return found[1] or "user"
            may_be = _may_be_header(self.left)
            if self.has_ended or not may_be:
                break
            yield None
        if may_be and self.left.lstrip().startswith((START, "to=")):
            self.take(len(self.left))
        yield from self.skip(START)
        return "user" if self.left else None

    def _message(self, kind: Kind) -> Steps[str | None]:
        """Give out a message, and take what ends it. Returns as `_header`."""
        marks, is_in_word = (*ENDS, MESSAGE), False
        while True:
            at, mark = first_of(self.left, marks)
            if mark == MESSAGE:
                switch = SWITCH.search(self.left, max(0, at - MAX_SWITCH), at)
                if is_in_word and self.left.startswith("to=") and switch and not switch.start():
                    switch = None  # of a word that began before what is left
                yield Piece(kind, self.take(at if switch is None else switch.start()))
                self.take(len(MESSAGE) + (len(switch[0]) if switch else 0))
                return switch[1] if switch else "user"
            if mark:
                yield Piece(kind, self.take(at))
                self.take(0 if mark == START else len(mark))  # a header begins with that one
                return (yield from self._header())
            if self.has_ended:
                yield Piece(kind, self.take(len(self.left)))
                return None
            certain = len(self.left) - num_held_back(self.left, marks)
            held = MAY_SWITCH.search(self.left, max(0, certain - MAX_SWITCH), certain)
            given = self.take(held.start() if held else certain)
            is_in_word = bool(re.search(r"\w$", given)) if given else is_in_word
            yield Piece(kind, given)
            yield None


def _may_be_header(text: str) -> bool:
    """Whether more text could make a header of it."""
    found = HEADER_BEGINS.match(text)
    left = text[found.end() :] if found else text
    return any(mark.startswith(left) for mark in (START, "to=", MESSAGE))
