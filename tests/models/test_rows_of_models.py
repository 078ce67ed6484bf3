"""A misspelt word in a row of ARCHITECTURES is named, before any answer differs."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import nanoengine.loading
from nanoengine.models.architecture import Architecture, ExpertNames
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.models.families import OUT_IS_TILED

LOADING = Path(nanoengine.loading.__file__).parent


def words_of(hint: Any) -> set[str]:
    """What a field of this type may say; set() if that is anything."""
    if get_origin(hint) is Literal:
        return set(get_args(hint))
    return set().union(*(words_of(inner) for inner in get_args(hint)))


def faults(row: Architecture | ExpertNames) -> Iterator[str]:
    """The words of a row that no code knows."""
    hints = get_type_hints(type(row))
    for field in dataclasses.fields(row):
        value, words = getattr(row, field.name), words_of(hints[field.name])
        given = {value} if isinstance(value, str) else set(value or ()) if words else set()
        if words and given - words:
            yield f"{field.name}={value!r}, which must be of {sorted(words)}"
    if isinstance(row, Architecture):
        experts = dataclasses.astuple(row.experts) if row.experts else ()
        known = {*words_in_loading(), OUT_IS_TILED, *row.requires, *experts}
        for field_name in ("reads", "keys"):
            unread = set(getattr(row, field_name)) - known
            if unread:
                yield f"{field_name}: no module of nanoengine/loading reads {sorted(unread)}"
        if row.experts:
            yield from faults(row.experts)


@functools.cache
def words_in_loading() -> set[str]:
    """The strings in the modules that read config.json."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in LOADING.glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return {node.value for node in nodes if isinstance(node.value, str)}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_row_says_what_the_code_knows(name: str) -> None:
    assert list(faults(ARCHITECTURES[name])) == []


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"qk_norm": "heads"}, "qk_norm='heads', which must be of ['', 'all heads', 'head']"),
        ({"fused": ("gateup",)}, "fused=('gateup',), which must be of ['gate_up', 'qkv']"),
        ({"activation": "silly"}, "activation='silly'"),
        ({"windows": "patern"}, "windows='patern'"),
        ({"reads": ("final_logit_softcaping",)}, "reads: no module of nanoengine/loading reads"),
        ({"keys": {"rms_norms_eps": "norm_eps"}}, "keys: no module of nanoengine/loading reads"),
        ({"experts": ExpertNames(scoring="sigmoids")}, "scoring='sigmoids'"),  # type: ignore[arg-type]
    ],
)
def test_a_misspelt_word_is_named(given: dict[str, Any], text: str) -> None:
    (found,) = faults(Architecture("a model", **given))
    assert found.startswith(text)
