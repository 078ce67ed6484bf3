"""Random JSON schemas within what llguidance says it can do, for texts that jsonschema checks."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
NAMES = ("name", "age", "tags", "é", "a b", "$id2", "x")
PATTERNS = ("^[a-z]{1,5}$", "^[0-9]{2}-[A-Z]$", "^(ab|c)*d$")
FORMATS = ("date", "time", "uuid", "ipv4")


def random_schema(seed: int) -> Schema:
    """A schema whose shortest texts are short: nesting ends at the third level."""
    rng = random.Random(seed)
    made = _object(rng, 0) if rng.random() < 0.7 else _any(rng, 0)
    if rng.random() < 0.2:
        made = {"$defs": {"part": _any(rng, 2)}, **made}
        if made.get("type") == "object":
            made["properties"] = {**made["properties"], "part": {"$ref": "#/$defs/part"}}
    return made


def _any(rng: random.Random, depth: int) -> Schema:
    leaves = (_string, _integer, _number, _boolean, _enum, _const)
    kinds = leaves if depth >= 2 else (*leaves, _object, _array, _any_of)
    made = rng.choice(kinds)(rng, depth)
    if rng.random() < 0.1:
        made["description"] = "a part"
    return made


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 3))
    made: Schema = {
        "type": "object",
        "properties": {name: _any(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
    }
    if rng.random() < 0.8:
        made["additionalProperties"] = False
    elif rng.random() < 0.5:
        made["additionalProperties"] = _any(rng, 2)
    return made


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    made: Schema = {"type": "array", "items": _any(rng, depth + 1), "minItems": least}
    made["maxItems"] = least + rng.randint(0, 2)
    if rng.random() < 0.2:
        made["prefixItems"] = [_any(rng, 2)]
    return made


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def _string(rng: random.Random, depth: int) -> Schema:
    match rng.randrange(4):
        case 0:
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        case 1:
            return {"type": "string", "format": rng.choice(FORMATS)}
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 9)}


def _integer(rng: random.Random, depth: int) -> Schema:
    made: Schema = {"type": "integer"}
    low = rng.randint(-50, 50)
    if rng.random() < 0.6:
        made[rng.choice(("minimum", "exclusiveMinimum"))] = low
        made[rng.choice(("maximum", "exclusiveMaximum"))] = low + rng.randint(10, 1000)
    if rng.random() < 0.2:
        made["multipleOf"] = rng.randint(2, 5)
    return made


def _number(rng: random.Random, depth: int) -> Schema:
    return {"type": "number", "minimum": rng.randint(-9, 0), "maximum": rng.randint(1, 9)}


def _boolean(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _enum(rng: random.Random, depth: int) -> Schema:
    values = ["red", 7, None, True, "grün", 1.5, "red and green"]
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def _const(rng: random.Random, depth: int) -> Schema:
    return {"const": rng.choice(["k", 3, False, [1, {"a": None}], {"b": ["c"]}])}
