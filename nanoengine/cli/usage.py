"""UsageError, and what it says about a flag that does not exist."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from nanoengine.errors import near_name, shown
from nanoengine.text.known_names import sentence_of


class UsageError(Exception):
    """The command line cannot be understood: exit status 2."""


def unknown_command(text: str, known: Iterable[str]) -> str:
    """The error about a command that does not exist."""
    near = near_name(text, known)
    hint = f"; did you mean {near}?" if near else ""
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
    hint = "the model needs no flag" if name == "model" else sentence_of(name) or hint
    return f"unknown flag {shown(flag)}{'; ' if hint else ''}{hint}{more}"
