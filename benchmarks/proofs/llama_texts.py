"""The vocabularies and texts of beside_llama.py: token ids beside those of llama.cpp.

A file without weights has the byte-level vocabulary of SmolLM2, once under every name of a word
pattern that the engine or llama.cpp knows, and small ones of other kinds are made here.
"""

# ruff: noqa: RUF001, SIM905 (letters that look like others are wanted; words are short)

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
from tokenizers import pre_tokenizers

from nanoengine.errors import ModelLoadError
from nanoengine.loading.gguf.reader import open_gguf
from nanoengine.loading.gguf.tokenizer import write_tokenizer
from nanoengine.loading.gguf.word_patterns import OTHER_NAMES, PRE_TOKENIZERS
from nanoengine.loading.packaged import packaged_gguf
from nanoengine.text.tokenizer import Tokenizer

NUM_RANDOM, NUM_MERGES = 250, 6000
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
# By their signs in a byte-level vocabulary: a space, newlines, a tab, digits, letters and others.
NEIGHBOURS = "\u0120\u010a\u010d\u01090123456789aAbBdDesStTlLmMrR.,;:!?'/-_#$+=<>|~^`()[]{}"
NEIGHBOURS += "\u00c3\u00e3\u00a9"
PIECES = (
    *"a B Zebra hello WORLD camelCase ünïcödé straße İstanbul ſ ǅ".split(),
    *"'s 'S 'Ll 'RE 've 'D 'ſ don't DON'T we'Ve '' ' \u2019s".split(),
    *"1 12 123 1234 12345678 3.14 1,000 ٣٤ Ⅷ ½ ² १२३ 𝟙𝟚".split(),
    *"日本語 中文字符 ひらがな カタカナ 한국어 ไทย ភាសា हिन्दी العربية עברית".split(),
    *"😀 👩‍👩‍👧 🇩🇪 ✅ 🌫️ \u200d \u200b \ufeff \ufffd \u0301 e\u0301 \u20e3".split(" "),
    *(" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", " \n", "\n "),
    *("\u00a0", "\u3000", "\u2028", "\x85", "\x0b", "\0", "\x7f"),
    *". ... ! ?! , ; - -- _ / // \\ # $ € + = < > | ~ ^ ` ( ) [ ] { } « » 、 。 ！ … · § ™".split(),
    *"<|im_start|> <|im_end|> <|endoftext|> <|im_ <s> </s> <unk> <0x0A> ▁ ▁▁".split(),
)
TEXTS = (
    *("", " ", "\n", "Hello, world!", " leading", "trailing ", "a  b   c    d", "\t\ttabs\t"),
    "I'm, we'LL, they'D, I'Ve, she'S 'twas 'TIS o'clock O'CLOCK rock'n'roll",
    "1 12 123 1234 12345 123456 1234567 12345678 123456789 1,234.567e-89 0x1F 1st 2ND",
    "line\nline\r\nline\r\n\r\n\n  indented\n\tand\n \n  \n   ",
    "def f(x):\n    return x**2  # comment\n\n\nclass A(B):\n\tpass\n",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "x<|endoftext|> y <|im_end|>z",
    "https://example.org/a_b-c?d=e&f=%20#g",
    "C++ C# .NET node.js @user #tag a@b.c $9.99 50% 1/2",
    "日本語のテキスト、中文字符。한국어 텍스트! ภาษาไทย हिन्दी में العربية עברית ελληνικά кириллица",
    "👩‍👩‍👧‍👦 👍🏽 🇺🇳 1️⃣ ✌️ ☕︎",
    "\u202eright to left\u202c zero\u200bwidth\u00adhyphen a\u0300\u0301\u0302b",
    "ＦＵＬＬ　ＷＩＤＴＨ １２３ ﬁ ﬂ ﬀ Ⅳ ⅳ ①②③ ½⅓ 𝒜𝓑𝔸 𐐀𐐨 𞤀",
    *("A" * 70, "ab" * 40, " " * 40, "9" * 50, "!" * 50, *("\n" * n for n in range(3, 36, 4))),
    "HTTPServer XMLHttpRequest iPhone McDonald eBay ABCdefGHI ÀÉÎõü ŒuvreÆon ǅungla",
)


def texts() -> list[str]:
    """The nasty ones, and random runs of pieces."""
    chance = random.Random(0)
    made = ["".join(chance.choices(PIECES, k=chance.randint(1, 9))) for _ in range(NUM_RANDOM)]
    return [*TEXTS, *made]


