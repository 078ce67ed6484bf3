"""The lists of a `quantization_config`: which modules stayed numbers, or which alone did not.

Methods list names, parts of names, or patterns. Patterns come from a file that nobody has checked,
so only those run that cannot take long.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from nanoengine.config.model import LeftOut
from nanoengine.loading.wrappers import PREFIXES

LEFT_OUT = (
    *("modules_to_not_convert", "ignore", "ignored_layers"),
    *("exclude_modules", "llm_int8_skip_modules"),  # ModelOpt's, bitsandbytes'
)
ONLY = "modules_in_block_to_quantize"  # GPTQ's: lists of names
PATTERN, ANY = "re:", "Linear"  # compressed-tensors'
ANYTHING = "*"  # in ModelOpt's names
MAX_PATTERN, MAX_REPEATS = 200, 4
MODULE = ".weight"


def read_left_out(quantised: object) -> LeftOut:
    """The lists of a `quantization_config`, which may be anything."""
    if not isinstance(quantised, dict):
        return LeftOut()
    entries = [entry for key in LEFT_OUT for entry in _strings(quantised.get(key))]
    targets = [group.get("targets") for group in groups_of(quantised)]
    only = [*_strings(quantised.get(ONLY)), *_strings(targets)]
    return LeftOut(tuple(entries), () if ANY in only else tuple(only))


def _strings(listed: object) -> Iterator[str]:
    """Those in a list, or in lists in it."""
    for entry in listed if isinstance(listed, list) else ():
        yield from _strings(entry)
        if isinstance(entry, str):
            yield entry


def groups_of(quantised: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """compressed-tensors' groups of modules; {} for one that is no object."""
    groups = quantised.get("config_groups")
    listed = groups.values() if isinstance(groups, dict) else ()
    return [group if isinstance(group, dict) else {} for group in listed]


def stays_numbers(name: str, left_out: LeftOut) -> bool:
    """Whether the lists say so of a matrix. name: as of `weight_shapes`."""
    names = _names(name.removesuffix(MODULE))
    is_open = not left_out.only or _is_among(names, left_out.only)
    return not is_open or _is_among(names, left_out.entries)


def _names(module: str) -> tuple[str, ...]:
    """Of the module, alone and with other models beside it."""
    wrapped = (
        theirs + module.removeprefix(ours) for theirs, ours in PREFIXES if module.startswith(ours)
    )
    return tuple(dict.fromkeys((module, *wrapped)))


def _is_among(names: tuple[str, ...], entries: Iterable[str]) -> bool:
    return any(_means(entry, name) for entry in entries for name in names)


def _means(entry: str, name: str) -> bool:
    """Whether an entry means this module: by a pattern from the name's beginning on, by a name with
    stars, or by parts of the name.
    """
    if entry.startswith(PATTERN):
        pattern = _pattern(entry.removeprefix(PATTERN))
        return pattern is not None and pattern.match(name) is not None
    if ANYTHING in entry:
        is_short = len(entry) <= MAX_PATTERN and entry.count(ANYTHING) <= MAX_REPEATS
        return is_short and fnmatchcase(name, entry)
    parts = entry.strip(".")
    return bool(parts) and f".{parts}." in f".{name}."


@lru_cache(64)
def _pattern(text: str) -> re.Pattern[str] | None:
    """None if it is none, or could take long: with repeated groups, or with many repeats."""
    is_long = len(text) > MAX_PATTERN or sum(map(text.count, "*+{?")) > MAX_REPEATS
    if is_long or re.search(r"\)[*+{?]|\\\d", text.replace(r"\d", "")):
        return None
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return None
