"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json.

Knows the kinds of llama.cpp that models here come with, "gpt2" (byte-level BPE), "llama"
(SentencePiece BPE) and "gemma4" (BPE of characters), and makes a `tokenizers` pipeline with the
same ids of each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from nanoengine.errors import CorruptModelError, UnsupportedModelError
from nanoengine.loading.gguf.metadata import Metadata
from nanoengine.loading.gguf.word_patterns import (
    OTHER_NAMES,
    PRE_TOKENIZERS,
    WITH_BOS,
    WITH_WHOLE_WORDS,
    WORD_PATTERNS,
)

# Texts that end a generation whatever `eos_token_id` says, as in llama.cpp.
END_TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>"),
        *("<end_of_turn>", "<turn|>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
        *("<end_of_utterance>", "<|return|>", "<|call|>"),
        "<|tool_response>",  # where Gemma 4 waits for what a tool says
        *("[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>"),  # MiniMax's and DeepSeek's
    )
)
# Where all of these are, the last one ends a message of several, and no generation (gpt-oss).
MESSAGE_TEXTS = ("<|return|>", "<|call|>", "<|end|>")
# Of SentencePiece's tokens: most characters, and pairs that make one, on average. Gemma 3 has the
# most: runs of 31 spaces, and twice as many pairs as tokens.
MAX_PIECE, MAX_PAIRS = 1000, 16
SPACE = "\u2581"  # SentencePiece's sign for a space
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # types of tokens; 1: normal, 5: unused
# From tokens of characters and of bytes to their text.
_TO_TEXT = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
_VERBATIM = dict.fromkeys(("lstrip", "normalized", "single_word"), False)


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The tokens of a file, by id. special: left out of decoded text; user_defined: not."""

    texts: list[str]
    types: list[int]
    ends: list[int]
    special: frozenset[int]
    user_defined: frozenset[int]

    def ids(self) -> dict[str, int]:
        """Ids by text."""
        return {text: i for i, text in enumerate(self.texts)}

    def unknown(self) -> str | None:
        """The token that stands for what has none."""
        return next((self.texts[i] for i, kind in enumerate(self.types) if kind == _UNKNOWN), None)


def write_tokenizer(metadata: Metadata, target: Path, vocab_size: int) -> list[int]:
    """tokenizer.json and tokenizer_config.json; returns every id that ends a generation.

    Raises CorruptModelError and UnsupportedModelError.
    """
    vocabulary = _read_vocabulary(metadata, vocab_size)
    named = {
        key: metadata.token_id(f"{key}_token_id", len(vocabulary.texts))
        for key in ("bos", "eos", "eot", "eom")
    }
    backend, adds_bos = _BUILDERS[_kind(metadata)](metadata, vocabulary)
    strips = _stripping(metadata, vocabulary)
    added = {
        i: {"special": i in vocabulary.special, "rstrip": i in strips} | _VERBATIM
        for i in sorted(vocabulary.special | vocabulary.user_defined)
    }
    for ids in (vocabulary.special, vocabulary.user_defined):
        backend.add_tokens([AddedToken(vocabulary.texts[i], **added[i]) for i in sorted(ids)])
    add_around(
        backend,
        named["bos"] if _flag(metadata, "add_bos_token", adds_bos) else None,
        named["eos"] if _flag(metadata, "add_eos_token", False) else None,
    )
    # The library's own `save` says of a full disk only that something went wrong.
    (target / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")
    content = json.dumps(_config(metadata, vocabulary, added), indent=2, ensure_ascii=False)
    (target / "tokenizer_config.json").write_text(content + "\n", encoding="utf-8")
    ends = [i for key in ("eos", "eot", "eom") if (i := named[key]) is not None]
    return list(dict.fromkeys(ends + vocabulary.ends))


def _kind(metadata: Metadata) -> str:
    kind = str(metadata.get("tokenizer.ggml.model", str))
    if kind not in _BUILDERS:
        raise UnsupportedModelError(
            f"{metadata.path}: tokenizer model {kind!r} is not supported; "
            f"supported: {', '.join(sorted(_BUILDERS))}"
        )
    return kind


def _read_vocabulary(metadata: Metadata, vocab_size: int) -> _Vocabulary:
    texts = metadata.strings("tokenizer.ggml.tokens")
    texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
    if len(set(texts)) != len(texts) or len(texts) > vocab_size:
        raise CorruptModelError(
            f"{metadata.path}: {len(texts)} tokens ({len(set(texts))} different) "
            f"for an embedding of {vocab_size} rows"
        )
    types = metadata.get("tokenizer.ggml.token_type", list, [1] * len(texts))
    _check_length(metadata, "token types", types, texts)
    if not all(type(kind) is int and 0 <= kind <= _BYTE for kind in types):
        raise CorruptModelError(f"{metadata.path}: token types must be integers from 0 to {_BYTE}")
    kept = MESSAGE_TEXTS[-1:] if all(text in texts for text in MESSAGE_TEXTS) else ()
    ends = [i for i, text in enumerate(texts) if text in END_TEXTS and text not in kept]
    special = {i for i, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)}.union(ends)
    user_defined = {i for i, kind in enumerate(types) if kind == _USER_DEFINED} - special
    return _Vocabulary(texts, types, ends, frozenset(special), frozenset(user_defined))


def _check_length(metadata: Metadata, what: str, values: list[Any], texts: list[str]) -> None:
    if len(values) != len(texts):
        raise CorruptModelError(f"{metadata.path}: {len(values)} {what} for {len(texts)} tokens")


def _byte_level(metadata: Metadata, vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    pre = metadata.get("tokenizer.ggml.pre", str, "default")
    backend = build_byte_level_bpe(vocabulary.ids(), _merges(metadata), pre, metadata.path)
    return backend, OTHER_NAMES.get(pre, pre) in WITH_BOS


def _sentencepiece(
    metadata: Metadata, vocabulary: _Vocabulary
) -> tuple[tokenizers.Tokenizer, bool]:
    """Of the pairs of neighbours whose texts together are a token, the one of the highest score is
    joined first (Sennrich et al. 2016, as SentencePiece has it); what is no token in the end is
    spelt in bytes.
    """
    scores = metadata.get("tokenizer.ggml.scores", list)
    _check_length(metadata, "token scores", scores, vocabulary.texts)
    if not all(type(score) in (int, float) and not math.isnan(score) for score in scores):
        raise CorruptModelError(f"{metadata.path}: token scores must be numbers")
    backend = _bpe(
        metadata.path,
        vocabulary.ids(),
        _joins(metadata.path, vocabulary, scores),
        unk_token=vocabulary.unknown(),
        fuse_unk=True,
        byte_fallback=True,
    )
    # A space goes before a text, and before what follows a special token.
    adds_space = _flag(metadata, "add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    prefix = [normalizers.Prepend(SPACE)] if adds_space else []
    backend.normalizer = normalizers.Sequence([*prefix, spaces])
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    backend.decoder = decoders.Sequence([*_TO_TEXT, *strip])
    return backend, True


def _joins(path: Path, vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """The pairs that make a token, the best first. scores: of every id. Raises CorruptModelError
    for tokens with more pairs than a model can have.
    """
    apart = (_UNKNOWN, _CONTROL, _BYTE)
    pieces = {text: i for text, i in vocabulary.ids().items() if vocabulary.types[i] not in apart}
    joined = sorted(pieces, key=lambda text: (-scores[pieces[text]], pieces[text]))
    splits = (
        (text[:cut], text[cut:])
        for text in joined
        for cut in range(1, min(len(text), MAX_PIECE))
        if text[:cut] in pieces and text[cut:] in pieces
    )
    num_tokens = len(vocabulary.texts)
    most = MAX_PAIRS * num_tokens
    merges = list(islice(splits, most + 1))
    if len(merges) > most or any(len(text) > MAX_PIECE for text in pieces):
        raise CorruptModelError(
            f"{path}: the tokens are too long, or can be joined of too many pairs: the limits are "
            f"{MAX_PIECE} characters, and {MAX_PAIRS} pairs for each of {num_tokens} tokens"
        )
    return merges


def _of_characters(
    metadata: Metadata, vocabulary: _Vocabulary
) -> tuple[tokenizers.Tokenizer, bool]:
    unknown = vocabulary.unknown()
    return build_character_bpe(vocabulary.ids(), _merges(metadata), unknown, metadata.path), True


_BUILDERS = {"gemma4": _of_characters, "gpt2": _byte_level, "llama": _sentencepiece}


def _stripping(metadata: Metadata, vocabulary: _Vocabulary) -> set[int]:
    """Added tokens that swallow the spaces after them: by the model's name, as llama.cpp."""
    name = metadata.get("general.name", str, "").lower()
    if not any(part in name for part in ("phi-3", "phi3")):
        return set()
    kept = ("<unk>", "<s>", "<|endoftext|>")
    added = vocabulary.special | vocabulary.user_defined
    return {i for i in added if vocabulary.texts[i] not in kept}


