"""UsageError, and what it says about a flag that does not exist."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from nanoengine.errors import near_name, shown
from nanoengine.text.known_names import FLAG, KNOWN, SCOPES, SETTING, KnownName, sentence_of

# Commands of vLLM, Ollama and others that have other names here: what to write.
COMMANDS = {
    "help": "nanoengine --help, or nanoengine COMMAND --help",
    "version": "nanoengine --version",
    "generate": "nanoengine run MODEL PROMPT",
    "benchmark": "nanoengine bench",
    "run-batch": "nanoengine batch IN.jsonl OUT.jsonl --model MODEL",
    "complete": "nanoengine run MODEL PROMPT",
    "launch": "nanoengine serve MODEL",
    "list": "nanoengine models",
    "ls": "nanoengine models",
    "rm": "nanoengine models rm NAME",
    "pull": "nanoengine run ORGANISATION/MODEL, which fetches it from the hub",
    "show": "nanoengine plan MODEL",
}


class UsageError(Exception):
    """The command line cannot be understood: exit status 2."""


def unknown_command(text: str, known: Iterable[str]) -> str:
    """The error about a command that does not exist."""
    near = near_name(text, known)
    hint = f"; did you mean {near}?" if near else ""
    if text in COMMANDS:
        hint = f"; here it is {COMMANDS[text]}"
    return f"unknown command {shown(text)}{hint} (see nanoengine --help)"


def unknown_flag(text: str, parser: argparse.ArgumentParser) -> str:
    """The error about an argument that `parser` does not know, with a near flag if there is one."""
    more = f" (see {parser.prog} --help)"
    if not text.startswith("-"):
        hint = "put a prompt of several words in quotes"
        if "--model" in parser._option_string_actions:
            hint = "a model is named by --model"
        return f"unexpected argument {shown(text)}; {hint}{more}"
    flag = text.partition("=")[0]
    name = flag.lstrip("-").replace("-", "_")
    known = {
        option.removeprefix("--").replace("-", "_")
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    near = near_name(name, known)
    hint = f"did you mean --{near.replace('_', '-')}?" if near else ""
    hint = "the model needs no flag" if name == "model" else _meaning(name, known) or hint
    return f"unknown flag {shown(flag)}{'; ' if hint else ''}{hint}{more}"


def without_idle_flags(args: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The arguments without flags of other engines that ask for what is done here anyway."""
    kept, left = [], [*args]
    while left:
        each = left.pop(0)
        flag, equals, value = each.partition("=")
        row, is_off = _idle_row(flag, parser)
        if row is None:
            kept.append(each)
            continue
        has_next = False
        if not equals and all(isinstance(done, bool) for done in row.done):
            value = str(not is_off)
        elif not equals and left:
            value, has_next = left[0], True
        if value.lower() not in {str(done).lower() for done in row.done}:
            kept.append(each)
        elif has_next:
            left.pop(0)
    return kept


def _idle_row(flag: str, parser: argparse.ArgumentParser) -> tuple[KnownName | None, bool]:
    """The row of a flag that the parser does not know, and whether it is turned off; None for one
    whose values all ask for something.
    """
    if not flag.startswith("--") or flag in parser._option_string_actions:
        return None, False
    name = flag.removeprefix("--").replace("-", "_")
    for each in (name, name.removeprefix("no_")):
        for scope in (SETTING, FLAG):
            row = KNOWN.get((scope, each))
            if row is not None and row.done:
                return row, each != name
    return None, False


def _meaning(name: str, known: set[str]) -> str:
    """What another engine's flag is here; "" for an unknown one. vLLM's has a no- before it to turn
    it off, and dots before a part of its value.
    """
    whole = name.partition(".")[0]
    for each in (whole, whole.removeprefix("no_")):
        for row in (KNOWN.get((scope, each)) for scope in SCOPES):
            if row is not None and row.here in known:
                return f"here it is --{row.here.replace('_', '-')}"
        if sentence := sentence_of(each):
            return sentence
    return ""
