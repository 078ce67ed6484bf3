"""Values as users give them: any library's numbers as Python's own, and how an error shows them."""

from __future__ import annotations

import math
import operator
from numbers import Integral, Real

MAX_COUNT = (1 << 31) - 1
SEEDS = (-(1 << 63), (1 << 64) - 1)  # what fits 64 bits, signed or not
MAX_SHOWN = 100  # characters
MAX_BITS = 128


def integer(value: object) -> int | None:
    """The integer, numpy's too, as an int; None for anything else, as for True and False."""
    if type(value) is int:  # nearly always, and the rest takes ten times as long
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return operator.index(value)


def number(value: object) -> int | float | None:
    """The integer as an int, another finite number as a float; None for anything else."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    whole = integer(value)
    if whole is not None or isinstance(value, bool) or not isinstance(value, Real):
        return whole
    try:
        made = float(value)
    except OverflowError:  # a fraction of huge integers
        return None
    return made if math.isfinite(made) else None


def shown(value: object) -> str:
    """The value as an error shows it, on one line of a readable length."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        if isinstance(value, str | bytes | list | tuple):
            value = value[:MAX_SHOWN]  # a repr of all of it may take long
        text = repr(value)
    except Exception:  # whatever a repr of somebody else's raises
        text = f"a value of type {type(value).__name__}"
    text = "".join(c if c.isprintable() else " " for c in text[: MAX_SHOWN + 1])
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
