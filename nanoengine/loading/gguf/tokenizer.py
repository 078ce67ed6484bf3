"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json.

Knows the kinds of llama.cpp that models here come with, "gpt2" (byte-level BPE), "llama"
(SentencePiece BPE) and "gemma4" (BPE of characters), and makes a `tokenizers` pipeline with the
same ids of each.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from nanoengine.errors import CorruptModelError, UnsupportedModelError
from nanoengine.loading.gguf.metadata import Metadata

# Texts that end a generation whatever `eos_token_id` says, as in llama.cpp.
END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<turn|>",
        "<eos>",
        "<|tool_response>",  # where Gemma 4 waits for what a tool says
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "[e~[",  # MiniMax's
        "<end_of_utterance>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek's
        "<|return|>",
        "<|call|>",
    }
)
# Where all of these are, the last one ends a message of several, and no generation (gpt-oss).
MESSAGE_TEXTS = ("<|return|>", "<|call|>", "<|end|>")
# Of SentencePiece's tokens: most characters, and pairs that make one, on average. Gemma 3 has the
# most: runs of 31 spaces, and twice as many pairs as tokens.
MAX_PIECE, MAX_PAIRS = 1000, 16
SPACE = "\u2581"  # SentencePiece's sign for a space
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # types of tokens; 1: normal, 5: unused
_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LETTERS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OF_ONE_CASE = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*)"
_REST_WITH_SLASHES = _REST.replace(r"[\r\n]*", r"[\r\n/]*")
_LIKE_GPT_4O = _OF_ONE_CASE + _CONTRACTION + r"?|\p{N}{1,3}" + _REST_WITH_SLASHES
# Letters with two cases, as DeepSeek-V2's tokenizer lists them.
_CASED_OF_DEEPSEEK = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-"
    "\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-"
    "\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20"
    "-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc"
    "\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6"
    "-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-"
    "\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-"
    "\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-"
    "\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-"
    "\U000118df\U0001e900-\U0001e943"
)
# The word patterns of the models' own tokenizers; each splits what those before it have left.
# Contractions are spelt out, as llama.cpp has them: an ignore-case group would also match the long
# s.
WORD_PATTERNS: dict[str, tuple[str, ...]] = {
    "qwen2": (_CONTRACTION + _LETTERS + r"\p{N}" + _REST,),
    "qwen35": (
        _CONTRACTION
        + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        + _REST.replace(r"\p{L}", r"\p{L}\p{M}"),
    ),
    "dbrx": (_CONTRACTION + _LETTERS + r"\p{N}{1,3}" + _REST,),
    "glm4": (_CONTRACTION + _LETTERS + r"\p{N}{1,3}" + _REST,),
    "llama-bpe": (_CONTRACTION + _LETTERS + r"\p{N}{1,3}" + _REST,),
    "gpt-4o": (_LIKE_GPT_4O,),
    "minicpm5": (r"\p{N}{1,3}", _CONTRACTION + _LETTERS + r"\p{N}+" + _REST),
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", _LIKE_GPT_4O),
    "ufakzeka": (_LETTERS[1:] + r"\p{N}" + _REST,),
    "youtu": (
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
        "\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        _LIKE_GPT_4O.replace(r"\p{N}{1,3}", r"\p{N}"),
    ),
    "seed-coder": (_CONTRACTION + _LETTERS + r"\p{N}" + _REST.replace(r"[\r\n]*", "", 1),),
    "kimi-k2": (
        r"\p{Han}+|"
        + _OF_ONE_CASE.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")
        + _CONTRACTION
        + r"?|\p{N}{1,3}"
        + _REST,
    ),
    "tekken": (_OF_ONE_CASE + r"|\p{N}" + _REST_WITH_SLASHES,),
    "deepseek-coder": (
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[\u0800-\u9fa5\uac00-\ud7ff]+",
        r"\p{N}",
    ),
    # What llama.cpp takes for files without a name.
    "default": (
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        "[0-9][0-9][0-9]",
    ),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_CASED_OF_DEEPSEEK}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        "[\u0800-\u9fa5\uac00-\ud7ff]+",
        r"\p{N}",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[\u3040-\u30ff\u4e00-\u9fa5]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
