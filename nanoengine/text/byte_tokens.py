"""Tokens that are single bytes, in vocabularies whose other tokens are texts; and the letters of
vocabularies whose tokens are all of bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby

from tokenizers.pre_tokenizers import ByteLevel

REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level vocabularies write for bytes: one that prints is itself, the
    others follow in order.
    """
    letters = sorted(ByteLevel.alphabet())
    printed = [ord(letter) for letter in letters if ord(letter) < 256]
    others = sorted(set(range(256)) - set(printed))
    return dict(zip(letters, printed + others, strict=True))


BYTE_LETTERS = _byte_letters()


def with_replacements(tokens: Iterable[str]) -> Iterator[str]:
    """The tokens, with U+FFFD for each byte that is part of no character. `tokenizers` would give
    it for all bytes of a run in which one is.
    """
    for are_bytes, run in groupby(tokens, lambda token: BYTE_TOKEN.fullmatch(token) is not None):
        if not are_bytes:
            yield from run
            continue
        data = bytes(int(token[3:5], 16) for token in run)
        for char in data.decode(errors="surrogateescape"):  # one surrogate for each such byte
            if "\ud800" <= char <= "\udfff":
                yield REPLACEMENT
            else:
                yield from (f"<0x{byte:02X}>" for byte in char.encode())
