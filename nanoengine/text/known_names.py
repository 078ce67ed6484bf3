"""Names that users bring from other engines, and what each of them is here.

One table (known_tables.py) serves error texts, from_engine_args() and docs/parameters.md. Knows
names and sentences, and neither the settings nor the parameters: a test compares it with them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from nanoengine.errors import ConfigError, InvalidParamsError, near_name, shown
from nanoengine.text import known_tables

P = ParamSpec("P")
R = TypeVar("R")

# Where a name is used: LLM(...), SamplingParams(...), a method of LLM, and the command line.
SETTING, PARAMETER, ARGUMENT, FLAG = SCOPES = ("setting", "parameter", "argument", "flag")
WORKS, RENAMED, CHANGED, MISSING = "works", "renamed", "changed", "missing"
NOTHING = (None, False, "auto", "")  # values that ask for nothing, of most names
# Names whose False or 0 asks for what is not done without them, and the names here of others.
ASKING = ("do_sample", "think", "enable_chunked_prefill", "eos_token_id", "max_length")
ASKED_BY_0 = ("max_tokens", "n", "repetition_penalty", "seed", "thinking_token_budget")
GROUP = re.compile(r"(works|renamed|changed|missing)(?: unless (\(.+?\)))?(?:: (.+))?")
OWNER = {
    SETTING: "it is a setting of the engine: LLM(model, {}=...)",
    PARAMETER: "it is a parameter of a request: SamplingParams({}=...)",
}


@dataclass(frozen=True, slots=True)
class KnownName:
    """A name of other engines. kind: WORKS, RENAMED, CHANGED or MISSING. here: the name that takes
    the same value here, "" if none does. sentence: what an error says after "unknown setting X; ".
    done: values that ask for what is done here without them.
    """

    scope: str
    name: str
    engines: tuple[str, ...]
    kind: str
    here: str
    sentence: str
    done: tuple[object, ...] = ()

    def asks_nothing(self, value: object) -> bool:
        """Whether this value asks for nothing that is missing here."""
        is_asking = self.name in ASKING or self.here in ASKED_BY_0
        known = (None, *self.done) if is_asking else (*NOTHING, *self.done)
        return isinstance(value, bool | int | float | str | None) and value in known

    def is_done(self, value: object) -> bool:
        """Whether this value surely asks for what is done here."""
        return value is None or any(type(value) is type(o) and value == o for o in self.done)


def read_table(scope: str, text: str) -> Iterator[KnownName]:
    """The rows of one table; known_tables.py says how it is written."""
    for heading, names in re.findall(r"^((?:\S.*\n)+)((?: .*\n)+)", text, re.MULTILINE):
        found = GROUP.fullmatch(" ".join(heading.split()))
        if found is None:
            raise ValueError(f"no group begins with {heading!r}")
        kind, values, sentence = found[1], found[2], found[3] or ""
        done = ast.literal_eval(values) if values else ()
        for name, engines in _engines_by_name(names).items():
            here = {WORKS: name, RENAMED: sentence}.get(kind, "")
            said = f"here it is {sentence}" if kind in (RENAMED, CHANGED) else sentence
            yield KnownName(scope, name, engines, kind, here, said, done)


def _engines_by_name(names: str) -> dict[str, tuple[str, ...]]:
    """Engines of each name, from "vLLM: a b  SGLang: b" on any number of lines."""
    found: dict[str, tuple[str, ...]] = {}
    engine = ""
    for word in names.split():
        if word.endswith(":"):
            engine = word.removesuffix(":")
        else:
            found[word] = (*found.get(word, ()), engine)
    return found


ROWS = (
    *read_table(SETTING, known_tables.SETTINGS),
    *read_table(PARAMETER, known_tables.PARAMETERS),
    *read_table(ARGUMENT, known_tables.ARGUMENTS),
    *read_table(FLAG, known_tables.FLAGS),
)
KNOWN = {(row.scope, row.name): row for row in ROWS}


def sentence_of(name: str) -> str:
    """What a name of other engines is here, be it a setting, a parameter, an argument or a flag; ""
    for a name that works as it is, or is not known.
    """
    found = (KNOWN.get((scope, name)) for scope in SCOPES)
    return next((row.sentence for row in found if row and row.sentence), "")


def asks_what_is_done(scope: str, name: str, value: object) -> bool:
    """Whether a name that is none here may be left out: another engine has it, and this value asks
    for what is done here without it.
    """
    row = KNOWN.get((scope, name))
    return row is not None and row.is_done(value)


def unknown_name(scope: str, name: object, known: Iterable[str], where: str = "") -> str:
    """The text of the error about a name that is not among `known`: what it is here if another
    engine has it, else the nearest name. where: follows the name, as in " of chat()".
    """
    if not isinstance(name, str):
        return f"unknown {scope} {shown(name)}; the name of a {scope} is a string"
    hint = _hint(scope, name)
    if not hint and (near := near_name(name, known)):
        hint = f"did you mean {near!r}?"
    return f"unknown {scope} {shown(name)}{where}" + (f"; {hint}" if hint else "")


def _hint(scope: str, name: str) -> str:
    """What is known about the name, first in its own scope."""
    own = KNOWN.get((scope, name))
    if own is not None and own.sentence:
        return own.sentence
    for place, owner in OWNER.items():
        row = KNOWN.get((place, name))
        if row is not None and place != scope and row.here:
            return owner.format(row.here)
    return sentence_of(name)


def translated(engine_args: object, known: Collection[str]) -> dict[str, Any]:
    """Settings, `model` among them, from other engines' arguments: a mapping, or an object such as
    vLLM's EngineArgs. Left out are values that ask for nothing, and a dataclass's defaults.

    known: the settings that there are. Raises ConfigError that names every argument not among them.
    """
    settings: dict[str, Any] = {}
    refused: list[str] = []
    for name, value in _given_in(engine_args).items():
        row = KNOWN.get((SETTING, name)) or KNOWN.get((FLAG, name))
        here = name if name in known else row.here if row and row.here in known else ""
        if value is None or (row and not here and row.asks_nothing(value)):
            continue
        if here in settings:
            refused.append(f"{here} is given twice, the second time as {name!r}")
        elif here:
            settings[here] = value
        else:
            refused.append(unknown_name(SETTING, name, known))
    if "model" not in settings:
        refused.append("the arguments name no model")
    if refused:
        raise ConfigError("\n".join(refused))
    return settings


def _given_in(engine_args: object) -> dict[str, Any]:
    """Names and values; of a dataclass the model, and what differs from the defaults."""
    if isinstance(engine_args, Mapping):
        return dict(engine_args)
    if not hasattr(engine_args, "__dict__"):
        raise ConfigError(f"engine arguments are a mapping or an object, got {shown(engine_args)}")
    given = {name: value for name, value in vars(engine_args).items() if name[:1] != "_"}
    for field in fields(engine_args) if is_dataclass(engine_args) else ():
        made = field.default
        if made is NO_DEFAULT and field.default_factory is not NO_DEFAULT:
            made = field.default_factory()
        if field.name in given.keys() - {"model"} and given[field.name] == made:
            del given[field.name]
    return given


def explains_unknown(
    scope: str, where: str = "", own: Mapping[str, tuple[object, str]] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function: a keyword that it does not have raises InvalidParamsError in words, not
    a bare TypeError. One of another engine is left out if it asks for what is done anyway, as None
    and other defaults there do. The signature and the help stay as they are.

    own: names that mean another thing here than in the scope; of each the value that asks for what
    is done, and the sentence about others.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = signature(function).parameters.keys() - {"self"}
        others = own or {}

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in [name for name in kwargs if name not in known]:
                if name in others:
                    done, sentence = others[name]
                    if kwargs[name] not in (None, done):
                        raise InvalidParamsError(f"unknown {scope} {name!r}{where}; {sentence}")
                elif not asks_what_is_done(scope, name, kwargs[name]):
                    raise InvalidParamsError(unknown_name(scope, name, known, where))
                del kwargs[name]
            return function(*args, **kwargs)

        return call

    return decorate
