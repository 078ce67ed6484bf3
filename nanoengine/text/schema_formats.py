"""A JSON schema as llguidance is to read it: the formats of its texts that say something, and its
patterns; and what goes through the schemas of a schema.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Section 7.3 of JSON Schema's "Validation" (2020-12).
FORMATS = frozenset(
    (
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname"),
        *("idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid"),
        *("uri-template", "json-pointer", "relative-json-pointer", "regex"),
    )
)
VALUES = ("const", "default", "enum", "examples")  # keys whose values are no schemas
NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


def readable(schema: Any) -> Any:
    """A schema without the formats that JSON Schema does not define, as "password", which are notes
    to readers, by its section 7.2.3: llguidance would refuse them. Its patterns are as in `sound`.
    """
    return rebuilt(schema, _readable)


def rebuilt(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A schema, of which each schema is what `change` makes of it, those inside it first."""
    if isinstance(schema, list):
        return [rebuilt(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for key, value in schema.items():
        if key in VALUES:
            made[key] = value
        elif key in NAMED and isinstance(value, dict):
            made[key] = {name: rebuilt(each, change) for name, each in value.items()}
        else:
            made[key] = rebuilt(value, change)
    return change(made)


def _readable(schema: dict[str, Any]) -> dict[str, Any]:
    made = dict(schema)
    if isinstance(named := made.get("format"), str) and named not in FORMATS:
        del made["format"]
    if isinstance(pattern := made.get("pattern"), str):
        made["pattern"] = sound(pattern)
    if isinstance(named := made.get("patternProperties"), dict):
        made["patternProperties"] = {sound(name): each for name, each in named.items()}
    return made


def sound(pattern: str) -> str:
    """A regular expression whose negated classes leave out U+001F, too. In one that has all control
    characters llguidance 1.9 allows quotes and backslashes, whether they are in it or not.
    """
    made, at, in_class = [], 0, False
    while at < len(pattern):
        length = 2 if pattern[at] == "\\" else 1
        part = pattern[at : at + length]
        if not in_class and pattern.startswith("[^", at):
            part, length, in_class = "[^\\x1f", 2, True
            if pattern.startswith("]", at + 2):  # the first one is a character
                part, length = f"{part}\\]", 3
        elif part == "[" and not in_class:
            in_class = True
            if pattern.startswith("]", at + 1):
                part, length = "[]", 2
        elif part == "]":
            in_class = False
        made.append(part)
        at += length
    return "".join(made)
