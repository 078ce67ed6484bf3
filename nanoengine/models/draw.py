"""Draws a token from each row of logits: the numbers that say how, and PyTorch's way to do it. And
which tokens are likeliest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from nanoengine.context import MakeTensor
from nanoengine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Draws:
    """How the rows of logits are drawn from.

    rules: float64 [5, rows], on the logits' device: temperature, top_k (0: all), top_p, min_p, and
    where in [0, 1) the cumulative distribution is inverted. is_cut, has_floor: whether any row has
    a top_k or top_p, or a min_p, that leaves tokens out.
    """

    rules: Tensor
    is_cut: bool
    has_floor: bool

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], numbers: Sequence[float], tensor: MakeTensor
    ) -> Self:
        """Those of such rows. numbers: where each distribution is inverted."""
        rules = (
            [p.temperature for p in params],
            [max(p.top_k, 0) for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
            [*numbers],
        )
        is_cut = any(p.top_k > 0 or p.top_p < 1 for p in params)
        return cls(tensor(rules, torch.float64), is_cut, any(p.min_p > 0 for p in params))


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """logits: [rows, vocab] of any float dtype. Returns int64 [rows]: a token of each row, which
    means nothing where a row has a NaN or no finite largest value.
    """
    temperature, top_k, top_p, min_p, number = draws.rules.unsqueeze(2)
    logits = logits.float() / temperature.float()
    vocab = logits.shape[1]
    if draws.is_cut:
        logits = _top_k_top_p(logits, top_k.where(top_k > 0, vocab), top_p)
    if draws.has_floor:
        floor = logits.amax(dim=1, keepdim=True) + min_p.log().float()
        logits = logits.masked_fill(logits < floor, -torch.inf)
    cumulative = torch.softmax(logits, dim=1, dtype=torch.float64).cumsum(dim=1)
    tokens = torch.searchsorted(cumulative, number * cumulative[:, -1:], right=True).squeeze(1)
    return tokens.clamp_(max=vocab - 1)


def _top_k_top_p(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set -inf outside the k likeliest tokens, then outside the smallest set that has top_p."""
    ranked, order = logits.sort(dim=1, descending=True, stable=True)
    places = torch.arange(logits.shape[1], device=logits.device)
    ranked = ranked.masked_fill(places >= top_k, -torch.inf)
    probs = torch.softmax(ranked, dim=1, dtype=torch.float64)
    before = probs.cumsum(dim=1) - probs  # mass of the likelier tokens
    ranked = ranked.masked_fill((before >= top_p) & (top_p < 1), -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(1, order, ranked)


def likeliest(logprobs: Tensor, count: int) -> Tensor:
    """logprobs: float32 [rows, vocab], none above 0. Returns int64 [rows, count]: the likeliest
    tokens of each row, likelier ones first, of equally likely ones the first; of a row with a NaN:
    any.
    """
    # Keys that no two tokens share. No log probability is above 0: a likelier one's bits are less.
    keys = logprobs.view(torch.int32).long().bitwise_and_(0x7FFFFFFF).bitwise_left_shift_(32)
    keys += torch.arange(logprobs.shape[1], device=logprobs.device)
    return keys.topk(count, dim=1, largest=False).values & 0xFFFFFFFF
