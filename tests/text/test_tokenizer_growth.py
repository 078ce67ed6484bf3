"""Tokenizers whose steps make short texts very long are refused before a text meets them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import Sequence as Processors
from tokenizers.processors import TemplateProcessing

from nanoengine.errors import CorruptModelError
from nanoengine.text.tokenizer import Tokenizer as Ours
from nanoengine.text.tokenizer_growth import MAX_GROWTH, _steps, growth

CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": ""}


def written(folder: Path, **parts: Any) -> Path:
    made = Tokenizer(models.BPE(vocab={chr(i): i for i in range(128)}, merges=[]))
    for name, part in parts.items():
        setattr(made, name, part)
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"normalizer": normalizers.Sequence([Replace("b", "bb")] * 40)}, "1099511627776 times"),
        (
            {"normalizer": normalizers.Sequence([Replace("b", "CC"), Replace("C", "bb")] * 20)},
            "normalizer may make a text 1099511627776 times as long; the limit is 256",
        ),
        (
            {
                "normalizer": normalizers.Sequence(
                    [Replace("b", "BB"), normalizers.Lowercase()] * 40
                )
            },
            "1099511627776 times",
        ),
        ({"normalizer": normalizers.Sequence([Replace(Regex("x*"), "b")] * 40)}, "times as long"),
        ({"normalizer": Replace("b", "b" * 300)}, "300 times as long"),
        ({"normalizer": normalizers.Sequence([normalizers.Lowercase()] * 257)}, "has 257 steps"),
        ({"pre_tokenizer": pre_tokenizers.Sequence([ByteLevel()] * 20)}, "pre_tokenizer may"),
        ({"decoder": decoders.Sequence([decoders.Replace("b", "bb")] * 40)}, "decoder may"),
        (
            {
                "post_processor": Processors(
                    [TemplateProcessing(single="$A $A", pair="$A $B", special_tokens=[])] * 30
                )
            },
            "post_processor may",
        ),
    ],
)
def test_steps_that_texts_grow_by_are_refused(
    tmp_path: Path, parts: dict[str, Any], message: str
) -> None:
    with pytest.raises(CorruptModelError, match=message):
        Ours.from_folder(written(tmp_path, **parts))


@pytest.mark.parametrize("key", ["normalizer", "n\\u006frmali\\u007Aer"])
def test_a_normalizer_is_seen_before_the_library_adds_tokens(tmp_path: Path, key: str) -> None:
    """It runs on added tokens while the file is read. JSON may escape the letters of a key."""
    bomb = normalizers.Sequence([Replace("b", "bb")] * 40)
    path = written(tmp_path) / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"] = [
        {"id": 200, "content": "b", "normalized": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    ]
    steps = f'"{key}": {bomb.__getstate__().decode()}'
    path.write_text(json.dumps(content).replace('"normalizer": null', steps))
    with pytest.raises(CorruptModelError, match="normalizer may make a text 1099511627776 times"):
        Ours.from_folder(tmp_path)


def test_steps_of_real_tokenizers_stay(tmp_path: Path) -> None:
    """Many that do not meet, and some that only shorten."""
    steps = [Replace(letter, letter.upper() * 3) for letter in "acdefghi"]
    steps += [Replace(Regex(" {2,}"), " "), normalizers.Lowercase(), normalizers.NFKC()]
    made = Ours.from_folder(
        written(
            tmp_path,
            normalizer=normalizers.Sequence([normalizers.Prepend("_"), Replace(" ", "_"), *steps]),
            pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Digits(), ByteLevel()]),
        )
    )
    assert made.encode("a b")


@pytest.mark.parametrize("seed", range(40))
def test_no_text_grows_more_than_is_thought(seed: int) -> None:
    draw = random.Random(seed)

    def word(most: int) -> str:
        return "".join(draw.choices("abc", k=draw.randint(1, most)))

    steps = [Replace(word(2), word(4)) for _ in range(draw.randint(1, 6))]
    sequence = normalizers.Sequence(steps)
    most = growth([*_steps(json.loads(sequence.__getstate__()))])
    for _ in range(20):
        text = word(12)
        assert len(sequence.normalize_str(text)) <= most * len(text)


def test_charsmaps_that_meet_are_refused() -> None:
    assert growth([*_steps(CHARSMAP)]) < MAX_GROWTH < growth([*_steps(CHARSMAP)] * 2)
