"""Refuses a tokenizer whose steps make short texts very long.

Forty steps that write a letter twice ask for terabytes; the library then ends the process, when it
adds tokens to the vocabulary at the latest. Knows the steps as tokenizer.json lists them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from nanoengine.errors import CorruptModelError

MAX_STEPS = 256
MAX_GROWTH = 256  # far above that of real ones, which is 3
CHARSMAP_GROWTH = 18  # the longest that NFKC makes of a character
# The key of the steps that the library runs while it reads the file; JSON may escape each letter.
NORMALIZER = re.compile(
    '"' + "".join(rf"(?:{each}|(?i:\\u00{ord(each):02x}))" for each in "normalizer") + r'"\s*:\s*'
)
PARTS = ("normalizers", "pretokenizers", "decoders", "processors")  # keys of a step of several


@dataclass(frozen=True, slots=True)
class Step:
    """finds, writes: letters of what a step replaces, and of what it writes; None: any. factor: how
    many times longer it makes what it finds.
    """

    finds: frozenset[str] | None = None
    writes: frozenset[str] | None = None
    factor: float = 1.0


def check_normalizers(path: Path, text: str) -> None:
    """Raise CorruptModelError for normalizers in a tokenizer.json that a text would grow by. text:
    of the file, which nobody has read yet.
    """
    for found in NORMALIZER.finditer(text):
        try:
            steps, _ = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):
            continue  # the library refuses it, too
        _check(path, "normalizer", steps)


def check_steps(path: Path, backend: tokenizers.Tokenizer) -> None:
    """Raise CorruptModelError for other steps that a text would grow by."""
    for name in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        if (part := getattr(backend, name)) is not None:
            _check(path, name, json.loads(part.__getstate__()))


def _check(path: Path, name: str, content: Any) -> None:
    steps = list(_steps(content))
    if len(steps) > MAX_STEPS:
        raise CorruptModelError(f"{path}: {name} has {len(steps)} steps; the limit is {MAX_STEPS}")
    if (times := growth(steps)) > MAX_GROWTH:
        raise CorruptModelError(
            f"{path}: {name} may make a text {times:.0f} times as long; the limit is {MAX_GROWTH}"
        )


def growth(steps: list[Step]) -> float:
    """How many times as long the steps may make a text: one that finds what another wrote makes
    that longer again.
    """
    made: list[tuple[frozenset[str] | None, float]] = []
    for step in steps:
        before = max((times for written, times in made if _meet(written, step.finds)), default=1.0)
        made.append((step.writes, before * step.factor))
    return max((times for _, times in made), default=1.0)


def _meet(written: frozenset[str] | None, wanted: frozenset[str] | None) -> bool:
    return written is None or wanted is None or not written.isdisjoint(wanted)


def _steps(content: Any) -> Iterator[Step]:
    if not isinstance(content, Mapping):
        return
    for name in PARTS:
        parts = content.get(name)
        for part in parts if isinstance(parts, list) else ():
            yield from _steps(part)
    kind = content.get("type")
    if kind == "Replace":
        yield _replacement(content.get("pattern"), content.get("content"))
    elif kind == "ByteLevel":
        yield Step(factor=2)  # a byte of a letter becomes one of two bytes
    elif kind == "Precompiled":
        yield Step(factor=CHARSMAP_GROWTH)
    elif kind == "TemplateProcessing":
        single = content.get("single")
        texts = [part for part in single if "Sequence" in part] if isinstance(single, list) else []
        yield Step(factor=len(texts))
    elif kind != "Sequence":
        yield Step()


def _replacement(pattern: Any, content: Any) -> Step:
    if not isinstance(pattern, Mapping) or not isinstance(content, str):
        return Step()  # no valid file
    text, writes = pattern.get("String"), frozenset(content)
    if isinstance(text, str) and text:
        return Step(frozenset(text), writes, max(len(content) / len(text), 1))
    return Step(None, writes, 1 + len(content))  # a pattern may match nothing, between any letters
