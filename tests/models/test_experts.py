"""Experts: routing by hand, the same rows in any company, and one product for all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanoengine.config import ExpertsConfig
from nanoengine.models.experts import ExpertWeights, GroupedExperts, add_up, route
from nanoengine.models.layer_ops import TorchOps, silu_mul

HIDDEN, INNER, COUNT, TOP_K = 24, 16, 6, 3
CONFIG = ExpertsConfig(COUNT, TOP_K, INNER, renormalises=True)


def some(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def some_weights() -> list[ExpertWeights]:
    gate, up, down = (some(COUNT, INNER, HIDDEN + at) for at in range(3))
    each = zip(gate, up[..., 1:], down[..., 2:], strict=True)
    return [ExpertWeights(g, u, d.T.contiguous()) for g, u, d in each]


def test_a_row_goes_to_its_likeliest_experts_and_of_equals_to_the_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0, 2.0], [0.0] * 6])
    ids, weights = route(replace(CONFIG, renormalises=False), logits)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2]]
    torch.testing.assert_close(weights, logits.softmax(-1).gather(1, ids))
    _, normed = route(CONFIG, logits)
    torch.testing.assert_close(normed, weights / weights.sum(-1, keepdim=True))


def test_results_are_added_in_the_order_of_the_choices() -> None:
    """The largest first: in another order the small ones would be lost."""
    parts = torch.tensor([[[1.0], [1e8], [-1e8]], [[1e8], [-1e8], [1.0]]])
    assert add_up(parts, torch.ones(2, 3)).tolist() == [[0.0], [1.0]]


def test_all_experts_in_one_product_are_as_each_by_itself() -> None:
    x, router = some(19, HIDDEN), some(COUNT, HIDDEN)
    router[4] = -100 * x[:9].sum(0)  # to which few rows go
    ops = TorchOps()
    one_by_one = ops.experts(CONFIG, router, iter(some_weights()), None, "silu")
    grouped = GroupedExperts(CONFIG, ops.router(router), iter(some_weights()), silu_mul)
    for rows in (x, x[:1]):
        torch.testing.assert_close(grouped(rows), one_by_one(rows), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_experts_equal_a_sum_by_hand(num_rows: int) -> None:
    x, router, weights = some(num_rows, HIDDEN), some(COUNT, HIDDEN), some_weights()
    found = TorchOps().experts(CONFIG, router, iter(weights), None, "silu")(x)
    for row, got in zip(x, found, strict=True):
        scores = (router @ row).softmax(0)
        top = scores.topk(TOP_K)
        expected = torch.zeros(HIDDEN)
        for share, index in zip(top.values / top.values.sum(), top.indices.tolist(), strict=True):
            w = weights[index]
            expected += share * (w.down @ (torch.nn.functional.silu(w.gate @ row) * (w.up @ row)))
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
