"""Mixture of experts (arXiv 1701.06538): which experts a row goes to, and the sum of their results.

Every number of a row comes from that row alone, in a fixed order: each expert multiplies by itself,
ties go to the lowest index, and results are added in the order of the row's choices. So the bits of
a row do not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nanoengine.config import ExpertsConfig


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert: gate and up are [inner, hidden], down is [hidden, inner]."""

    gate: Tensor
    up: Tensor
    down: Tensor


class Experts:
    """Sends each row to its experts and adds up what they give, an expert at a time."""

    def __init__(
        self,
        config: ExpertsConfig,
        router: Callable[[Tensor], Tensor],
        experts: Sequence[Callable[[Tensor], Tensor]],
    ) -> None:
        """router: [tokens, hidden] -> logits of all experts, fp32 [tokens, experts]."""
        self._config, self._router, self._experts = config, router, experts

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        ids, weights = route(self._config, self._router(x))
        tokens, top_k = ids.shape
        chosen = ids.flatten()
        counts = torch.bincount(chosen, minlength=len(self._experts)).tolist()
        parts = x.new_empty(len(chosen), x.shape[1])
        places = torch.split(chosen.argsort(stable=True), counts)
        for expert, rows in zip(self._experts, places, strict=True):
            if len(rows):
                parts[rows] = expert(x[rows // top_k])
        return add_up(parts.view(tokens, top_k, -1), weights)


class GroupedExperts:
    """The same in two products for all experts, while the host waits for nothing: for a GPU, which
    can replay it.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        router: Callable[[Tensor], Tensor],
        weights: Iterable[ExpertWeights],
        gated: Callable[[Tensor], Tensor],
    ) -> None:
        """gated: activation(gate) * up of [rows, 2 * inner]."""
        self._config, self._router, self._gated = config, router, gated
        for index, expert in enumerate(weights):
            (inner, hidden), count = expert.gate.shape, config.count
            if index == 0:
                self._gate_up = expert.gate.new_empty(count, 2 * inner, hidden)
                self._down = expert.down.new_empty(count, hidden, inner)
            torch.cat((expert.gate, expert.up), out=self._gate_up[index])
            self._down[index] = expert.down
        self._all = torch.arange(config.count, device=self._down.device)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        ids, weights = route(self._config, self._router(x))
        tokens, top_k = ids.shape
        chosen, places = ids.flatten().sort(stable=True)
        ends = torch.searchsorted(chosen, self._all, right=True).int()
        both = functional.grouped_mm(x[places // top_k], self._gate_up.mT, offs=ends)
        results = functional.grouped_mm(self._gated(both), self._down.mT, offs=ends)
        parts = torch.empty_like(results)
        parts[places] = results
        return add_up(parts.view(tokens, top_k, -1), weights)


def route(config: ExpertsConfig, logits: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [tokens, experts] -> the experts of each row, int64 [tokens, top_k], the likeliest
    first, and their weights, fp32 [tokens, top_k].
    """
    scores = logits.softmax(-1)
    ids = scores.sort(dim=-1, descending=True, stable=True).indices[:, : config.top_k]
    weights = scores.gather(1, ids)
    if config.renormalises:
        total = weights[:, :1].clone()
        for slot in range(1, config.top_k):
            total += weights[:, slot : slot + 1]
        weights = weights / total
    return ids, weights


def add_up(parts: Tensor, weights: Tensor) -> Tensor:
    """The sum over slots of parts [tokens, top_k, hidden] times weights [tokens, top_k], in fp32
    and in the order of the slots, rounded once.
    """
    total = parts[:, 0].float() * weights[:, :1]
    for slot in range(1, parts.shape[1]):
        # Not one fused operator, which would round otherwise at the end of a vector.
        total += parts[:, slot].float() * weights[:, slot : slot + 1]
    return total.to(parts.dtype)
