"""Draws a token from each row of logits: the numbers that say how, and PyTorch's way to do it. And
which tokens are likeliest.

A draw is a race: each token has an exponential random number, which is a hash of the row's key and
the token; the token with the largest probability over its number wins. That happens as often as its
probability says. Two rows with the same key and similar probabilities mostly give the same token:
if the distance between them (in total variation) is d, at least (1 - d) / (1 + d) of the time
(Daliri, Musco and Suresh 2024, "Coupling without Communication"). So drafts are mostly right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from nanoengine.context import MakeTensor
from nanoengine.sampling_params import SamplingParams

MOST_ROWS = 32  # drawn from at once: each takes eight times the memory of its logits


@dataclass(frozen=True, slots=True)
class Draws:
    """How the rows of logits are drawn from.

    rules: float64 [6, rows], on the logits' device: temperature, top_k (0: all), top_p, min_p, and
    both halves of its key, 32 bits each. is_cut, has_floor: whether any row has a top_k or top_p,
    or a min_p, that leaves tokens out.
    """

    rules: Tensor
    is_cut: bool
    has_floor: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], keys: Sequence[int], tensor: MakeTensor) -> Self:
        """Those of such rows. keys: of each, 64 bits; equal ones give equal random numbers."""
        rules = (
            [p.temperature for p in params],
            [max(p.top_k, 0) for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
            [key >> 32 for key in keys],
            [key & 0xFFFFFFFF for key in keys],
        )
        is_cut = any(p.top_k > 0 or p.top_p < 1 for p in params)
        return cls(tensor(rules, torch.float64), is_cut, any(p.min_p > 0 for p in params))


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """logits: [rows, vocab] of any float dtype. Returns int64 [rows]: a token of each row, which
    means nothing where a row has a NaN or no finite largest value.
    """
    if len(logits) > MOST_ROWS:
        rules_of = torch.split(draws.rules, MOST_ROWS, dim=1)
        parts = zip(torch.split(logits, MOST_ROWS), rules_of, strict=True)
        return torch.cat([draw(part, replace(draws, rules=rules)) for part, rules in parts])
    temperature, top_k, top_p, min_p, *key = draws.rules.unsqueeze(2)
    logits = logits.float() / temperature.float()
    vocab = logits.shape[1]
    if draws.is_cut:
        logits = _top_k_top_p(logits, top_k.where(top_k > 0, vocab), top_p)
    if draws.has_floor:
        floor = logits.amax(dim=1, keepdim=True) + min_p.log().float()
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return torch.softmax(logits, dim=1).div_(exponentials(key, vocab)).argmax(dim=1)


def exponentials(key: Sequence[Tensor], count: int) -> Tensor:
    """Numbers of the exponential distribution with mean 1, float32 [rows, count], that depend on
    the row's key and the place alone. key: both halves, [rows, 1], each less than 2^32.
    """
    first, second = (half.long().int() for half in key)
    places = torch.arange(count, dtype=torch.int32, device=first.device)
    bits = _mixed(_mixed(places ^ first).bitwise_xor_(second))
    # The smallest numbers matter most, and are the most precise.
    numbers = _shifted(bits, 1).float().add_(0.5).mul_(2**-31)
    return numbers.clamp_(max=1 - 2**-24).neg_().log1p_().neg_()


def _mixed(bits: Tensor) -> Tensor:
    """A permutation of all int32, in place: Wellons's lowbias32 (hash-prospector)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        bits.bitwise_xor_(_shifted(bits, shift)).mul_(factor)
    return bits.bitwise_xor_(_shifted(bits, 16))


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, as if without a sign."""
    return (bits >> by).bitwise_and_((1 << (32 - by)) - 1)


def _top_k_top_p(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set -inf outside the k likeliest tokens, then outside the smallest set that has top_p."""
    ranked, order = logits.sort(dim=1, descending=True, stable=True)
    places = torch.arange(logits.shape[1], device=logits.device)
    ranked.masked_fill_(places >= top_k, -torch.inf)
    before = _mass_before(ranked)
    ranked.masked_fill_((before >= top_p) & (top_p < 1), -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(1, order, ranked)


def _mass_before(ranked: Tensor) -> Tensor:
    """Of the likelier tokens, float64 [rows, vocab]."""
    probs = torch.softmax(ranked, dim=1, dtype=torch.float64)
    return probs.cumsum(dim=1).sub_(probs)


def likeliest(logprobs: Tensor, count: int) -> Tensor:
    """logprobs: float32 [rows, vocab], none above 0. Returns int64 [rows, count]: the likeliest
    tokens of each row, likelier ones first, of equally likely ones the first; of a row with a NaN:
    any.
    """
    # Keys that no two tokens share. No log probability is above 0: a likelier one's bits are less.
    keys = logprobs.view(torch.int32).long().bitwise_and_(0x7FFFFFFF).bitwise_left_shift_(32)
    keys += torch.arange(logprobs.shape[1], device=logprobs.device)
    return keys.topk(count, dim=1, largest=False).values & 0xFFFFFFFF
