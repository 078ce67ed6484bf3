"""The value of a tool's argument that a model wrote between tags, by the argument's schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoengine.text.checked_json import strict_json

ANY = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
BRANCHES = ("anyOf", "oneOf", "allOf")
MAX_DEPTH = 64  # of branches and references in each other


def argument_of(text: str, schema: object, root: object) -> Any:
    """The text itself where the schema allows a string and no value that the text is as JSON; else
    that value, or the text if it is none. root: the schema that references begin at.
    """
    types = _types(schema, root, set()) or ANY
    if types == {"string"}:
        return text
    is_flag = "boolean" in types and "string" not in types
    try:
        value = strict_json(text.lower() if is_flag else text)
    except ValueError:
        return text
    if types == ANY or "string" not in types:
        return value
    return value if _types_of(value) & (types - {"string"}) else text


def _types(schema: object, root: object, seen: set[str], depth: int = 0) -> frozenset[str]:
    """JSON schema's types of the values that it allows; ANY if it does not say. seen: references
    that were followed, which add no more: they may lead in a circle, or many to one place.
    """
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return ANY
    listed = schema.get("type")
    listed = [listed] if isinstance(listed, str) else listed
    if isinstance(listed, list):
        return frozenset(kind for kind in listed if isinstance(kind, str)) & ANY or ANY
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return frozenset().union(*map(_types_of, values))
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference in seen:
            return frozenset()
        seen.add(reference)
        return _types(_target(reference, root), root, seen, depth + 1)
    branches: list[Any] = next((v for v in map(schema.get, BRANCHES) if isinstance(v, list)), [])
    types = (_types(each, root, seen, depth + 1) for each in branches)
    return frozenset().union(*types) if branches else ANY


def _types_of(value: object) -> frozenset[str]:
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
