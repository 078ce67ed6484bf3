"""JSON schemas whose objects have the properties that they name and no others."""

from __future__ import annotations

from typing import Any

from nanoengine.text.schema_formats import rebuilt

# What says of other properties itself, or wants as many.
ELSEWHERE = {"additionalProperties", "patternProperties", "propertyNames", "minProperties"}
# Beside "properties" they name more of the same object.
ALTERNATIVES = {"anyOf", "oneOf", "$ref"}
# An object fits several schemas at once, or is to fit one of them not.
COMBINED = {
    *("allOf", "if", "not", "dependentSchemas", "dependencies"),
    *("unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
}


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, whose objects have no properties beyond those that they name, unless they say so:
    as xgrammar reads it, and with it vLLM. What fits it, fits the schema. Where schemas are
    combined, objects inside it stay as they are.
    """
    are_combined = False

    def close(part: dict[str, Any]) -> dict[str, Any]:
        nonlocal are_combined
        are_combined |= _combines(part)
        return _closed_object(part)

    made: dict[str, Any] = rebuilt(schema, close)
    return _closed_object(schema) if are_combined else made


def _combines(schema: dict[str, Any]) -> bool:
    """Whether an object of it may be one of another schema, too, which names other properties."""
    has_more = "properties" in schema and bool(ALTERNATIVES & schema.keys())
    return has_more or bool(COMBINED & schema.keys())


def _closed_object(schema: dict[str, Any]) -> dict[str, Any]:
    named, required = schema.get("properties"), schema.get("required", [])
    others = ELSEWHERE | ALTERNATIVES | COMBINED
    if not isinstance(named, dict) or not isinstance(required, list) or others & schema.keys():
        return schema
    is_met = all(isinstance(each, str) and each in named for each in required)
    return {**schema, "additionalProperties": False} if is_met else schema
