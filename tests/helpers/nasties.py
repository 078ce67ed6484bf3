"""Values that nobody should give as a setting or a sampling parameter, and some that may be given:
for tests that try them all.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Unprintable:
    """Has no repr, no truth value and no string."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth value")

    __str__ = __repr__


def generator() -> Any:
    yield "a"


NASTIES: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 0.5, 2**31 - 1, 2**31, 2**63, 2**64 - 1, 2**64, -(2**63) - 1),
    *(10**12, 10**400, -(10**400), 10**5000, Fraction(10**400, 3), Fraction(1, 3), 1j),
    *(1e308, 1e-320, float("inf"), float("-inf"), float("nan")),
    *("", "auto", "cpu", "x" * 5000, "\0", "\ud800", "cuda:99999999999999999999", "cuda:²", "nan"),
    *(b"x", bytearray(b"x"), [], {}, (), set(), object(), object, Unprintable(), generator()),
    *([5], ["a"], [None], [True], [10**5000], [Unprintable()], [[]], {"5": 1}, {5: 10**400}),
    *({float("inf"): 1}, {1.7: 1}, {True: 1}, {5: float("nan")}, {"x": 1}, [(1, 1), (1, 2)], "51"),
    *(["x" * 5000] * 3, [0] * 100_000, dict.fromkeys(range(10_000), 0), range(5)),
    *(
        np.int64(3),
        np.uint8(3),
        np.float32(0.5),
        np.float64("nan"),
        np.bool_(True),
        np.longdouble(1),
    ),
    *(np.array([1, 2]), np.array(3), np.str_("cpu"), np.bytes_(b"x"), np.datetime64("2020-01-01")),
    *(torch.tensor([1, 2]), torch.tensor(3), torch.float64, torch.bfloat16, torch.device("cpu")),
    *(torch.device("cuda", 1), Path("x"), Path("\0"), "ngram:4", "ngram:0", "INT8"),
]
