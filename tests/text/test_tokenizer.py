"""Tokenizer: ids equal to llama.cpp's, chat templates equal to transformers', text that streams."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers
from checkpoints import GGUFValue
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX
from transformers.utils.chat_template_utils import render_jinja_template

from nanoengine.errors import (
    CorruptModelError,
    InvalidParamsError,
    InvalidPromptError,
    ModelLoadError,
    ModelNotFoundError,
    RequestError,
    UnsupportedModelError,
)
from nanoengine.loading import find_model
from nanoengine.loading.gguf.metadata import Metadata
from nanoengine.loading.gguf.tokenizer import (
    add_around,
    build_byte_level_bpe,
    write_tokenizer,
)
from nanoengine.text.detokenizer import (
    MAX_PENDING_TOKENS,
    IncrementalDetokenizer,
    token_bytes,
)
from nanoengine.text.tokenizer import Tokenizer

RECORDED = json.loads(
    (Path(__file__).parents[1] / "data" / "smollm2_token_ids.json").read_text(encoding="utf-8")
)
CASES = RECORDED["cases"]
# Not in SmolLM2's vocabulary; the last one begins the code points from U+40000 on.
DROPPED_BYTES = b"\x04\x06\x13\x14\x16\x1d\xf1"

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  What is <|im_end|> & 'x' < \"y\"?\n"},
    {"role": "assistant", "content": "Ein Wort: schön 🙂", "reasoning_content": "hm"},
    {"role": "user", "content": ""},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"é": [1, 2.5, None]}}}]
INTRICATE = {
    "blocks, strips, loop controls, namespace": """
        {%- set ns = namespace(last=-1) %}
        {%- for m in messages %}
            {%- if m.role == 'system' %}{% continue %}{% endif %}
            {%- if loop.index0 > 2 %}{% break %}{% endif %}
            {%- set ns.last = loop.index0 %}
    {% if m['role'] == 'user' %}
    U: {{ m['content'] | trim }}
    {% else %}
    {% generation %}A: {{ m.content }}{{ eos_token }}
    {% endgeneration %}
    {% endif %}
        {%- endfor %}
    last={{ ns.last }} {{ undefined_thing }}|{{ pad_token is defined }}
    {%- if add_generation_prompt %}{{ '\\nA:' }}{% endif %}""",
    "tools and JSON": """{{ bos_token }}
{%- if tools %}{% for t in tools %}{{ t | tojson }} {{ t | tojson(indent=2) }}
{% endfor %}{% else %}no tools{% endif %}
{%- for m in messages %}{{ loop.cycle('a', 'b') }}{{ m | tojson(sort_keys=true) }}{% endfor %}
{{- documents is none }} {{ flag | default('unset') }}""",
    "macros, slices, tests": """{% macro turn(m, i=0) %}[{{ i }}:{{ m.role | upper }}]
{{ m.content.split('\\n')[0][::-1] }}{% if m.thinking is string %} ({{ m.thinking }}){% endif %}
{% endmacro %}
{% for m in messages[1:] %}{{ turn(m, loop.revindex) }}{% endfor %}
{{ messages | map(attribute='role') | join(',') }} {{ messages | length > 2 and not false }}
{{ 'x' ~ (1 + 2) }} {{ {'a': 1}.items() | list }} {{ range(3) | list }}
{{ dict([('k', 1)], b=2) }} {{ dict.fromkeys([1], 2) }}""",
}


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The bundled model, converted."""
    return find_model.resolve_model("smollm2-135m")


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_folder(smollm2)


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> Any:
    """transformers' tokenizer of the same folder."""
    return AutoTokenizer.from_pretrained(smollm2)


def byte_level(
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    pre: str,
    special: Sequence[str] = (),
    user_defined: Sequence[str] = (),
) -> tokenizers.Tokenizer:
    backend = build_byte_level_bpe(vocab, merges, pre)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in user_defined])
    return backend


def backend_with(pre: str, folder: Path, **ids: int) -> tokenizers.Tokenizer:
    """SmolLM2's vocabulary under another way of splitting words."""
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    backend = byte_level(
        model["model"]["vocab"],
        [tuple(pair) for pair in model["model"]["merges"]],
        pre,
        special=[token["content"] for token in model["added_tokens"]],
    )
    add_around(backend, ids.get("prefix_id"), ids.get("suffix_id"))
    return backend


