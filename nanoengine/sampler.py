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


class Sampler:
    """Chooses the next token of each sequence."""

    def __init__(self, argmax: Callable[[Tensor], Tensor]) -> None:
        """argmax: [n, vocab] -> int64 [n], the first place of a row's largest value."""
        self._argmax = argmax

    def sample(self, logits: Tensor, seqs: Seq[Sequence]) -> list[int]:
        """logits [n, vocab] of any float dtype, one row a sequence; returns n token ids."""
        held = [i for i, s in enumerate(seqs) if s.num_output_tokens < s.params.min_tokens]
        if held:
            logits = logits.clone()
            for row in held:
                logits[row, sorted(seqs[row].stop_token_ids)] = -torch.inf
        tokens: list[int] = self._argmax(logits).tolist()
        drawn = [i for i, s in enumerate(seqs) if not s.params.greedy]
        if drawn:
            rows = torch.tensor(drawn, device=logits.device)
            chosen = self._draw(logits[rows].float(), [seqs[i] for i in drawn])
            for row, token in zip(drawn, chosen, strict=True):
                tokens[row] = token
        return tokens

    def _draw(self, logits: Tensor, seqs: Seq[Sequence]) -> list[int]:
        params = [s.params for s in seqs]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(1)

        logits = logits / column([p.temperature for p in params]).float()
        if any(0 < p.top_k < logits.shape[1] for p in params) or any(p.top_p < 1 for p in params):
            logits = _top_k_top_p(
                logits, [p.top_k for p in params], column([p.top_p for p in params])
            )
        if any(p.min_p > 0 for p in params):
            floor = (
                logits.amax(dim=1, keepdim=True) + column([p.min_p for p in params]).log().float()
            )
            logits = logits.masked_fill(logits < floor, -torch.inf)
        cumulative = torch.softmax(logits, dim=1, dtype=torch.float64).cumsum(dim=1)
        u = column([uniform(s.seed, s.num_tokens) for s in seqs]) * cumulative[:, -1:]
        tokens: list[int] = torch.searchsorted(cumulative, u, right=True).squeeze(1).tolist()
        return tokens


def _top_k_top_p(logits: Tensor, top_ks: list[int], top_p: Tensor) -> Tensor:
    """-inf outside the k likeliest tokens, then outside the smallest set of probability top_p."""
    ranked, order = logits.sort(dim=1, descending=True)
    vocab = logits.shape[1]
    limits = torch.tensor([k if 0 < k < vocab else vocab for k in top_ks], device=logits.device)
    ranked = ranked.masked_fill(
        torch.arange(vocab, device=logits.device) >= limits.unsqueeze(1), -torch.inf
    )
    probs = torch.softmax(ranked, dim=1, dtype=torch.float64)
    before = probs.cumsum(dim=1) - probs  # mass of the likelier tokens
    ranked = ranked.masked_fill((before >= top_p) & (top_p < 1), -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(1, order, ranked)
