"""The value of a tool's argument that a model wrote between tags, by the argument's schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoengine.text.checked_json import strict_json

ANY = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
BRANCHES = ("anyOf", "oneOf", "allOf")
MAX_DEPTH = 16  # of references and branches, which may lead in a circle


def argument_of(text: str, schema: object, root: object) -> Any:
    """The text itself where the schema allows a string and no value that the text is as JSON; else
    that value, or the text if it is none. root: the schema that references begin at.
    """
    types = _types(schema, root)
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


def _types(schema: object, root: object, depth: int = 0) -> frozenset[str]:
    """JSON schema's types of the values that it allows; ANY if it does not say."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return ANY
    listed = schema.get("type")
    listed = [listed] if isinstance(listed, str) else listed
    if isinstance(listed, list):
        return frozenset(kind for kind in listed if isinstance(kind, str)) & ANY or ANY
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return frozenset().union(*map(_types_of, values))
    if isinstance(schema.get("$ref"), str):
        return _types(_target(schema["$ref"], root), root, depth + 1)
    branches: list[Any] = next((v for v in map(schema.get, BRANCHES) if isinstance(v, list)), [])
    return frozenset().union(*(_types(each, root, depth + 1) for each in branches)) or ANY


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
