"""Integers as users write them on a command line: 4096, 32K, 1M."""

from __future__ import annotations

import argparse
import re
from fractions import Fraction

# As in vLLM: small letters are powers of 1000, capitals of 1024.
UNITS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
WITH_UNIT = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([kKmM])")


class NoWholeNumberError(argparse.ArgumentTypeError, ValueError):
    """A text is no integer."""


def whole_number(text: str) -> int:
    """The integer that a text is, perhaps with a unit, as 2.5k. Raises NoWholeNumberError."""
    if match := WITH_UNIT.fullmatch(text):
        size = Fraction(match[1]) * UNITS[match[2]]
        if size.denominator == 1:
            return int(size)
    try:
        return int(text)
    except ValueError:
        raise NoWholeNumberError(f"must be an integer, or one as in 32K, got {text!r}") from None