def write_vocabulary(path: Path, kind: str, fields: dict[str, Any]) -> Path:
    """A GGUF without tensors. fields: of its tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_tokenizer_model(kind)
    for key, value in fields.items():
        full = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        else:
            writer.add_array(full, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@functools.cache
def byte_level_fields() -> dict[str, Any]:
    """Of SmolLM2's vocabulary the first merges, and the pairs of NEIGHBOURS, which show where words
    end.
    """
    fields = gguf.GGUFReader(packaged_gguf("smollm2-135m")).fields
    tokens, kinds, merges = (
        fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type", "merges")
    )
    special = [text for text, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    pairs = [f"{a} {b}" for a in NEIGHBOURS for b in NEIGHBOURS]
    merges = [*dict.fromkeys(merges[:NUM_MERGES] + pairs)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = dict.fromkeys([*special, *alphabet, *(merge.replace(" ", "") for merge in merges)])
    kinds = [CONTROL] * len(special) + [NORMAL] * (len(texts) - len(special))
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return {"tokens": [*texts], "token_type": kinds, "merges": merges} | ends


def sentencepiece_fields() -> dict[str, Any]:
    """Syllables, words with the sign for a space, runs of it, and all bytes."""
    chance = random.Random(1)
    alphabet = "aeiourstlnmdhbcAEIST0123456789.,'-▁日本中文éüßя"
    words = {"".join(chance.choices(alphabet, k=chance.randint(2, 5))) for _ in range(3000)}
    english = (
        "▁the",
        "▁hello",
        "hello",
        "ello",
        "▁world",
        "wor",
        "ld",
        "in",
        "er",
        "▁a",
        "▁▁",
        "▁▁▁▁",
        "the",
        "he",
        "lo",
        "or",
        "▁h",
        "▁w",
        "▁t",
        "th",
        "ll",
        "el",
    )
    pieces = [*dict.fromkeys((*english, *sorted(words)))]
    pieces = [piece for piece in pieces if len(piece) > 1]
    chance.shuffle(pieces)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    characters = dict.fromkeys(alphabet + "".join(english))  # as SentencePiece has those of words
    tokens += [*characters, "<|im_start|>", "<|im_end|>"]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    kinds += [NORMAL] * (len(tokens) - len(kinds) - 2) + [CONTROL, USER_DEFINED]
    scores = [-float(i) for i in range(len(tokens))]
    ends = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {"tokens": tokens, "token_type": kinds, "scores": scores} | ends


def made_vocabularies() -> dict[str, Callable[[Path], Path]]:
    """By name, and how each is written: one name of every word pattern first."""

    def byte_level(pre: str) -> Callable[[Path], Path]:
        return lambda path: write_vocabulary(path, "gpt2", byte_level_fields() | {"pre": pre})

    def sentencepiece(adds_space: bool) -> Callable[[Path], Path]:
        fields = sentencepiece_fields() | {"add_space_prefix": adds_space}
        return lambda path: write_vocabulary(path, "llama", fields)

    names = [*PRE_TOKENIZERS, *OTHER_NAMES]
    found = {"llama": sentencepiece(True), "llama, no space before": sentencepiece(False)}
    return found | {f"gpt2, {name}": byte_level(name) for name in names}


def our_ids(path: Path, folder: Path, wanted: list[str]) -> list[list[int]]:
    """Raises ModelLoadError for a vocabulary that is not supported."""
    metadata, _ = open_gguf(path)
    count = len(metadata.strings("tokenizer.ggml.tokens"))
    write_tokenizer(metadata, folder, count)
    tokenizer = Tokenizer.from_folder(folder)
    return [tokenizer.encode(text) for text in wanted]


def compare_texts(
    name: str, path: Path, folder: Path, ask: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """One row: how many texts have the same ids, and one that has not."""
    wanted = texts()
    row: dict[str, Any] = {"name": name, "texts": len(wanted)}
    try:
        ours = our_ids(path, folder, wanted)
    except ModelLoadError as error:
        return row | {"refused": str(error).replace(str(path), path.name)}
    answer = ask({"model": str(path), "texts": wanted})
    if "error" in answer:
        return row | answer
    pairs = zip(wanted, ours, answer["ids"], strict=True)
    different = [{"text": t, "ours": a, "theirs": b} for t, a, b in pairs if a != b]
    return row | {"same": len(wanted) - len(different), "different": different[:3]}