# Names that mean the same to llama.cpp.
OTHER_NAMES = {
    "glm5": "glm4",
    **dict.fromkeys(("chatglm-bpe", "smaug-bpe"), "dbrx"),
    **dict.fromkeys(("hunyuan-dense", "hy_v4", "joyai-llm"), "deepseek-v3"),
    **dict.fromkeys(("kanana2", "llama4", "minimax-m2", "talkie"), "gpt-4o"),
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral"), "llama-bpe"),
    **dict.fromkeys(("jina-v5-nano", "lfm2", "midm-2.0"), "llama-bpe"),
    **dict.fromkeys(("a.x-4.0", "exaone4", "gigachat", "gpt-2", "granite-docling"), "olmo"),
    **dict.fromkeys(("jais", "jina-de", "jina-es", "jina-v2-de", "jina-v2-es"), "olmo"),
    **dict.fromkeys(("mellum", "modern-bert", "mpt", "phi-2", "trillion"), "olmo"),
    **dict.fromkeys(("deepseek-r1-qwen", "f2llmv2", "grok-2", "hunyuan", "kormo"), "qwen2"),
    **dict.fromkeys(("megrez", "solar-open", "stablelm2"), "qwen2"),
    **dict.fromkeys(("codeshell", "command-r", "exaone", "mellum2", "minerva-7b"), "smollm"),
    **dict.fromkeys(("refact", "starcoder"), "smollm"),
    "cohere2moe": "tiny_aya",
}
# Of these a text begins with BOS.
WITH_BOS = ("llama-bpe", "tekken")
# Of these a word that is a token is that token, whatever its merges.
WITH_WHOLE_WORDS = (*WITH_BOS, "glm4", "minicpm5", "youtu")
PRE_TOKENIZERS = ("olmo", "smollm", *WORD_PATTERNS)
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
    scores = metadata.get("tokenizer.ggml.scores", list)
    _check_length(metadata, "token scores", scores, vocabulary.texts)
    if not all(isinstance(score, float) for score in scores):
        raise CorruptModelError(f"{metadata.path}: token scores must be numbers")
    backend = build_sentencepiece_bpe(
        metadata.path,
        vocabulary.ids(),
        scores,
        {i for i, kind in enumerate(vocabulary.types) if kind not in (_UNKNOWN, _CONTROL, _BYTE)},
        vocabulary.unknown(),
        _flag(metadata, "add_space_prefix", True),
    )
    return backend, True


def _of_characters(
    metadata: Metadata, vocabulary: _Vocabulary
) -> tuple[tokenizers.Tokenizer, bool]:
    unknown = vocabulary.unknown()
    return build_character_bpe(vocabulary.ids(), _merges(metadata), unknown, metadata.path), True


_BUILDERS = {"gemma4": _of_characters, "gpt2": _byte_level, "llama": _sentencepiece}


def _stripping(metadata: Metadata, vocabulary: _Vocabulary) -> set[int]:
    """Added tokens that swallow the spaces after them. No key of a GGUF says so: as llama.cpp, by
    the name of the model.
    """
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
    backend = tokenizers.Tokenizer(
        _bpe(where, vocab=dict(vocab), merges=list(merges), ignore_merges=pre in WITH_WHOLE_WORDS)
    )
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
    backend = tokenizers.Tokenizer(
        _bpe(
            where,
            vocab=dict(vocab),
            merges=list(merges),
            # Where no merge leads to runs of newlines they are tokens all the same.
            ignore_merges=not any("\n" in left for left, _ in merges),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    backend.decoder = decoders.Sequence(_TO_TEXT)
    return backend


def _bpe(where: object, **settings: Any) -> models.BPE:
    try:
        return models.BPE(**settings)
    except Exception as error:  # the library raises plain Exception
        raise CorruptModelError(
            f"{where}: the merges do not fit the vocabulary: {str(error)[:100]}"
        ) from error


def build_sentencepiece_bpe(
    where: Path,
    vocab: Mapping[str, int],
    scores: Sequence[float],
    mergeable: Collection[int],
    unknown: str | None,
    adds_space: bool,
) -> tokenizers.Tokenizer:
    """A SentencePiece tokenizer with the ids of llama.cpp for `tokenizer.ggml.model` "llama".

    Of the pairs of neighbours whose texts together are a token, the one of the highest score is
    joined first (Sennrich et al. 2016, as SentencePiece has it); what is no token in the end is
    spelt in bytes. where: the file, for errors. scores: of every id. mergeable: ids that may come
    of joining. adds_space: a space goes before a text, and before what follows a special token.
    Raises CorruptModelError for tokens with more pairs than a model can have.
    """
    pieces = {text: vocab[text] for text in vocab if vocab[text] in mergeable}
    joined = sorted(pieces, key=lambda text: (-scores[pieces[text]], pieces[text]))
    splits = (
        (text[:cut], text[cut:])
        for text in joined
        for cut in range(1, min(len(text), MAX_PIECE))
        if text[:cut] in pieces and text[cut:] in pieces
    )
    most = MAX_PAIRS * len(vocab)
    merges = list(islice(splits, most + 1))
    if len(merges) > most or any(len(text) > MAX_PIECE for text in pieces):
        raise CorruptModelError(
            f"{where}: the tokens are too long, or can be joined of too many pairs: the limits are "
            f"{MAX_PIECE} characters, and {MAX_PAIRS} pairs for each of {len(vocab)} tokens"
        )
    bpe = models.BPE(
        vocab=dict(vocab),
        merges=merges,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(bpe)
    spaces = normalizers.Replace(" ", SPACE)
    prefix = [normalizers.Prepend(SPACE)] if adds_space else []
    backend.normalizer = normalizers.Sequence([*prefix, spaces])
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    backend.decoder = decoders.Sequence([*_TO_TEXT, *strip])
    return backend


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
