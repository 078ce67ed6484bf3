"""The driver of the JSON Schema Test Suite, over a suite of five cases."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import json_schema_suite
from nanoengine import LLM

CASES: list[Any] = [
    {"description": "met", "schema": {"enum": [1, "é"]}, "tests": [{"valid": True}]},
    {"description": "never met", "schema": {"enum": []}, "tests": [{"valid": False}]},
    {"description": "unknown", "schema": {"not": {}}, "tests": [{"valid": True}]},
    {"description": "remote", "schema": {"$ref": "http://a"}, "tests": [{"valid": True}]},
    {"description": "refused", "schema": {"maxLength": 2.0}, "tests": [{"valid": True}]},
]


def test_what_is_counted(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "enum.json").write_text(json.dumps(CASES))
    with LLM(tiny("llama"), dtype="float32", num_gpu_blocks=20) as llm:
        found = json_schema_suite.measure(llm, tmp_path, 2, 40)
        assert {name: found[name] for name in ("within", "accepted", "stop", "valid")} == {
            "within": 2,
            "accepted": 1,
            "stop": 2,
            "valid": 2,
        }
        assert [*found["refused"]] == ["enum: refused"] and found["not_valid"] == {}
