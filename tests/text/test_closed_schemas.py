"""Objects of a schema have the properties that it names, and what fits it fits the schema."""

from __future__ import annotations

from typing import Any

import pytest

from nanoengine.text.closed_schemas import closed

OPEN = {"type": "object", "properties": {"n": {"type": "integer"}}}
CLOSED = OPEN | {"additionalProperties": False}
REF = {"$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OPEN, CLOSED),
        ({"type": "object"}, {"type": "object"}),
        ({"items": OPEN, "$defs": {"a": OPEN}}, {"items": CLOSED, "$defs": {"a": CLOSED}}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        (
            {"properties": {"properties": OPEN, "const": OPEN, "allOf": {}}},
            {
                "properties": {"properties": CLOSED, "const": CLOSED, "allOf": {}},
                "additionalProperties": False,
            },
        ),
        (OPEN | {"required": ["n"]}, CLOSED | {"required": ["n"]}),
    ],
)
def test_objects_are_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        OPEN | {"additionalProperties": True},
        OPEN | {"additionalProperties": {"type": "string"}},
        OPEN | {"patternProperties": {"^a": {}}},
        OPEN | {"minProperties": 2},
        OPEN | {"required": ["m"]},
        OPEN | {"required": [["n"]]},
        OPEN | {"required": 5},
        OPEN | {"anyOf": [OPEN]},
        OPEN | REF | {"$defs": {"a": OPEN}},
        {"allOf": [OPEN, OPEN]},
        {"items": {"allOf": [REF, OPEN]}, "$defs": {"a": OPEN}},
        {"not": OPEN},
        {"properties": 5},
        {"const": OPEN, "enum": [OPEN], "default": OPEN},
    ],
)
def test_what_may_have_other_properties_stays_open(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_beside_combined_schemas_the_outer_object_is_closed() -> None:
    schema = {"properties": {"a": {"allOf": [OPEN, OPEN]}}}
    assert closed(schema) == schema | {"additionalProperties": False}
