"""Reads JSON: of users and models as the standard has it, and checkpoints' files with checks whose
errors have the file and the key.

Knows types and sizes, not what a value means.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from nanoengine.errors import CorruptModelError, ModelLoadError, shown

MAX_SIZE = 10_000_000  # far above any dimension of a real model
MAX_JSON_BYTES = 256 << 20
MAX_DEPTH = 64
MAX_DIGITS = 1000  # of an integer
MAX_REASON = 200  # characters of a library's error; it may quote a whole file


def strict_json(text: str | bytes) -> Any:
    """The value of a JSON text of a user or a model. Raises ValueError, also for NaN, infinities,
    integers of more than MAX_DIGITS and what is nested too deeply to be read.
    """
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite, parse_int=_integer)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def object_in(text: str) -> dict[str, Any] | None:
    """The object that a JSON text is; None if it is none."""
    try:
        value = strict_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _integer(digits: str) -> int:
    """Python's own limit (4300) has an error about Python."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits, and may have {MAX_DIGITS}")
    return int(digits)


def _finite(digits: str) -> float:
    """1e999 is a number of JSON, and would be written as Infinity, which is none."""
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{shown(digits)} is too large for a number")
    return value


class CheckedJson:
    """A JSON object with typed, checked access; every error has the file and the key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = read_json(path)

    def fill(self, defaults: Mapping[str, Any]) -> None:
        """Set values for missing keys; a key with null is missing only if its default is an
        object.
        """
        objects = [key for key, value in defaults.items() if isinstance(value, dict)]
        given = {k: v for k, v in self.values.items() if v is not None or k not in objects}
        self.values = {**defaults, **given}

    def get(self, key: str) -> Any:
        """The unchecked value; None for null and for a missing key."""
        return self.values.get(key)

    def size(self, key: str, default: int | None = None, limit: int = MAX_SIZE) -> int:
        """A dimension: an integer from 1 to `limit`. null counts as missing."""
        return whole(self.path, key, self._value(key, default), limit)

    def real(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        return positive(self.path, key, self._value(key, default))

    def flag(self, key: str) -> bool:
        """A boolean; False if missing, as in transformers' classes of these models."""
        value = self._value(key, False)
        if not isinstance(value, bool):
            raise CorruptModelError(
                f"{self.path}: {key!r} is {shown(value)}, neither true nor false"
            )
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CorruptModelError(f"{self.path} lacks the key {key!r}")
        return value


def whole(path: Path, key: str, value: Any, limit: int = MAX_SIZE) -> int:
    """`value` if it is an integer from 1 to `limit`; CorruptModelError otherwise."""
    if type(value) is not int or not 0 < value <= limit:
        raise CorruptModelError(
            f"{path}: {key!r} is {shown(value)}, not an integer within 1 to {limit}"
        )
    return value


def positive(path: Path, key: str, value: Any) -> float:
    """`value` if it is a positive, finite number; CorruptModelError otherwise."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Compare without conversion: float() of a huge integer raises.
    if not is_number or not 0 < value <= 1e30:
        raise CorruptModelError(f"{path}: {key!r} is {shown(value)}, not a positive number")
    return float(value)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises CorruptModelError for other content, ModelLoadError if the file
    cannot be read."""
    try:
        check_size(path)
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unambiguous)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptModelError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CorruptModelError(f"{path} must hold a JSON object, not {type(content).__name__}")
    if is_deep(content):  # other code reads or shows values recursively
        raise CorruptModelError(f"{path} is nested deeper than {MAX_DEPTH} levels")
    return content


def read_json_if_any(path: Path) -> dict[str, Any]:
    """Like `read_json`; an empty dict if there is no such file."""
    return read_json(path) if has_file(path) else {}


def has_file(path: Path) -> bool:
    """Whether the file exists. Raises ModelLoadError if access is denied."""
    try:
        return path.is_file()
    except OSError as error:
        raise ModelLoadError(f"{shown(str(path))} cannot be read: {error.strerror}") from error


def check_size(path: Path) -> None:
    """Raise CorruptModelError for a file of text larger than any of a real model."""
    if path.stat().st_size > MAX_JSON_BYTES:
        raise CorruptModelError(f"{path} is larger than {MAX_JSON_BYTES} bytes")


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values and values[key] != value:
            raise ValueError(f"the key {shown(key)} is there twice, with different values")
        values[key] = value
    return values


def is_deep(content: Any) -> bool:
    """Whether a value is nested deeper than MAX_DEPTH levels."""
    level = [content]
    for _ in range(MAX_DEPTH):
        inner = (part.values() if isinstance(part, dict) else part for part in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
    return bool(level)