def _merges(metadata: Metadata) -> list[tuple[str, str]]:
    pairs = []
    for merge in metadata.strings("tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise CorruptModelError(f"{metadata.path}: {merge!r} is no merge of two tokens")
        pairs.append((left, right))
    return pairs


def _flag(metadata: Metadata, name: str, default: bool) -> bool:
    return bool(metadata.get(f"tokenizer.ggml.{name}", bool, default))


def _config(
    metadata: Metadata, vocabulary: _Vocabulary, added: Mapping[int, Mapping[str, bool]]
) -> dict[str, Any]:
    texts = vocabulary.texts
    content: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.number("context_length"),
        "added_tokens_decoder": {str(i): {"content": texts[i], **a} for i, a in added.items()},
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.token_id(f"{key}_token_id", len(texts))
        if token_id is not None:
            content[f"{name}_token"] = texts[token_id]
    if metadata.has("tokenizer.chat_template"):
        content["chat_template"] = metadata.get("tokenizer.chat_template", str)
    return content


def build_byte_level_bpe(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    pre: str,
    where: object = "the tokenizer",
) -> tokenizers.Tokenizer:
    """A GPT-2 style tokenizer with the ids of llama.cpp for `tokenizer.ggml.pre` equal to `pre`.

    Like llama.cpp it normalises nothing and drops bytes that the vocabulary lacks. where: the file,
    for errors.
    Raises UnsupportedModelError for another `pre`, CorruptModelError for merges that fit no
    vocabulary.
    """
    pre = OTHER_NAMES.get(pre, pre)
    if pre not in PRE_TOKENIZERS:
        known = ", ".join((*PRE_TOKENIZERS, *OTHER_NAMES))
        raise UnsupportedModelError(f"{where} splits text by {pre[:100]!r}; supported: {known}")
    backend = _bpe(where, vocab, merges, ignore_merges=pre in WITH_WHOLE_WORDS)
    backend.pre_tokenizer = pre_tokenizers.Sequence(_pre_tokenizer_steps(vocab, pre))
    backend.decoder = decoders.ByteLevel()
    return backend


def build_character_bpe(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    unknown: str | None,
    where: object = "the tokenizer",
) -> tokenizers.Tokenizer:
    """A tokenizer with the ids of llama.cpp for `tokenizer.ggml.model` "gemma4": merges of
    characters in runs with and without newlines, each of which is one token if it can be; what is
    no token in the end is spelt in bytes. Raises CorruptModelError.
    """
    backend = _bpe(
        where,
        vocab,
        merges,
        # Where no merge leads to runs of newlines they are tokens all the same.
        ignore_merges=not any("\n" in left for left, _ in merges),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    backend.decoder = decoders.Sequence(_TO_TEXT)
    return backend


def _bpe(
    where: object, vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], **settings: Any
) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(dict(vocab), list(merges), **settings))
    except Exception as error:  # the library raises plain Exception
        raise CorruptModelError(
            f"{where}: the merges do not fit the vocabulary: {str(error)[:100]}"
        ) from error


