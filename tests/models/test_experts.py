"""Experts: routing by hand, the same rows in any company, and one product for all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config, Qwen2MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from nanoengine.config.model import ExpertsConfig
from nanoengine.models.expert_layer import make_mixture, make_router
from nanoengine.models.experts import (
    ExpertWeights,
    GroupedExperts,
    MixtureWeights,
    RouterWeights,
    add_up,
    route,
)
from nanoengine.models.torch_ops import TorchOps, silu_mul

HIDDEN, INNER, COUNT, TOP_K = 24, 16, 6, 3
PARTS = ("gate", "up", "down")
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


@pytest.mark.parametrize("has_bias", [False, True])
def test_all_experts_in_one_product_are_as_each_by_itself(has_bias: bool) -> None:
    x, router, experts = some(19, HIDDEN), some(COUNT, HIDDEN), some_weights()
    router[4] = -100 * x[:9].sum(0)  # to which few rows go
    if has_bias:
        biases = zip(some(COUNT, INNER), some(INNER, COUNT).T, some(COUNT, HIDDEN), strict=True)
        experts = [replace(each, biases=b) for each, b in zip(experts, biases, strict=True)]
    ops = TorchOps()
    weights = MixtureWeights(RouterWeights(router, some(COUNT) if has_bias else None), experts)
    one_by_one = make_mixture(ops, CONFIG, weights, None, "silu")
    chosen = make_router(ops, CONFIG, weights, None)
    grouped = GroupedExperts(chosen, iter(experts), COUNT, silu_mul, None)
    for rows in (x, x[:1]):
        torch.testing.assert_close(grouped(rows), one_by_one(rows), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_experts_equal_a_sum_by_hand(num_rows: int) -> None:
    x, router, weights = some(num_rows, HIDDEN), some(COUNT, HIDDEN), some_weights()
    mixture = MixtureWeights(RouterWeights(router), weights)
    found = make_mixture(TorchOps(), CONFIG, mixture, None, "silu")(x)
    for row, got in zip(x, found, strict=True):
        scores = (router @ row).softmax(0)
        top = scores.topk(TOP_K)
        expected = torch.zeros(HIDDEN)
        for share, index in zip(top.values / top.values.sum(), top.indices.tolist(), strict=True):
            w = weights[index]
            expected += share * (w.down @ (torch.nn.functional.silu(w.gate @ row) * (w.up @ row)))
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (3, 2), (4, 1)])
@pytest.mark.parametrize("renormalises", [True, False])
def test_scores_by_sigmoid_are_those_of_deepseek(
    num_groups: int, top_groups: int, renormalises: bool
) -> None:
    """transformers' router, with a bias that changes the choice and no weight."""
    settings = DeepseekV3Config(
        hidden_size=HIDDEN,
        n_routed_experts=24,
        num_experts_per_tok=4,
        n_group=num_groups,
        topk_group=top_groups,
        norm_topk_prob=renormalises,
        routed_scaling_factor=2.5,
    )
    theirs = DeepseekV3TopkRouter(settings)
    theirs.weight.data, theirs.e_score_correction_bias = some(24, HIDDEN), some(24)
    ours = ExpertsConfig(24, 4, INNER, renormalises, (), "sigmoid", 2.5, num_groups, top_groups)
    x = some(50, HIDDEN)
    logits, weights, ids = theirs(x)
    got_ids, got = route(ours, logits, theirs.e_score_correction_bias)
    assert torch.equal(got_ids.sort(-1).values, ids.sort(-1).values)
    places = ids.argsort(-1), got_ids.argsort(-1)
    torch.testing.assert_close(got.gather(1, places[1]), weights.gather(1, places[0]))
    assert not torch.equal(got_ids, route(ours, logits)[0])


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_scores_in_groups_are_those_of_deepseek_v2(method: str) -> None:
    """transformers' router: a group is as good as its best expert."""
    settings = DeepseekV2Config(
        num_attention_heads=1,
        hidden_size=HIDDEN,
        n_routed_experts=24,
        num_experts_per_tok=4,
        n_group=6,
        topk_group=2,
        topk_method=method,
        routed_scaling_factor=1.5,
    )
    theirs = DeepseekV2TopkRouter(settings)
    theirs.weight.data = some(24, HIDDEN)
    groups = {"num_groups": 6, "top_groups": 2, "group_best": 1} if "group" in method else {}
    logits, weights, ids = theirs(some(50, HIDDEN))
    config = ExpertsConfig(24, 4, INNER, False, scaling=1.5, **groups)
    got_ids, got = route(config, logits)
    assert torch.equal(got_ids.sort(-1).values, ids.sort(-1).values)
    places = ids.argsort(-1), got_ids.argsort(-1)
    torch.testing.assert_close(got.gather(1, places[1]), weights.gather(1, places[0]))


def test_a_shared_expert_is_that_of_qwen() -> None:
    """transformers' block, with a gate."""
    settings = Qwen2MoeConfig(
        hidden_size=HIDDEN,
        num_experts=COUNT,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=INNER,
        shared_expert_intermediate_size=20,
    )
    block = Qwen2MoeSparseMoeBlock(settings)
    for seed, parameter in enumerate(block.parameters()):
        parameter.data.copy_(some(*parameter.shape, 9)[..., seed])
    gate_up, down = block.experts.gate_up_proj.data, block.experts.down_proj.data
    weights = MixtureWeights(
        RouterWeights(block.gate.weight.data),
        [ExpertWeights(*both.chunk(2), each) for both, each in zip(gate_up, down, strict=True)],
        shared=ExpertWeights(
            *(getattr(block.shared_expert, f"{part}_proj").weight.data for part in PARTS)
        ),
        shared_gate=block.shared_expert_gate.weight.data,
    )
    x = some(9, HIDDEN)
    config = replace(CONFIG, renormalises=False)
    found = make_mixture(TorchOps(), config, weights, None, "silu")(x)
    torch.testing.assert_close(found, block(x[None])[0].detach(), atol=1e-4, rtol=1e-5)
