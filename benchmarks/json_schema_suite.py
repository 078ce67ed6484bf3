"""Answers in the forms of the public JSON Schema Test Suite, checked by jsonschema:

    python -m benchmarks.json_schema_suite FOLDER [MODEL] [--texts 4] [--max-tokens 200]

FOLDER holds the suite's files for one draft. The source archive of the PyPI package jsonschema has
them: `pip download --no-deps --no-binary :all: jsonschema`, then json/tests/draft2020-12 in it.
Prints JSON: how many schemas stay within what llguidance documents, and have a valid instance in
the suite; how many of those are accepted; and of the texts to them how many ended by "stop" or by
"length", and are valid. Ends with status 1 below 90 % accepted, or for a text that ended by "stop"
and is not valid.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # has no types

from nanoengine import LLM, InvalidParamsError, SamplingParams, StructuredOutputsParams

# Whose values are schemas, lists of schemas, or schemas by name.
SCHEMAS = {"items", "additionalProperties"}
LISTS = {"anyOf", "allOf", "prefixItems"}  # oneOf is taken where it can only mean anyOf
NAMED = {"properties", "patternProperties", "$defs"}
PLAIN = {
    *("type", "enum", "const", "required", "$ref", "$schema", "title", "description", "default"),
    *("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"),
    *("pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("multipleOf", "$comment", "examples"),
}
FORMATS = {
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
}
LEAST = 0.9


def is_within(schema: Any) -> bool:
    """Whether a schema has documented keywords and formats alone, refers to nothing but itself, and
    has at most one pattern of names, as several must be disjoint.
    """
    if not isinstance(schema, dict):
        return isinstance(schema, bool)
    places = schema.get("$ref", "#"), schema.get("$schema", "#")
    is_own = str(places[0]).startswith("#") and "//localhost" not in str(places[1])
    if not is_own or len(schema.get("patternProperties", {})) > 1:
        return False
    if schema.get("format", "date") not in FORMATS:
        return False
    inner: list[Any] = []
    for name, value in schema.items():
        if name in SCHEMAS:
            inner.append(value)
        elif name in LISTS:
            inner += value
        elif name in NAMED:
            inner += value.values()
        elif name not in PLAIN:
            return False
    return all(map(is_within, inner))


def schemas_of(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The names and schemas of a draft's files that are within the features and can be met."""
    for file in sorted(folder.glob("*.json")):
        for case in json.loads(file.read_text(encoding="utf-8")):
            can_be_met = any(test["valid"] for test in case["tests"])
            if isinstance(case["schema"], dict) and can_be_met and is_within(case["schema"]):
                yield f"{file.stem}: {case['description']}", case["schema"]


def measure(llm: LLM, folder: Path, num_texts: int, max_tokens: int) -> dict[str, Any]:
    """What became of the schemas, and of `num_texts` texts to each that is accepted."""
    counts: Counter[str] = Counter()
    refused: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for name, schema in schemas_of(folder):
        counts["within"] += 1
        form = StructuredOutputsParams(json=schema)
        params = [
            SamplingParams(max_tokens=max_tokens, seed=seed, structured_outputs=form)
            for seed in range(num_texts)
        ]
        try:
            llm.llm_engine.inputs.grammars.state_of(form)
        except InvalidParamsError as error:
            refused[name] = str(error)
            continue
        counts["accepted"] += 1
        validator = jsonschema.validators.validator_for(schema)(schema)
        for output in llm.generate(["JSON: "] * num_texts, params, use_tqdm=False):
            (made,) = output.outputs
            counts[str(made.finish_reason)] += 1
            if made.finish_reason == "stop":
                if _is_valid(validator, made.text):
                    counts["valid"] += 1
                else:
                    wrong[name] = made.text
    return {**counts, "refused": refused, "not_valid": wrong}


def _is_valid(validator: Any, text: str) -> bool:
    try:
        return bool(validator.is_valid(json.loads(text)))
    except ValueError:
        return False


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=200)
    given = parser.parse_args()
    with LLM(given.model, max_model_len=512) as llm:
        found = measure(llm, given.folder, given.texts, given.max_tokens)
    print(json.dumps(found, indent=1, ensure_ascii=False))
    accepted = found.get("accepted", 0)
    sys.exit(found["not_valid"] != {} or accepted < LEAST * max(1, found.get("within", 0)))


if __name__ == "__main__":
    main()
