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

from nanoengine.config.model import LeftOut, ModuleNames
from nanoengine.loading.wrappers import PREFIXES

LEFT_OUT = (
    *("modules_to_not_convert", "ignore", "ignored_layers"),
    *("exclude_modules", "llm_int8_skip_modules"),  # ModelOpt's, bitsandbytes'
)
ONLY = "modules_in_block_to_quantize"  # GPTQ's: lists of names
PATTERN, ANY = "re:", "Linear"  # compressed-tensors'
ANYTHING = "*"  # in ModelOpt's names
MODULES = "extra_config"  # AutoRound's: bits of modules
DYNAMIC, NUMBERS_OF = "dynamic", "-:"  # GPTQ's rules: the patterns of those that stay numbers
MAX_PATTERN, MAX_PATTERNS = 200, 64
# Repeats in a pattern. A name of 60 characters is tried in about as many ways as it has characters
# to that power; one with numbers is tried for the modules of each layer, others for one of them.
MAX_REPEATS, MAX_WITH_NUMBERS = 4, 2
MODULE = ".weight"


def read_left_out(quantised: object) -> LeftOut:
    """The lists of a `quantization_config`, which may be anything."""
    if not isinstance(quantised, dict):
        return LeftOut()
    entries = [entry for key in LEFT_OUT for entry in _strings(quantised.get(key))]
    rules = quantised.get(DYNAMIC)
    left = (key for key in rules if key.startswith(NUMBERS_OF)) if isinstance(rules, dict) else ()
    entries += (PATTERN + key.removeprefix(NUMBERS_OF) for key in left)
    modules = quantised.get(MODULES)
    own = modules.items() if isinstance(modules, dict) else ()
    entries += (name for name, each in own if stays_16_bits(each))
    targets = [group.get("targets") for group in groups_of(quantised)]
    only = [*_strings(quantised.get(ONLY)), *_strings(targets)]
    return LeftOut(_sorted(entries), ModuleNames() if ANY in only else _sorted(only))


def stays_16_bits(module: object) -> bool:
    """Whether AutoRound says so of a module."""
    bits = module.get("bits") if isinstance(module, dict) else None
    return type(bits) is int and bits >= 16


def _sorted(entries: Iterable[str]) -> ModuleNames:
    """Names, and the first MAX_PATTERNS patterns, which are those with stars as well."""
    names, patterns = set(), dict[str, None]()
    for entry in entries:
        if entry.startswith(PATTERN) or ANYTHING in entry:
            patterns[entry] = None
        elif parts := entry.strip("."):
            names.add(parts)
    return ModuleNames(frozenset(names), tuple(patterns)[:MAX_PATTERNS])


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


def _is_among(names: tuple[str, ...], listed: ModuleNames) -> bool:
    if listed.names and any(not listed.names.isdisjoint(_parts(name)) for name in names):
        return True
    return any(_means(entry, name) for entry in listed.patterns for name in names)


def _parts(name: str) -> Iterator[str]:
    """All parts of a name that stand between dots."""
    parts = name.split(".")
    for first in range(len(parts)):
        for last in range(first, len(parts)):
            yield ".".join(parts[first : last + 1])


def _means(entry: str, name: str) -> bool:
    """Whether a pattern fits this module from its name's beginning on, or a name with stars does.
    Without digits they mean modules of all layers, or of all with as many digits.
    """
    is_plain = not any(mark.isdigit() for mark in entry)
    return _fits(entry, re.sub(r"\d", "0", name) if is_plain else name)


@lru_cache(4096)
def _fits(entry: str, name: str) -> bool:
    if entry.startswith(PATTERN):
        pattern = _pattern(entry.removeprefix(PATTERN))
        return pattern is not None and pattern.match(name) is not None
    is_short = len(entry) <= MAX_PATTERN and entry.count(ANYTHING) <= MAX_REPEATS
    return is_short and fnmatchcase(name, entry)


@lru_cache(64)
def _pattern(text: str) -> re.Pattern[str] | None:
    """None if it is none, or could take long: with repeated groups, or with many repeats."""
    has_numbers = any(mark.isdigit() for mark in text)
    num_repeats = sum(map(text.count, "*+{?"))
    if len(text) > MAX_PATTERN or num_repeats > (MAX_WITH_NUMBERS if has_numbers else MAX_REPEATS):
        return None
    if re.search(r"\)[*+{?]|\\\d", text.replace(r"\d", "")):
        return None
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return None