def _pre_tokenizer_steps(vocab: Mapping[str, int], pre: str) -> list[pre_tokenizers.PreTokenizer]:
    steps: list[pre_tokenizers.PreTokenizer]
    if pre not in WORD_PATTERNS:  # GPT-2's pattern
        steps = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    else:
        steps = [
            *(pre_tokenizers.Split(Regex(each), "isolated") for each in WORD_PATTERNS[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    missing = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - vocab.keys())
    if missing:
        # The BPE would drop them too, but merge their neighbours first, which llama.cpp does not.
        pattern = "|".join(f"\\x{{{ord(char):x}}}" for char in missing)
        steps.append(pre_tokenizers.Split(Regex(pattern), "removed"))
    return steps


def add_around(backend: tokenizers.Tokenizer, prefix_id: int | None, suffix_id: int | None) -> None:
    """These tokens go around a text when special tokens are wanted. CorruptModelError for others
    than the vocabulary's."""
    ids = [i for i in (prefix_id, suffix_id) if i is not None]
    if not ids:
        return
    parts = {i: backend.id_to_token(i) for i in ids}
    if None in parts.values():
        raise CorruptModelError(f"a token id among {ids} lies outside the tokenizer's vocabulary")
    prefix = [] if prefix_id is None else [str(parts[prefix_id])]
    suffix = [] if suffix_id is None else [str(parts[suffix_id])]
    # Pieces are named by aliases, since a token's text may hold the template's own syntax.
    aliases = [{"id": text, "ids": [i], "tokens": [text]} for i, text in parts.items()]
    backend.post_processor = processors.TemplateProcessing(
        single=[*prefix, "$A", *suffix], pair=None, special_tokens=aliases
    )
