"""Values that a model wrote as Python does, where JSON was asked for."""

from __future__ import annotations

import ast
import json
from typing import Any

MAX_CHARS = 10_000  # Python's own parser takes memory and depth


def python_value(text: str) -> Any:
    """The value of a literal of Python that JSON has, too. Raises ValueError for other texts."""
    if len(text) > MAX_CHARS:
        raise ValueError("too long for a literal")
    try:
        value = ast.literal_eval(text.strip())
        return json.loads(json.dumps(value, allow_nan=False))  # tuples become lists
    except (MemoryError, RecursionError, SyntaxError, TypeError) as error:
        raise ValueError("no literal that JSON has") from error
