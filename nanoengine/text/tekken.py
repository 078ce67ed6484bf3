"""Reads Mistral's tekken.json: sequences of bytes by rank, as tiktoken has them, behind the special
tokens. What it means is as in mistral-common's Tekkenizer.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from nanoengine.errors import CorruptModelError, shown
from nanoengine.text.byte_tokens import BYTE_LETTERS
from nanoengine.text.checked_json import MAX_REASON, MAX_SIZE, read_json

NAME = "tekken.json"
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# Of files of 2024, which do not list them.
_FIRST_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
_MOST_BYTES = 1024  # of a token; those of published files have up to 128
_LETTERS = {byte: letter for letter, byte in BYTE_LETTERS.items()}


class Tekken:
    """What the file in a folder says."""

    def __init__(self, folder: Path) -> None:
        """Raises CorruptModelError, ModelLoadError."""
        self._path = folder / NAME
        content = read_json(self._path)
        self._config, self._content = self._object(content.get("config"), "config"), content
        self._special = [*self._special_tokens()]

    def special_tokens(self) -> dict[str, str]:
        """Texts by names such as "eos_token"."""
        return {name: text for name, text in NAMES.items() if text in self._special}

    def special_ids(self) -> dict[str, int]:
        """Ids of special tokens by their texts."""
        return {text: token_id for token_id, text in enumerate(self._special)}

    def backend(self) -> tokenizers.Tokenizer:
        """The tokenizer, which puts <s> before a text. Raises CorruptModelError."""
        ranks = {each: rank for rank, each in enumerate(self._byte_sequences())}
        vocab = self.special_ids()
        vocab |= {_letters(each): len(self._special) + rank for each, rank in ranks.items()}
        pattern: Any = self._config.get("pattern")
        try:
            merges = [*chain.from_iterable(_merges(each, ranks) for each in ranks)]
            backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
            words = pre_tokenizers.Split(Regex(pattern), "isolated")
            bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            backend.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])
        except Exception as error:  # the library raises plain Exception
            raise CorruptModelError(
                f"{self._path} is no valid tokenizer: {str(error)[:MAX_REASON]}"
            ) from error
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(text, special=True) for text in self._special])
        if (bos := vocab.get(NAMES["bos_token"])) is not None:
            backend.post_processor = processors.TemplateProcessing(
                single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)]
            )
        return backend

    def _special_tokens(self) -> Iterator[str]:
        """Those that are listed, by rank, and fillers up to as many as there are to be."""
        texts: list[Any] = [*_FIRST_SPECIAL]
        if self._content.get("special_tokens") is not None:
            entries = self._entries("special_tokens")
            by_rank = {str(each.get("rank")): each.get("token_str") for each in entries}
            texts = [by_rank.get(str(rank)) for rank in range(len(entries))]
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise CorruptModelError(
                f"{self._path}: special_tokens have no text for each rank from 0 on: "
                f"{shown(wrong[0])}"
            )
        yield from texts
        wanted = self._size("default_num_special_tokens", len(texts))
        yield from (f"<SPECIAL_{i}>" for i in range(len(texts), wanted))

    def _byte_sequences(self) -> Iterator[bytes]:
        """Of the tokens behind the special ones, by rank; of a file's last ones there is no id."""
        entries = self._entries("vocab")
        size = self._size("default_vocab_size", len(entries) + len(self._special))
        for entry in entries[: max(0, size - len(self._special))]:
            text = entry.get("token_bytes")
            try:
                made = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
            except ValueError:
                made = b""
            if not 0 < len(made) <= _MOST_BYTES:
                raise CorruptModelError(
                    f"{self._path}: token_bytes is {shown(text)}, not base64 of 1 to "
                    f"{_MOST_BYTES} bytes"
                )
            yield made

    def _size(self, name: str, default: int) -> int:
        value = self._config.get(name, default)
        if type(value) is not int or not 0 <= value <= MAX_SIZE:
            raise CorruptModelError(
                f"{self._path}: {name} must be from 0 to {MAX_SIZE}, not {shown(value)}"
            )
        return value

    def _entries(self, name: str) -> list[dict[str, Any]]:
        value = self._content.get(name)
        if not isinstance(value, list):
            raise CorruptModelError(f"{self._path}: {name} is {shown(value)}, not a list")
        return [self._object(each, f"an entry of {name}") for each in value]

    def _object(self, value: Any, what: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise CorruptModelError(f"{self._path}: {what} is {shown(value)}, not an object")
        return value


def _letters(of: bytes) -> str:
    return "".join(map(_LETTERS.__getitem__, of))


def _merges(token: bytes, ranks: dict[bytes, int]) -> Iterator[tuple[str, str]]:
    """The pairs of tokens that make this one, the first ones first."""
    halves = ((token[:i], token[i:]) for i in range(1, len(token)))
    pairs = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
    for left, right in sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]])):
        yield _letters(left), _letters(right)
