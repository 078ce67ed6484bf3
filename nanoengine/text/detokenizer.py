"""Token ids to text as they come, never half a character."""

from __future__ import annotations

from collections.abc import Sequence

from nanoengine.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# After so many tokens without a clean end some text is given out anyway. A code point is at most 4
# bytes, so half of them hold the last one and what is before it.
MAX_PENDING_TOKENS = 8


class IncrementalDetokenizer:
    """Turns the tokens of one sequence into text as they come, never showing half a code point.

    A window of recent ids is decoded again for every token. It is cut where the text so far is
    complete, so the work per token does not grow. What was given out never changes; over byte-level
    vocabularies the whole equals `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []  # ids[:_settled] are complete text and serve as context
        self._settled = 0
        self._given = 0  # characters of the window's text that were given out
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Everything given out so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def add(self, token_id: int) -> str:
        """Append a token; returns the text that became final, often "" inside a code point."""
        if self._skip and token_id in self._tokenizer.special_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._give(text)
        if len(self._window) - self._settled >= MAX_PENDING_TOKENS:
            return self._give_part(text)
        return ""

    def flush(self) -> str:
        """No more tokens follow: returns what was held back."""
        return self._give(self._decode(self._window))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)

    def _give(self, text: str) -> str:
        """Give out the rest of the window's text; its newest ids stay as context for the next."""
        new = text[self._given :]
        if new:
            self._pieces.append(new)
        self._window = self._window[self._settled :]
        self._settled = len(self._window)
        self._given = len(self._decode(self._window))
        return new

    def _give_part(self, text: str) -> str:
        """Give out all but the last character of a window that has long had no clean end.

        Only that one can still change, and its bytes are in the last three tokens. A cut inside an
        earlier code point spoils only text that was given out, so positions count from the end.
        """
        new = text[self._given : -1]
        self._pieces.append(new)
        self._window = self._window[-MAX_PENDING_TOKENS // 2 :]
        self._settled = 0
        self._given = len(self._decode(self._window)) - 1
        return new
