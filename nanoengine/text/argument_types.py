"""The value of a tool's argument that a model wrote between tags, by the argument's schema."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import and_, or_
from typing import Any

from nanoengine.text.checked_json import strict_json
from nanoengine.text.python_literals import python_value

Types = frozenset[str]
ANY = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
BRANCHES = ("anyOf", "oneOf", "allOf")
MAX_DEPTH = 64  # of branches and references in each other


def argument_of(text: str, key: str, root: object) -> Any:
    """The text itself where the schema allows a string and no value that the text is as JSON; else
    that value, or the text if it is none. root: the schema of all arguments.
    """
    types = _types_in(key, root, root, set()) or ANY
    if types == {"string"}:
        return text
    try:
        value = _value_of(text, types)
    except ValueError:
        return text
    if types == ANY or "string" not in types:
        return value
    return value if _types_of(value) & (types - {"string"}) else text


def _value_of(text: str, types: Types) -> Any:
    """As JSON. Where no text is allowed, as Python writes it does as well: templates show models
    their earlier calls so. Raises ValueError.
    """
    may_be_python = "string" not in types
    if may_be_python and "boolean" in types and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    try:
        return strict_json(text)
    except ValueError:
        if not may_be_python:
            raise
        return python_value(text)


def _types_in(key: str, schema: object, root: object, seen: set[str], depth: int = 0) -> Types:
    """The types that the schema of an object allows for one of its properties; none if it does not
    say. seen: as in _types.
    """
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return frozenset()
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    if isinstance(properties, Mapping) and key in properties:
        return _types(properties[key], root, set())
    inner = [each for name in BRANCHES for each in _listed(schema, name)]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        inner.append(_target(reference, root))
    found = [_types_in(key, each, root, seen, depth + 1) for each in inner]
    if any(found):
        return frozenset().union(*found)
    return _types(others, root, set()) if isinstance(others, Mapping) else frozenset()


def _types(schema: object, root: object, seen: set[str], depth: int = 0) -> Types:
    """JSON schema's types of the values that it allows; ANY if it does not say. seen: references
    that were followed, which add no more: they may lead in a circle, or many to one place.
    """
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return ANY
    listed = schema.get("type")
    listed = [listed] if isinstance(listed, str) else listed
    if isinstance(listed, list):
        named = {kind for kind in listed if isinstance(kind, str)}
        return frozenset(named | {"integer"} if "number" in named else named) & ANY or ANY
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return frozenset().union(*map(_types_of, values))
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference in seen:
            return frozenset()
        seen.add(reference)
        return _types(_target(reference, root), root, seen, depth + 1)
    for name in BRANCHES:
        if branches := _listed(schema, name):
            types = [_types(each, root, seen, depth + 1) for each in branches]
            known = [each for each in types if each]  # a reference that was followed says nothing
            return reduce(
                and_ if name == "allOf" else or_, known, ANY if name == "allOf" else _NONE
            )
    return ANY


_NONE: Types = frozenset()


def _listed(schema: Mapping[str, Any], name: str) -> list[Any]:
    branches = schema.get(name)
    return branches if isinstance(branches, list) else []


def _types_of(value: object) -> Types:
    """JSON schema's types of one value."""
    match value:
        case None:
            return frozenset(("null",))
        case bool():
            return frozenset(("boolean",))
        case int():
            return frozenset(("integer", "number"))
        case float():
            return frozenset(("number",))
        case str():
            return frozenset(("string",))
    return frozenset(("array" if isinstance(value, list) else "object",))


def _target(reference: str, root: object) -> object:
    """What a reference within the schema leads to; None if it leads elsewhere."""
    start, *steps = reference.split("/")
    target = root if start == "#" else None
    for step in steps:
        name = step.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, Mapping) else None
    return target
