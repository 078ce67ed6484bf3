"""Turns token ids into text one at a time, never half a character; tells the bytes of a token."""

from __future__ import annotations

from collections.abc import Sequence

from nanoengine.text.byte_tokens import BYTE_LETTERS, BYTE_TOKEN, REPLACEMENT
from nanoengine.text.tokenizer import Tokenizer

# After this many tokens without a complete end, some text is given out anyway. A character has at
# most 4 bytes, so half of the tokens hold the last character and the text before it.
MAX_PENDING_TOKENS = 8
MAX_BROKEN = 3  # bytes of a character that lacks one


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """What a token adds to a text, in UTF-8, with its leading space; of a part of a character that
    part's bytes. A special token adds its name.
    """
    # After itself: a decoder may strip the space of a first token.
    before = tokenizer.decode([token_id], skip_special_tokens=False)
    text = tokenizer.decode([token_id, token_id], skip_special_tokens=False)[len(before) :]
    if REPLACEMENT not in text:
        return text.encode()
    token = tokenizer.backend.id_to_token(token_id) or ""
    if named := BYTE_TOKEN.fullmatch(token):
        return bytes([int(named[1], 16)])
    if all(letter in BYTE_LETTERS for letter in token):
        return bytes(BYTE_LETTERS[letter] for letter in token)
    return text.encode()


def text_after(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    token_ids: Sequence[int],
    skip_special_tokens: bool = True,
) -> str:
    """What tokens add to the text of their prompt."""
    before, head = _context(tokenizer, prompt)
    return tokenizer.decode([*before, *token_ids], skip_special_tokens)[len(head) :]


def _context(tokenizer: Tokenizer, prompt: Sequence[int]) -> tuple[list[int], str]:
    """The end of a prompt that a text goes on from, whole characters, and its text: SentencePiece's
    decoders leave out the space of a first token. After a special token a text begins anew.
    """
    special = tokenizer.special_ids
    for num in range(1, MAX_BROKEN + 2) if prompt and prompt[-1] not in special else ():
        before = [token_id for token_id in prompt[-num:] if token_id not in special]
        head = tokenizer.decode(before)
        if REPLACEMENT not in head:
            return before, head
    return [], ""


class IncrementalDetokenizer:
    """Turns the tokens of one sequence into text one at a time, never half a character.

    Each token decodes a window of recent ids again. The window is cut where the text is complete,
    so the work per token does not grow. Text given out never changes; it equals `text_after` of all
    ids.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt: Sequence[int] = ()
    ) -> None:
        """prompt: what comes before the sequence."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # ids[:_settled] are complete text and serve as context
        self._window, head = _context(tokenizer, prompt)
        self._settled = len(self._window)
        self._given = len(head)  # characters of the window's text that were given out
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All text given out so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def add(self, token_id: int) -> str:
        """Append a token; returns the text that became final, "" inside a character."""
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
        """End the sequence; returns the text held back."""
        return self._give(self._decode(self._window))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)

    def _give(self, text: str) -> str:
        """Give out the rest of the window's text; its newest ids stay as context."""
        new = text[self._given :]
        if new:
            self._pieces.append(new)
        self._window = self._window[self._settled :]
        self._settled = len(self._window)
        self._given = len(self._decode(self._window))
        return new

    def _give_part(self, text: str) -> str:
        """Give out all but the last character of a window that has long had no complete end.

        Only the last character can still change, and its bytes are in the last three tokens, each
        with a U+FFFD or all with one. A cut inside an earlier character affects only text already
        given out, because positions count from the end.
        """
        window = self._window[-MAX_PENDING_TOKENS // 2 :]
        rest = self._decode(window)
        held = min(MAX_BROKEN, _num_broken(text), _num_broken(rest))
        new = text[self._given : len(text) - held]
        self._pieces.append(new)
        self._window, self._settled = window, 0
        self._given = len(rest) - held
        return new


def _num_broken(text: str) -> int:
    """How many U+FFFD a text ends with."""
    return len(text) - len(text.rstrip(REPLACEMENT))
