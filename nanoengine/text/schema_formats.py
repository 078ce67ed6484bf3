"""The formats of texts in a JSON schema: which of them say something."""

from __future__ import annotations

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


def without_other_formats(schema: Any) -> Any:
    """A schema without the formats that JSON Schema does not define, as "password", which are notes
    to readers, by its section 7.2.3. llguidance would refuse them.
    """
    if isinstance(schema, list):
        return [without_other_formats(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for key, value in schema.items():
        if key in VALUES:
            made[key] = value
        elif key in NAMED and isinstance(value, dict):
            made[key] = {name: without_other_formats(each) for name, each in value.items()}
        elif key != "format" or not isinstance(value, str) or value in FORMATS:
            made[key] = without_other_formats(value)
    return made
