"""Logits to tokens. Knows sampling parameters and positions, nothing of schedulers or KV.

A token is drawn by inverting the cumulative distribution at a uniform number that is a hash of
(seed, position): no generator state, so neither batch mates nor preemption can change a request's
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
import xxhash
from torch import Tensor

from nanoengine.sequence import Sequence


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) only: xxh3-64 over 2^64, cut to 52
    bits.
    """
    key = (seed & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little") + position.to_bytes(8, "little")
    return (xxhash.xxh3_64_intdigest(key) >> 12) / (1 << 52)


MakeTensor = Callable[[object, torch.dtype], Tensor]


class Sampler:
    """Chooses the next token of each sequence."""

    def __init__(self, argmax: Callable[[Tensor], Tensor], tensor: MakeTensor) -> None:
        """argmax: [n, vocab] -> int64 [n], the first place of a row's largest value. tensor: makes
        one where the logits are.
        """
        self._argmax = argmax
        self._tensor = tensor

    def sample(self, logits: Tensor, seqs: Seq[Sequence], positions: Seq[int]) -> Tensor:
        """logits [n, vocab] of any float dtype, one row a sequence; returns int64 [n], token ids.

        positions: of the tokens to choose; what comes before them may not be appended yet.
        """
        held = [
            i
            for i, (s, position) in enumerate(zip(seqs, positions, strict=True))
            if position - s.num_prompt_tokens < s.params.min_tokens
        ]
        if held:
            logits = logits.clone()
            for row in held:
                logits[row, sorted(seqs[row].stop_token_ids)] = -torch.inf
        tokens = self._argmax(logits)
        drawn = [i for i, s in enumerate(seqs) if not s.params.greedy]
        if drawn:
            rows = self._tensor(drawn, torch.int64)
            numbers = [uniform(seqs[i].seed, positions[i]) for i in drawn]
            tokens[rows] = self._draw(logits[rows].float(), [seqs[i] for i in drawn], numbers)
        return tokens

    def _draw(self, logits: Tensor, seqs: Seq[Sequence], numbers: list[float]) -> Tensor:
        params = [s.params for s in seqs]

        def column(values: list[float]) -> Tensor:
            return self._tensor(values, torch.float64).unsqueeze(1)

        logits = logits / column([p.temperature for p in params]).float()
        if any(0 < p.top_k < logits.shape[1] for p in params) or any(p.top_p < 1 for p in params):
            vocab = logits.shape[1]
            limits = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
            most = self._tensor(limits, torch.int64).unsqueeze(1)
            logits = _top_k_top_p(logits, most, column([p.top_p for p in params]))
        if any(p.min_p > 0 for p in params):
            floor = (
                logits.amax(dim=1, keepdim=True) + column([p.min_p for p in params]).log().float()
            )
            logits = logits.masked_fill(logits < floor, -torch.inf)
        cumulative = torch.softmax(logits, dim=1, dtype=torch.float64).cumsum(dim=1)
        u = column(numbers) * cumulative[:, -1:]
        return torch.searchsorted(cumulative, u, right=True).squeeze(1)


def _top_k_top_p(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """-inf outside the k likeliest tokens, then outside the smallest set of probability top_p."""
    ranked, order = logits.sort(dim=1, descending=True)
    places = torch.arange(logits.shape[1], device=logits.device)
    ranked = ranked.masked_fill(places >= top_k, -torch.inf)
    probs = torch.softmax(ranked, dim=1, dtype=torch.float64)
    before = probs.cumsum(dim=1) - probs  # mass of the likelier tokens
    ranked = ranked.masked_fill((before >= top_p) & (top_p < 1), -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(1, order, ranked)