def saved(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with a tokenizer of single bytes and the given tokenizer_config.json."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    backend = byte_level(vocab, [], "qwen2", ["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


def change_tokenizer(folder: Path, key: str, value: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


# -- ids -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case["text"])[:40])
def test_ids_equal_llama_cpp(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    assert tokenizer.encode(case["text"]) == case["ids"]


@pytest.mark.parametrize("pre", sorted(RECORDED["other_pre"]))
def test_ids_equal_llama_cpp_under_other_word_patterns(smollm2: Path, pre: str) -> None:
    ours = Tokenizer(backend_with(pre, smollm2))
    different = [
        case["text"]
        for case, ids in zip(CASES, RECORDED["other_pre"][pre], strict=True)
        if ours.encode(case["text"]) != ids
    ]
    assert different == []


# As the tokenizer.json of each model has it, for another engine of regular expressions.
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LETTER, ANY, SMALL = r"[^\r\n\p{L}\p{N}]?", r"\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
GPT_4O = (
    rf"{LETTER}[\p{{Lu}}\p{{Lt}}{ANY}]*[{SMALL}]+{ENDINGS}?"
    rf"|{LETTER}[\p{{Lu}}\p{{Lt}}{ANY}]+[{SMALL}]*{ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
)
NO_HAN = r"(?:(?!\p{Han})"
PATTERNS = {
    # As llama.cpp has it; digits are grouped by code there (unicode_regex_split_custom_afmoe).
    "afmoe": (
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
        r"[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "deepseek-coder": (
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        r"[一-龥ࠀ-一가-\ud7ff]+",
        r"\p{N}",
    ),
    "deepseek-llm": (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        r"[一-龥ࠀ-一가-\ud7ff]+",
        r"\p{N}",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "exaone-moe": rf"{ENDINGS}|{LETTER}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    "glm4": rf"{ENDINGS}|{LETTER}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}",
    "gpt-4o": GPT_4O,
    "jais-2": rf"{ENDINGS}|{LETTER}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)"
    r"|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}",
    # Written with && there.
    "kimi-k2": r"[\p{Han}]+"
    rf"|{LETTER}{NO_HAN}[\p{{Lu}}\p{{Lt}}{ANY}])*{NO_HAN}[{SMALL}])+{ENDINGS}?"
    rf"|{LETTER}{NO_HAN}[\p{{Lu}}\p{{Lt}}{ANY}])+{NO_HAN}[{SMALL}])*{ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}",
    "minicpm5": (
        r"\p{N}{1,3}",
        rf"{ENDINGS}|{LETTER}\p{{L}}+|\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}",
    ),
    "minimax-m2": GPT_4O,
    "olmo": "'s|'t|'re|'ve|'m|'ll|'d"
    r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "qwen35": PRETOKENIZE_REGEX,
    "seed-coder": rf"{ENDINGS}|{LETTER}\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}",
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", GPT_4O),
    "ufakzeka": rf"{LETTER}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}",
    "youtu": (
        r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
        GPT_4O.replace(r"\p{N}{1,3}", r"\p{N}"),
    ),
    "tekken": rf"{LETTER}[\p{{Lu}}\p{{Lt}}{ANY}]*[{SMALL}]+"
    rf"|{LETTER}[\p{{Lu}}\p{{Lt}}{ANY}]+[{SMALL}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}",
}
WORDS = (
    "x：y。z 漢字かな カナ αβ dž _go (a) 12345 a\u3000b"
    + "I'LL pay ÉTÉ123456/\n//\n\n  don'T Éa ऻक़ 각4 \r\n x\t\ty HTMLParser's a\u0301b "
    + " " * 7
    + "x"
    + " " * 21
)


@pytest.mark.parametrize("pre", PATTERNS)
def test_words_are_those_of_the_models_own_pattern(pre: str) -> None:
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    backend = byte_level({token: i for i, token in enumerate(alphabet)}, [], pre)
    for text in (WORDS, *(case["text"] for case in CASES if "ſ" not in case["text"])):
        spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
        words, patterns = [text], PATTERNS[pre]
        for pattern in (patterns,) if isinstance(patterns, str) else patterns:
            pieces = (regex.split(f"({pattern})", word) for word in words)
            words = [piece for each in pieces for piece in each if piece]
        assert [text[first:last] for first, last in spans] == words, text


@pytest.mark.parametrize(
    ("pre", "is_whole"),
    [
        *((pre, True) for pre in ("glm4", "glm5", "llama-bpe", "minicpm5", "tekken")),
        *((pre, False) for pre in ("chatglm-bpe", "dbrx", "qwen2", "default")),
    ],
)
def test_a_word_may_be_a_token_that_no_merge_makes(pre: str, is_whole: bool) -> None:
    """`ignore_merges` of llama.cpp's llama_vocab::impl::load."""
    tokens = [*tokenizers.pre_tokenizers.ByteLevel.alphabet(), "abc"]
    backend = byte_level({token: i for i, token in enumerate(tokens)}, [], pre)
    assert backend.encode("abc").tokens == (["abc"] if is_whole else ["a", "b", "c"])


def test_an_end_of_one_message_of_several_ends_no_generation(tmp_path: Path) -> None:
    """gpt-oss writes <|end|> between its channels; Phi-3 writes it in the end."""
    for others, ends in ((["<|return|>", "<|call|>"], [257, 258]), (["<a>", "<b>"], [256])):
        tokens = [*tokenizers.pre_tokenizers.ByteLevel.alphabet(), "<|end|>", *others]
        fields = {
            "general.architecture": "gpt-oss",
            "gpt-oss.context_length": 128,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-4o",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": [],
        }
        metadata = Metadata(Path("m.gguf"), {k: GGUFValue(v) for k, v in fields.items()})
        assert write_tokenizer(metadata, tmp_path, 259) == ends


def test_gemma_4_ends_where_a_tool_answers(tmp_path: Path) -> None:
    """As llama.cpp's llama_vocab::impl::load has it; the file names one end, and that token's type
    is one of text.
    """
    tokens = ["<unk>", "<eos>", "<turn|>", "<|tool_response>", "a"]
    fields = {
        "general.architecture": "gemma4",
        "gemma4.context_length": 128,
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, 4, 1],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }
    metadata = Metadata(Path("m.gguf"), {k: GGUFValue(v) for k, v in fields.items()})
    assert sorted(write_tokenizer(metadata, tmp_path, 5)) == [1, 2, 3]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("smollm", ["I", "'", "LL", "Ġpay", "Ġ", "1", "2", "3", "4", "!!", "Ċ"]),
        ("qwen2", ["I", "'LL", "Ġpay", "Ġ", "1", "2", "3", "4", "!!Ċ"]),
        ("deepseek-r1-qwen", ["I", "'LL", "Ġpay", "Ġ", "1", "2", "3", "4", "!!Ċ"]),
        *(
            (pre, ["I", "'LL", "Ġpay", "Ġ", "123", "4", "!!Ċ"])
            for pre in ("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "pixtral")
        ),
        *(
            (pre, ["I", "'LL", "Ġpay", "Ġ", "123", "4", "!!Ċ"])
            for pre in ("dbrx", "chatglm-bpe", "smaug-bpe")
        ),
    ],
)
def test_words_of_each_pattern(pre: str, words: list[str]) -> None:
    """SmolLM2 has no tokens of several digits, so its ids cannot tell all patterns apart."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocab = {token: i for i, token in enumerate(alphabet)}
    backend = byte_level(vocab, [], pre)
    assert [
        word for word, _ in backend.pre_tokenizer.pre_tokenize_str("I'LL pay 1234!!\n")
    ] == words


def test_llama3_and_mistral_take_whole_words_before_merging() -> None:
    vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}
    whole = ("llama-bpe", "falcon3", "lfm2", "tekken")
    for pre, ids in (*((pre, [4]) for pre in whole), ("dbrx", [3, 2]), ("qwen2", [3, 2])):
        assert Tokenizer(byte_level(vocab, [("a", "b")], pre)).encode("abc") == ids


def test_transformers_reads_the_same_tokenizer(tokenizer: Tokenizer, theirs: Any) -> None:
    for case in CASES:
        assert theirs(case["text"])["input_ids"] == case["ids"]
    assert (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.vocab_size == 49152


@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case["text"])[:40])
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    text = case["text"].encode().translate(None, DROPPED_BYTES).decode(errors="replace")
    assert tokenizer.decode(case["ids"], skip_special_tokens=False) == text


def test_special_tokens_are_recognised_and_skipped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "user"
    assert tokenizer.special_ids == frozenset(range(17))


def test_user_defined_tokens_are_shown(smollm2: Path) -> None:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "<tool>", "<end>"])}
    ours = Tokenizer(byte_level(vocab, [], "smollm", ["<end>"], ["<tool>"]))
    ids = ours.encode("a<tool>b<end>")
    assert ids[1] == 256 and ids[3] == 257
    assert ours.decode(ids) == "a<tool>b"


def test_bos_and_eos_are_added_only_when_asked_for(smollm2: Path) -> None:
    both = Tokenizer(backend_with("smollm", smollm2, prefix_id=1, suffix_id=2))
    assert both.encode("a") == [1, 81, 2]
    assert both.encode("") == [1, 2]
    assert both.encode("a", add_special_tokens=False) == [81]
    one = Tokenizer(backend_with("smollm", smollm2, prefix_id=1))
    assert one.encode("a") == [1, 81]
    same = Tokenizer(backend_with("smollm", smollm2, prefix_id=0, suffix_id=0))
    assert same.encode("a") == [0, 81, 0]


def test_a_files_padding_and_truncation_are_off(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(saved(tmp_path, {}) / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_folder(tmp_path).encode("abcdef")) == 6


@pytest.mark.parametrize("text", ["a\ud800b", 5, None, b"bytes"])
def test_bad_prompts_are_refused(tokenizer: Tokenizer, text: Any) -> None:
    with pytest.raises(InvalidPromptError, match=r"surrogate|must be a string"):
        tokenizer.encode(text)


@pytest.mark.parametrize("ids", [[-1], [1 << 40], ["a"]])
def test_bad_ids_are_refused(tokenizer: Tokenizer, ids: list[Any]) -> None:
    with pytest.raises(InvalidPromptError, match="token ids"):
        tokenizer.decode(ids)


def test_an_unknown_pre_tokenizer_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'bloom'.*smollm"):
        byte_level({"a": 0}, [], "bloom")


def test_merges_of_unknown_tokens_are_refused() -> None:
    with pytest.raises(CorruptModelError, match="merges"):
        byte_level({"a": 0}, [("a", "b")], "smollm")


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("present", [None, "tokenizer_config.json", "chat_template.jinja"])
def test_a_folder_without_tokenizer_says_so(tmp_path: Path, present: str | None) -> None:
    if present:
        (tmp_path / present).write_text("{}")
    with pytest.raises(ModelNotFoundError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_a_place_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(ModelLoadError, match=r"cannot be read|has no tokenizer\.json") as caught:
        Tokenizer.from_folder(Path(name))
    assert len(str(caught.value)) < 300


def test_a_damaged_file_of_an_old_format_is_not_a_missing_one(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("[")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    with pytest.raises(ModelLoadError, match="transformers cannot make one") as caught:
        Tokenizer.from_folder(tmp_path)
    assert not isinstance(caught.value, ModelNotFoundError)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
)
@pytest.mark.parametrize(
    "content",
    [
        *(b"{", b"[1]", b"", b'{"a": 1', b"\xff", b'{"a": ' * 100_000),
        *(b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}", b'{"a": ' + b"1" * 5000 + b"}"),
        b'{"bos_token": "<s>", "bos_token": "</s>"}',
    ],
    ids=range(9),
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    saved(tmp_path, {})
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorruptModelError, match=name):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        *({"eos_token": 5}, {"bos_token": {"content": None}}, {"pad_token": ["<s>"]}),
        *({"eos_token": "\ud800"}, {"unk_token": {"content": "a\udfff"}}),
        *({"chat_template": 5}, {"chat_template": {"default": "x"}}, {"chat_template": ["x"]}),
    ],
)
def test_a_wrong_value_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(CorruptModelError, match=rf"tokenizer_config\.json.*{next(iter(config))}"):
        Tokenizer.from_folder(saved(tmp_path, config))


def added(text: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": text, "special": True} | plain | flags


STRIPPING = added("<tool>", rstrip=True, special=False)


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"added_tokens_decoder": {"258": added("<tool>")}}, {}),
        ({"added_tokens_decoder": {"258": added("<tool>", special=False)}}, {}),
        ({"added_tokens_decoder": {"1": added("</s>", rstrip=True), "258": STRIPPING}}, {}),
        ({"added_tokens_decoder": {"1": added("</s>", special=False)}}, {}),
        (
            {
                "added_tokens_decoder": {"258": added("<tool>", special=False)},
                "eos_token": "<tool>",
            },
            {},
        ),
        ({}, {"added_tokens.json": {"<tool>": 258}}),
        ({"eos_token": "<tool>"}, {"added_tokens.json": {"<tool>": 258, "</s>": 1}}),
        ({"added_tokens_decoder": {"0": added("<s>")}}, {"added_tokens.json": {"<tool>": 258}}),
        ({"pad_token": "x", "unk_token": "<none>"}, {}),
        ({}, {"special_tokens_map.json": {"eos_token": "y"}}),
        ({}, {"tokenizer.json": {"added_tokens": [added("</s>", special=False) | {"id": 1}]}}),
        (
            {"eos_token": "</s>"},
            {"tokenizer.json": {"added_tokens": [added("</s>", special=False) | {"id": 1}]}},
        ),
    ],
)
def test_tokens_beside_tokenizer_json_are_those_of_transformers(
    tmp_path: Path, config: dict[str, Any], files: dict[str, dict[str, Any]]
) -> None:
    saved(tmp_path, config)
    for name, content in files.items():
        old = json.loads((tmp_path / name).read_text()) if (tmp_path / name).exists() else {}
        (tmp_path / name).write_text(json.dumps(old | content))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_folder(tmp_path)
    text = "<s>a </s>  <tool>  x<tool>y"
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    if "<none>" not in config.values():  # transformers gives it an id that the model does not have
        assert ours.vocab_size == len(theirs)


def test_a_token_that_would_get_another_id_is_left_out(tmp_path: Path) -> None:
    files = {"added_tokens_decoder": {"260": added("<far>"), "258": added("<near>")}}
    ours = Tokenizer.from_folder(saved(tmp_path, files))
    assert ours.encode("<near>") == [258] and len(ours.encode("<far>")) == 5
    for wrong in ({"<a>": "258"}, {"<a>": True}, {"a\ud800": 258}):
        (tmp_path / "added_tokens.json").write_text(json.dumps(wrong))
        (tmp_path / "tokenizer_config.json").write_text("{}")
        with pytest.raises(CorruptModelError, match=r"added_tokens\.json must give each token"):
            Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "//////////8="}),
    ],
)
def test_a_file_that_makes_the_library_panic_is_named(
    tmp_path: Path, key: str, value: dict[str, Any]
) -> None:
    """At once, not at the first prompt."""
    change_tokenizer(saved(tmp_path, {}), key, value)
    with pytest.raises(CorruptModelError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_panic_at_a_later_prompt_is_a_prompt_error(tmp_path: Path) -> None:
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}}
    change_tokenizer(
        saved(tmp_path, {}), "pre_tokenizer", pattern | {"behavior": "Isolated", "invert": False}
    )
    ours = Tokenizer.from_folder(tmp_path)
    with pytest.raises(InvalidPromptError, match="cannot be encoded: Onig"):
        ours.encode("a" * 40 + "!")
    assert ours.encode("b") != []


def test_a_closed_vocabulary_refuses_what_it_lacks(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="?"))
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.encode("a") == [0]
    with pytest.raises(InvalidPromptError, match="cannot be encoded: WordLevel error"):
        ours.encode("b")


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_interrupts_are_not_taken_for_panics(interrupt: type[BaseException]) -> None:
    class Interrupted:
        def encode(self, *_: Any, **__: Any) -> None:
            raise interrupt

        decode = encode
        no_padding = no_truncation = staticmethod(lambda: None)

    ours = Tokenizer(Interrupted())  # type: ignore[arg-type]
    with pytest.raises(interrupt):
        ours.encode("a")
    with pytest.raises(interrupt):
        ours.decode([0])


def test_an_old_format_is_converted_by_transformers(tmp_path: Path) -> None:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {t: i for i, t in enumerate(["<|endoftext|>", *alphabet, "he", "hell"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\nl l\n")
    vocab["ll"] = len(vocab)
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.encode("hello") == [vocab["he"], vocab["ll"], vocab["o"]]
    assert ours.eos_token_id == 0


def test_special_tokens_are_read_in_every_spelling(tmp_path: Path) -> None:
    saved(tmp_path, {"bos_token": {"content": "<s>", "special": True}, "pad_token": None})
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>", "bos_token": "x"}')
    ours = Tokenizer.from_folder(tmp_path)
    assert (ours.bos_token_id, ours.eos_token_id) == (0, 1)


def test_transformers_is_not_imported(smollm2: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from nanoengine.text.tokenizer import Tokenizer\n"
        f"t = Tokenizer.from_folder(Path({str(smollm2)!r}))\n"
        "t.encode(t.apply_chat_template([{'role': 'user', 'content': 'x'}]))\n"
        "assert 'transformers' not in sys.modules and 'gguf' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=120)


# -- chat templates --------------------------------------------------------------------------------


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", [CHAT, CHAT[1:2], CHAT[1:]])
def test_smollm2_template_equals_transformers(
    tokenizer: Tokenizer, theirs: Any, messages: list[Any], add_generation_prompt: bool
) -> None:
    expected = theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert tokenizer.apply_chat_template(messages, add_generation_prompt) == expected


@pytest.mark.parametrize("template", INTRICATE.values(), ids=list(INTRICATE))
@pytest.mark.parametrize("variables", [{}, {"tools": TOOLS, "flag": True, "documents": []}])
def test_intricate_templates_equal_transformers(
    tmp_path: Path, template: str, variables: dict[str, Any]
) -> None:
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": "</s>"}
    folder = saved(tmp_path, config)
    ours, theirs = Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for messages in (CHAT, CHAT[:2], [{**CHAT[0], "tool_calls": None, "name": "n"}]):
        expected = theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **variables
        )
        assert ours.apply_chat_template(messages, **variables) == expected
        assert expected  # a template that renders to nothing would prove nothing


def test_named_templates_equal_transformers(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain {{ messages | length }}"},
        {"name": "tool_use", "template": "tools {{ tools | length }}"},
    ]
    folder = saved(tmp_path, {"chat_template": named})
    ours, theirs = Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(CHAT, tokenize=False, tools=tools)
        assert ours.apply_chat_template(CHAT, tools=tools) == expected


def test_the_template_of_a_processor_is_the_last_choice(tmp_path: Path) -> None:
    """Checkpoints of models for images may have no other."""
    folder = saved(tmp_path, {})
    (folder / "chat_template.json").write_text('{"chat_template": "processor"}')
    assert Tokenizer.from_folder(folder).apply_chat_template(CHAT) == "processor"
    folder = saved(tmp_path, {"chat_template": "config"})
    assert Tokenizer.from_folder(folder).apply_chat_template(CHAT) == "config"


def test_a_template_file_wins(tmp_path: Path) -> None:
    folder = saved(tmp_path, {"chat_template": "config"})
    (folder / "chat_template.jinja").write_text("file\n{{ bos_token }}")
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = Tokenizer.from_folder(folder)
    expected = theirs.apply_chat_template(CHAT, tokenize=False)
    assert ours.apply_chat_template(CHAT) == expected == "file\n"


def test_named_template_files_equal_transformers(tmp_path: Path) -> None:
    """As transformers saves them since 4.51."""
    named = {"default": "plain {{ messages | length }}", "tool_use": "{{ tools | length }} tools"}
    theirs = PreTrainedTokenizerFast.from_pretrained(saved(tmp_path, {"chat_template": "config"}))
    theirs.chat_template = named
    folder = tmp_path / "saved"
    theirs.save_pretrained(folder)
    assert (folder / "additional_chat_templates" / "tool_use.jinja").is_file()
    ours = Tokenizer.from_folder(folder)
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(CHAT, tokenize=False, tools=tools)
        assert ours.apply_chat_template(CHAT, tools=tools) == expected


# As SmolVLM's and LLaVA's: a content that is a text leaves nothing behind, or is an error.
PARTS_ALONE = {
    "loop": "{% for m in messages %}{{ m.role }}:{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}\n{% endfor %}",
    "filter": "{% for m in messages %}{{ m.role }}:{% for part in m['content'] | "
    "selectattr('type', 'equalto', 'text') %}{{ part['text'] }} {% endfor %}{% endfor %}",
    "first": "{% for m in messages %}{{ m.role }}:{{ m.content[0]['text'] }}{% endfor %}",
    "refuses": "{% for m in messages %}{% if m.content is string %}"
    "{{ raise_exception('no text') }}{% endif %}{{ m.content[0].text }}{% endfor %}",
}


@pytest.mark.parametrize("template", PARTS_ALONE.values(), ids=list(PARTS_ALONE))
def test_a_template_that_reads_parts_alone_gets_parts(tmp_path: Path, template: str) -> None:
    folder = saved(tmp_path, {"chat_template": template})
    ours, theirs = Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    two = [{"type": "text", "text": text} for text in ("one", "two")]
    of_texts = [message | {"content": [two[0] | {"text": message["content"]}]} for message in CHAT]
    expected = theirs.apply_chat_template(of_texts, tokenize=False)
    assert ours.apply_chat_template(CHAT) == ours.apply_chat_template(of_texts) == expected
    assert all(message["content"] in expected for message in CHAT)
    talk = [{"role": "user", "content": two}]  # two parts stay two
    assert ours.apply_chat_template(talk) == theirs.apply_chat_template(talk, tokenize=False)


def test_a_template_reads_the_clock(tmp_path: Path) -> None:
    ours = Tokenizer.from_folder(saved(tmp_path, {"chat_template": "{{ strftime_now('%Y') }}"}))
    assert ours.apply_chat_template(CHAT).isdigit()


def test_no_template_is_a_request_error(tmp_path: Path) -> None:
    ours = Tokenizer.from_folder(saved(tmp_path, {}))
    assert not ours.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        ours.apply_chat_template(CHAT)


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "broken"),
        ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "broken: too many statically nested"),
        ("{% if 1 %}" * 150 + "{% endif %}" * 150, "broken: too many levels of indentation"),
        ("{{ " + "9" * 5000 + " }}", "broken: Exceeds the limit"),
        ("{{ " + "not " * 20_000 + "1 }}", "broken: maximum recursion depth"),
        ("{{ messages[0].content + 1 }}", "refuses"),
        ("{{ nothing.at.all }}", "refuses"),
        ("{{ 1 / 0 }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{{ messages.__init__.__globals__ }}", "refuses"),
        ("{{ range(10 ** 9) | list }}", "refuses"),
    ],
)
def test_a_failing_template_is_a_prompt_error(tmp_path: Path, template: str, match: str) -> None:
    ours = Tokenizer.from_folder(saved(tmp_path, {"chat_template": template}))
    with pytest.raises(InvalidPromptError, match=match):
        ours.apply_chat_template(CHAT)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        {},
        "hello",
        None,
        ["hello"],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": ["part"]}],
        [{"role": 1, "content": "x"}],
        [{"role": "user", "content": "x", "name": object()}],
        [{"role": "user", "content": 5, "tool_calls": []}],
    ],
)
def test_bad_messages_are_refused(tokenizer: Tokenizer, messages: Any) -> None:
    with pytest.raises(InvalidPromptError, match="messages"):
        tokenizer.apply_chat_template(messages)


def test_a_message_nested_for_ever_is_refused(tokenizer: Tokenizer) -> None:
    endless: dict[str, Any] = {"role": "user", "content": "x"}
    endless["self"] = endless
    with pytest.raises(InvalidPromptError, match="nested"):
        tokenizer.apply_chat_template([endless])


def test_tool_calls_may_stand_without_content(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content is defined }} {% endfor %}"
    ours = Tokenizer.from_folder(saved(tmp_path, {"chat_template": template}))
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert ours.apply_chat_template([call, CHAT[0]]) == "False True "


def test_an_empty_list_of_calls_is_none(tmp_path: Path) -> None:
    """As in vLLM: clients send back what they got."""
    template = (
        "{% for m in messages %}{{ 'calls' if 'tool_calls' in m else m.content }} {% endfor %}"
    )
    ours = Tokenizer.from_folder(saved(tmp_path, {"chat_template": template}))
    said: list[dict[str, Any]] = [
        {"role": "assistant", "content": "yes", "tool_calls": empty} for empty in ([], (), None)
    ]
    assert ours.apply_chat_template(said) == "yes yes yes "
    said = [{"role": "assistant", "content": None}, {"role": "assistant", "tool_calls": []}]
    assert ours.apply_chat_template(said) == "  "


def test_calls_without_content_for_a_template_that_adds_to_it(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ '<' + m['content'] + '>' }}{% endfor %}"
    ours = Tokenizer.from_folder(saved(tmp_path, {"chat_template": template}))
    for content in ({}, {"content": None}, {"content": ""}):
        call = {"role": "assistant", "tool_calls": [{"id": "1"}], **content}
        assert ours.apply_chat_template([call, {"role": "user", "content": "x"}]) == "<><x>"


def test_answers_of_tools_for_a_template_that_wants_their_names(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{% if 'name' not in m %}"
        "{{ raise_exception('no name') }}{% endif %}{{ m.name }}={{ m.content }} {% endif %}"
        "{% endfor %}"
    )
    ours = Tokenizer.from_folder(saved(tmp_path, {"chat_template": template}))
    calls = [{"id": name * 2, "function": {"name": name, "arguments": "{}"}} for name in "ab"]
    talk: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "bb", "content": "2"},
        {"role": "tool", "tool_call_id": "aa", "name": "own", "content": "1"},
    ]
    assert ours.apply_chat_template(talk) == "b=2 own=1 "
    with pytest.raises(InvalidPromptError, match="no name"):
        ours.apply_chat_template([*talk, {"role": "tool", "tool_call_id": "cc", "content": "3"}])


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_texts_of_parts(tmp_path: Path, kind: str) -> None:
    ours = Tokenizer.from_folder(saved(tmp_path, {"chat_template": "{{ messages[0].content }}"}))
    assert (
        ours.apply_chat_template([{"role": "user", "content": [{"type": kind, "text": "a"}]}])
        == "a"
    )


def test_a_tokenizer_that_is_called_says_what_to_write(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidPromptError, match=r"encode\(text\) gives the list"):
        tokenizer("Hi", add_special_tokens=False)


def test_arguments_of_calls_are_objects(tmp_path: Path) -> None:
    """As vLLM gives them to templates; OpenAI's messages hold their text."""
    each = "{{ c.function.arguments | tojson }} "
    template = f"{{% for c in messages[0].tool_calls %}}{each}{{% endfor %}}"
    ours = Tokenizer.from_folder(saved(tmp_path, {"chat_template": template}))
    texts = ['{"a": [1]}', "", "no JSON", "[1]", {"b": 2}, "[" * 100_000]
    calls = [{"function": {"name": "f", "arguments": text}} for text in texts]
    expected = ['{"a": [1]}', "{}", '"no JSON"', '"[1]"', '{"b": 2}', f'"{texts[-1]}"']
    message = {"role": "assistant", "tool_calls": calls}
    assert ours.apply_chat_template([message]) == " ".join(expected) + " "
    calls[0]["function"]["arguments"] = '{"a":' * 70 + "1" + "}" * 70
    with pytest.raises(InvalidPromptError, match="nested"):
        ours.apply_chat_template([message])


@pytest.mark.parametrize("content", [None, "", "Hm."])
@pytest.mark.parametrize("arguments", ['{"a": 1}', "no JSON"])
def test_templates_that_want_messages_as_they_were_given(
    tmp_path: Path, content: str | None, arguments: str
) -> None:
    """DeepSeek's ask whether content is none, and write the text of arguments."""
    template = (
        "{% for m in messages %}{% if m.content is none %}{{ '<none>' }}"
        "{% else %}{{ m.content + '' }}{% endif %}{% for c in m.tool_calls or [] %}"
        "{{ '<c>' + c.function.name + '<s>' + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    talk = [CHAT[0], {"role": "assistant", "content": content, "tool_calls": calls}]
    (expected,), _ = render_jinja_template([talk], chat_template=template)
    ours = Tokenizer.from_folder(saved(tmp_path, {"chat_template": template}))
    assert ours.apply_chat_template(talk, False) == expected
    if content is None:
        del talk[1]["content"]
        assert ours.apply_chat_template(talk, False) == expected


def test_a_form_is_not_given_up_for_another_part(tmp_path: Path) -> None:
    """Who asks for none may want objects; and what all forms fail at is said of the first."""
    text = "{% for m in messages %}{{ 'none' if m.content is none else m.content + '' }}{% for c "
    text += "in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    talk = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    ours = Tokenizer.from_folder(saved(tmp_path, {"chat_template": text}))
    assert ours.apply_chat_template(talk, False) == 'none{"a": 1}'
    never = "{{ raise_exception(messages[0].content | default('no content')) }}"
    ours = Tokenizer.from_folder(saved(tmp_path, {"chat_template": never}))
    with pytest.raises(InvalidPromptError, match="no content"):
        ours.apply_chat_template(talk, False)


def test_subclasses_become_plain_values(tmp_path: Path) -> None:
    class Role(StrEnum):
        USER = "user"

    ours = Tokenizer.from_folder(saved(tmp_path, {"chat_template": "{{ messages[0].role }}"}))
    assert ours.apply_chat_template([{"role": Role.USER, "content": ""}]) == "user"


@pytest.mark.parametrize("name", ["return_dict", "chat_template"])
def test_arguments_that_are_no_variables_are_refused(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(InvalidParamsError, match=name):
        tokenizer.apply_chat_template(CHAT, **{name: True})


# -- incremental detokenising ----------------------------------------------------------------------


def pieces(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    """What is given out for each token, then at the end."""
    stream = IncrementalDetokenizer(tokenizer, skip)
    given = []
    for token_id in ids:
        given.append(stream.add(token_id))
        assert stream.text == "".join(given)
    given.append(stream.flush())
    assert stream.text == "".join(given)
    return given


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case["text"])[:40])
def test_streamed_text_equals_decode(
    tokenizer: Tokenizer, case: dict[str, Any], skip: bool
) -> None:
    given = pieces(tokenizer, case["ids"], skip)
    assert "".join(given) == tokenizer.decode(case["ids"], skip)
    if "\U00040000" not in case["text"]:  # which does not survive encoding
        assert not any("\ufffd" in piece for piece in given)


def test_half_a_code_point_is_held_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok 🇯🇵")
    given = pieces(tokenizer, ids, True)
    assert "" in given and "".join(given) == "ok 🇯🇵"


@pytest.mark.parametrize("seed", range(20))
def test_random_ids_stream_like_decode(tokenizer: Tokenizer, seed: int) -> None:
    """Random bytes, most of them no UTF-8, with special tokens and whole words among them."""
    rng = random.Random(seed)
    vocab = tokenizer.backend.get_vocab()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    high = [vocab[c] for c in alphabet if c in vocab and ord(c) > 126]
    pool = [*high, *rng.sample(range(49152), 20), *range(3)]
    ids = rng.choices(pool, k=300)
    for skip in (True, False):
        assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("text", ["\ufffd" * 50, "a\ufffd", "🙂" * 40])
def test_long_runs_without_a_plain_end(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids, True)) == text


def test_the_work_per_token_does_not_grow(tokenizer: Tokenizer) -> None:
    """Neither on text nor on code points that never complete."""
    vocab = tokenizer.backend.get_vocab()
    never_whole = [vocab[byte] for byte in ("ð", "Ł", "Ļ")]  # F0 9F 99 and no fourth byte
    for ids in (
        [vocab["â"]] * 5000,
        never_whole * 2000,
        tokenizer.encode("the quick brown fox " * 1000),
    ):
        stream = IncrementalDetokenizer(tokenizer)
        longest = 0
        for token_id in ids:
            stream.add(token_id)
            longest = max(longest, len(stream._window))
        assert longest <= 3 * MAX_PENDING_TOKENS
        stream.flush()
        assert stream.text == tokenizer.decode(ids)


def test_tokens_that_all_end_inside_a_code_point() -> None:
    """Whole emojis pass, but no token boundary falls between two of them."""
    vocab = {"ð": 0, "Ł": 1, "ĻĤð": 2, "a": 3}  # F0, 9F, 99 82 F0
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    ours = Tokenizer(backend)
    for tail in ([], [3], [1], [1, 2, 3]):
        ids = [0] + [1, 2] * 50 + tail
        given = pieces(ours, ids, True)
        assert "".join(given) == ours.decode(ids)
        assert ours.decode(ids).startswith("🙂" * 50) and max(map(len, given)) < 10


def test_a_stream_goes_on_after_flush(tokenizer: Tokenizer) -> None:
    stream = IncrementalDetokenizer(tokenizer)
    first, second = tokenizer.encode("Hello wor"), tokenizer.encode("ld and more")
    given = [stream.add(i) for i in first] + [stream.flush()] + [stream.add(i) for i in second]
    assert "".join(given) == stream.text == "Hello world and more"


def test_leading_spaces_of_sentencepiece_words_survive() -> None:
    """Decoders that strip the first space must not strip one per token."""
    vocab = {"<unk>": 0, "▁one": 1, "▁two": 2, "<0xC3>": 3, "<0xA9>": 4, "▁": 5}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True))
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    ours = Tokenizer(backend)
    ids = [1, 2, 5, 3, 4, 2, 1, 1]
    assert "".join(pieces(ours, ids, True)) == ours.decode(ids) == "one two é two one one"
    assert b"".join(token_bytes(ours, i) for i in ids).decode() == " one two é two one one"
    assert token_bytes(ours, 3) == b"\xc3"


