"""JSON files of a checkpoint, read with suspicion: every error names the file and the key.

Knows types and sizes, no meaning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoengine.errors import CorruptModelError

MAX_SIZE = 10_000_000  # no dimension of a real model comes near
MAX_JSON_BYTES = 256 << 20


class CheckedJson:
    """A JSON object with typed, checked access; every error names the file and the key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = read_json(path)

    def fill(self, defaults: Mapping[str, Any]) -> None:
        """Values for keys that are not there; null is there."""
        self.values = {**defaults, **self.values}

    def get(self, key: str) -> Any:
        """The value as it is, None for null and for a missing key."""
        return self.values.get(key)

    def size(self, key: str, default: int | None = None) -> int:
        """A dimension: an integer within 1 to MAX_SIZE. null counts as missing."""
        value = self._value(key, default)
        if type(value) is not int or not 0 < value <= MAX_SIZE:
            raise CorruptModelError(
                f"{self.path}: {key!r} is {value!r}, not an integer within 1 to {MAX_SIZE}"
            )
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        return positive(self.path, key, self._value(key, default))

    def flag(self, key: str) -> bool:
        """true or false; false if missing, as in transformers' classes of these models."""
        value = self._value(key, False)
        if not isinstance(value, bool):
            raise CorruptModelError(f"{self.path}: {key!r} is {value!r}, neither true nor false")
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CorruptModelError(f"{self.path} lacks the key {key!r}")
        return value


def positive(path: Path, key: str, value: Any) -> float:
    """`value` if it is a positive, finite number; CorruptModelError otherwise."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Compared, not converted: float() of a huge integer raises.
    if not is_number or not 0 < value <= 1e30:
        raise CorruptModelError(f"{path}: {key!r} is {value!r}, not a positive number")
    return float(value)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; CorruptModelError for anything else."""
    if path.stat().st_size > MAX_JSON_BYTES:
        raise CorruptModelError(f"{path} is larger than {MAX_JSON_BYTES} bytes")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptModelError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CorruptModelError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content
