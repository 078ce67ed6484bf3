"""Mistral's tekken.json, beside what transformers converts it to."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models
from transformers.integrations.mistral.tokenizer import MistralConverter

from nanoengine.errors import CorruptModelError, ModelNotFoundError
from nanoengine.text.tokenizer import Tokenizer
from nanoengine.text.tokenizer_files import read_eos_id

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = (
    *("th", "he", "in", " t", "the", " the", "er", "ab", "bc", "abc", "cab", "  ", "\n\n", "()"),
    *("é", "漢", "字", "漢字", "abcab", "unreachable", " 1"),
)
SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
TEXTS = (
    *("the cabbage in there", "  the  in\n\n()", "abcabcab cab", "漢字 é naïve 🙂", "", " "),
    *("unreachable 12 12", "[INST]the[/INST]</s>in", "\x00\t\r\n a/ "),
)


def content(**changes: Any) -> dict[str, Any]:
    """A file with all bytes, some words and one that has no id."""
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS] + [b"zz"]
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(each).decode(), "token_str": None}
        for i, each in enumerate(tokens)
    ]
    config = {
        "pattern": PATTERN,
        "default_vocab_size": 8 + len(tokens) - 1,
        "default_num_special_tokens": 8,
    }
    special = [{"rank": i, "token_str": text} for i, text in enumerate(SPECIAL)]
    return {"config": config, "vocab": entries, "special_tokens": special[::-1]} | changes


def write(folder: Path, **changes: Any) -> Path:
    (folder / "tekken.json").write_text(json.dumps(content(**changes)), encoding="utf-8")
    return folder


def test_it_encodes_as_transformers_does(tmp_path: Path) -> None:
    ours = Tokenizer.from_folder(write(tmp_path))
    theirs = MistralConverter(str(tmp_path / "tekken.json")).converted()
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text).ids
        assert ours.decode(ids, skip_special_tokens=False) == text
        assert ours.encode(text) == [1, *ids]
    assert ours.backend.get_vocab() == theirs.get_vocab()
    assert ours.encode("zz", add_special_tokens=False) == [8 + ord("z")] * 2


def test_its_special_tokens_have_their_names(tmp_path: Path) -> None:
    ours = Tokenizer.from_folder(write(tmp_path))
    assert (ours.bos_token_id, ours.eos_token_id, read_eos_id(tmp_path)) == (1, 2, 2)
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert ours.special_ids == set(range(8))


def test_files_of_2024_do_not_list_them(tmp_path: Path) -> None:
    config = content()["config"] | {"default_vocab_size": 300, "default_num_special_tokens": 24}
    ours = Tokenizer.from_folder(write(tmp_path, special_tokens=None, config=config))
    text = "[INST]a[/INST][TOOL_CONTENT]<SPECIAL_23>"
    assert ours.encode(text) == [1, 3, 24 + ord("a"), 4, 19, 23]


def test_tokenizer_json_goes_before_it(tmp_path: Path) -> None:
    write(tmp_path)
    made = tokenizers.Tokenizer(models.BPE({"x": 0}, []))
    made.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).vocab_size == 1


ENTRY = {"rank": 0, "token_bytes": "!", "token_str": None}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"config": []}, "config is"),
        ({"config": {"pattern": 5}}, "no valid tokenizer"),
        ({"config": {"pattern": "("}}, "no valid tokenizer"),
        ({"config": {"pattern": "a", "default_vocab_size": -1}}, "default_vocab_size must be"),
        ({"config": {"pattern": "a", "default_num_special_tokens": 10**9}}, "must be from 0 to"),
        ({"vocab": {}}, "vocab is"),
        ({"vocab": [5]}, "an entry of vocab is 5"),
        ({"vocab": [ENTRY]}, "token_bytes is '!'"),
        ({"vocab": [ENTRY | {"token_bytes": "YWFh" * 999}]}, "1 to 1024 bytes"),
        ({"special_tokens": [{"rank": 1, "token_str": "<s>"}]}, "no text for each rank"),
        ({"special_tokens": [{"rank": 0, "token_str": "\ud800"}]}, "no valid tokenizer"),
        ({"special_tokens": 5}, "special_tokens is 5"),
        ({"special_tokens": [{"rank": [0], "token_str": "<s>"}]}, "no text for each rank"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CorruptModelError, match=problem):
        Tokenizer.from_folder(write(tmp_path, **changes))


def test_a_folder_without_any_names_it(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"tekken\.json"):
        Tokenizer.from_folder(tmp_path)