BYTE_NAMES = {f"<0x{byte:02X}>": byte for byte in range(256)}


def with_byte_tokens() -> Tokenizer:
    """A token for each byte, with the byte as its id, and some of texts, as SentencePiece has."""
    vocab = BYTE_NAMES | {"▁": 256, "a": 257, "▁é": 258, "😀": 259, "<unk>": 260}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True))
    each = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback()]
    backend.decoder = tokenizers.decoders.Sequence([*each, tokenizers.decoders.Fuse()])
    return Tokenizer(backend)


@pytest.mark.parametrize("text", ["😀😀", "\n€", "▁é", "aß\ufffd"])
@pytest.mark.parametrize("num_left", [1, 2, 3])
def test_bytes_of_a_cut_character_spoil_no_other(text: str, num_left: int) -> None:
    ours, last = with_byte_tokens(), text[-1].encode()[:num_left]
    is_whole = last == text[-1].encode()
    ids = [*text[:-1].encode(), *last]
    expected = text if is_whole else text[:-1] + "\ufffd" * num_left
    assert ours.decode(ids) == "".join(pieces(ours, ids, True)) == expected
    assert ours.decode([257, *ids, 256, 999]) == f"a{expected} "


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_stream_like_decode(seed: int) -> None:
    """Most of them no UTF-8, with whole characters and other tokens among them."""
    rng, ours = random.Random(seed), with_byte_tokens()
    pool = [*range(128, 256, 5), *"😀".encode(), 256, 257, 258]
    ids = rng.choices(pool, k=200)
    for at in range(0, 200, 20):
        ids[at:at] = "😀é".encode()
    text = ours.decode(ids)
    assert "".join(pieces(ours, ids, True)) == text
    data = b"".join(bytes([i]) if i < 256 else (b" ", b"a", " é".encode())[i - 256] for i in ids)
    assert text.replace("\ufffd", "") == data.decode(errors="ignore") and text.count("😀") >= 10


def test_the_bytes_of_tokens_are_those_of_the_text(tokenizer: Tokenizer) -> None:
    text = "Häuser 🙂 日本\n  x \ufffd <|im_end|>"
    ids = tokenizer.encode(text)
    assert any("\ufffd" in tokenizer.decode([i]) for i in ids)  # parts of characters
    assert b"".join(token_bytes(tokenizer, i) for i in ids) == text.encode()
    assert token_bytes(tokenizer, tokenizer.vocab_size + 5) == b""


def test_a_template_larger_than_any_is_not_read(tmp_path: Path, smollm2: Path) -> None:
    """A file with a hole takes no room on a disk, and all of it in memory."""
    shutil.copytree(smollm2, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    with (tmp_path / "model" / "chat_template.jinja").open("wb") as file:
        file.truncate((256 << 20) + 1)
    with pytest.raises(CorruptModelError, match=r"chat_template\.jinja is larger than"):
        Tokenizer.from_folder(tmp_path / "model")
