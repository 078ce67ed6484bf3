"""SentencePiece tokenizers of GGUF files: ids equal to llama.cpp's, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import GGUFValue
from transformers import AutoTokenizer

from nanoengine.errors import CorruptModelError, ModelLoadError, UnsupportedModelError
from nanoengine.loading.gguf.metadata import Metadata
from nanoengine.loading.gguf.tokenizer import build_character_bpe, write_tokenizer
from nanoengine.text.detokenizer import IncrementalDetokenizer
from nanoengine.text.tokenizer import Tokenizer

RECORDED = json.loads(
    (Path(__file__).parents[1] / "data" / "sentencepiece_ids.json").read_text(encoding="utf-8")
)
TEXTS, KINDS = RECORDED["texts"], RECORDED["kinds"]
END = RECORDED["tokens"].index("<|end|>")
Write = Callable[..., Tokenizer]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes the recorded vocabulary under further settings, and reads it back."""
    texts = RECORDED["tokens"]
    ends = [2, texts.index("<|end|>"), texts.index("<|endoftext|>")]

    def written(**settings: Any) -> Tokenizer:
        fields = {
            "general.architecture": "llama",
            "llama.context_length": 128,
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": RECORDED["tokens"],
            "tokenizer.ggml.scores": RECORDED["scores"],
            "tokenizer.ggml.token_type": RECORDED["types"],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        } | settings
        metadata = Metadata(Path("m.gguf"), {k: GGUFValue(v) for k, v in fields.items()})
        assert write_tokenizer(metadata, tmp_path, 600) == ends
        return Tokenizer.from_folder(tmp_path)

    return written


@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_llama_cpp(write: Write, tmp_path: Path, kind: str) -> None:
    ours = write(**KINDS[kind]["settings"])
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text, ids in zip(TEXTS, KINDS[kind]["ids"], strict=True):
        if ids is None:  # Phi-3 has no tokens of white space, which would swallow the next one
            continue
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids, text


def test_scores_may_be_integers(write: Write) -> None:
    """As a writer leaves them that was given whole numbers; their order alone counts."""
    ranks = sorted({*RECORDED["scores"]})
    plain = write()
    whole = write(**{"tokenizer.ggml.scores": [ranks.index(s) for s in RECORDED["scores"]]})
    assert [whole.encode(text) for text in TEXTS] == [plain.encode(text) for text in TEXTS]


@pytest.mark.parametrize("kind", ["Llama", "Gemma"])
def test_decoding_gives_the_text_back(write: Write, kind: str) -> None:
    tokenizer = write(**KINDS[kind]["settings"])
    # With `adds_space` what follows an added token gets a space, as in llama.cpp.
    added = {"Llama": ("<", "▁", "\n\n", "   "), "Gemma": ("<", "▁")}[kind]
    plain = [text for text in TEXTS if not any(part in text for part in added)]
    assert len(plain) > 50
    for text in plain:
        ids = tokenizer.encode(text)
        assert ids[0] == 1 and tokenizer.decode(ids) == text
        stream = IncrementalDetokenizer(tokenizer)
        assert "".join([stream.add(i) for i in ids] + [stream.flush()]) == text


def test_special_tokens_keep_their_place(write: Write) -> None:
    tokenizer = write()
    ids = tokenizer.encode("a<|end|>")
    assert (ids[0], ids[-1]) == (1, END) and tokenizer.decode(ids) == "a"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert write(**{"tokenizer.ggml.add_bos_token": False}).encode("a") == ids[1:-1]
    assert write(**{"tokenizer.ggml.add_eos_token": True}).encode("a") == [*ids[:-1], 2]


@pytest.mark.parametrize(
    ("key", "value", "error", "match"),
    [
        ("scores", RECORDED["scores"][1:], CorruptModelError, "560 token scores for 561 tokens"),
        ("scores", ["a", *RECORDED["scores"][1:]], CorruptModelError, "must be numbers"),
        ("scores", [math.nan, *RECORDED["scores"][1:]], CorruptModelError, "must be numbers"),
        ("scores", [True] * 561, CorruptModelError, "must be numbers"),
        ("token_type", [1], CorruptModelError, "1 token types for 561 tokens"),
        ("token_type", [1.0] * 561, CorruptModelError, "must be integers from 0 to 6"),
        ("token_type", [7] * 561, CorruptModelError, "must be integers from 0 to 6"),
        ("tokens", ["a"] * 561, CorruptModelError, "1 different"),
        ("tokens", [1] * 561, CorruptModelError, "list of strings"),
        (
            "model",
            "t5",
            UnsupportedModelError,
            "'t5' is not supported; supported: gemma4, gpt2, llama",
        ),
    ],
)
def test_bad_vocabularies_are_refused(
    write: Write, key: str, value: Any, error: type[ModelLoadError], match: str
) -> None:
    with pytest.raises(error, match=match):
        write(**{f"tokenizer.ggml.{key}": value})


@pytest.mark.parametrize(
    "texts",
    [["a" * length for length in range(1, 590)], ["a", "b", "ab" * 501]],
    ids=["pairs", "length"],
)
def test_tokens_of_more_pairs_than_a_model_has_are_refused(write: Write, texts: list[str]) -> None:
    """Each of n tokens of one letter can be joined of n pairs: 2 MB of them would take 4 GB."""
    texts = ["<unk>", "<s>", "</s>", *texts]
    settings = {"tokens": texts, "scores": [0.0] * len(texts), "token_type": [1] * len(texts)}
    with pytest.raises(CorruptModelError, match="1000 characters, and 16 pairs for each of"):
        write(**{f"tokenizer.ggml.{key}": value for key, value in settings.items()})


def test_gemma_4_merges_characters_between_newlines() -> None:
    """By the rules of llama.cpp's LLAMA_VOCAB_PRE_TYPE_GEMMA4; a run of newlines that is a token is
    one, though no merge leads to it.
    """
    texts = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts += ["\u2581", "a", "b", "c", "\n", "ab", "\u2581ab", "\u2581\u2581", "\n\n\n", "bc"]
    merges = [("a", "b"), ("\u2581", "\u2581"), ("\u2581", "ab"), ("b", "c")]
    backend = build_character_bpe({t: i for i, t in enumerate(texts)}, merges, "<unk>")
    for text, tokens in {
        "ab abc": ["ab", "\u2581ab", "c"],
        "a  ab\n\n\nab": ["a", "\u2581\u2581", "ab", "\n\n\n", "ab"],
        "b\n\na": ["b", "\n", "\n", "a"],
        " \u00e9bc": ["\u2581", "<0xC3>", "<0xA9>", "bc"],
    }.items():
        assert backend.encode(text).tokens == tokens
        assert backend.decode(backend.encode(text).ids) == text


def test_the_name_of_a_byte_is_text_to_gemma_4() -> None:
    """Of a whole line, too: only runs of newlines may be tokens that no merge makes."""
    texts = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"<0xA>\n", "\n\n"]
    merges = [("\n", "\n")]
    backend = build_character_bpe({t: i for i, t in enumerate(texts)}, merges, "<unk>")
    assert backend.encode("<0x0A>\n\n").tokens == [*"<0x0A>", "\n\n"]
