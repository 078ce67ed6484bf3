"""Rules by which tokens are drawn, and how near two tokens are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanoengine.models.draw import Draws, exponentials

RULES: dict[str, dict[str, Any]] = {
    "all": {},
    "cold": {"temperature": 0.05},
    "hot": {"temperature": 30.0},
    "top_k": {"top_k": 40},
    "one": {"top_k": 1},
    "nearly all": {"top_k": 47000},
    "top_p": {"top_p": 0.9},
    "top_p, hot": {"top_p": 0.6, "temperature": 20.0},
    "top_p, few": {"top_p": 1e-6},
    "top_p, nearly all": {"top_p": 1 - 1e-12},
    "both": {"top_k": 300, "top_p": 0.7},
    "min_p": {"min_p": 0.02},
    "all three": {"top_k": 500, "top_p": 0.99, "min_p": 0.01, "temperature": 0.6},
}


def runs_as_fast(one: Tensor, other: Tensor, logits: Tensor, draws: Draws, row: int) -> bool:
    """Whether these tokens of a row are so near in the race that fp32 may choose either."""
    numbers = exponentials(draws.rules[4:, row, None, None], len(logits))[0]
    speeds = torch.softmax(logits.double() / draws.rules[0, 0], dim=0) / numbers
    return bool(abs(speeds[one] / speeds[other] - 1) < 1e-5)
