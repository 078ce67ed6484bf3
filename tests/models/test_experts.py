"""Experts: routing by hand, the same rows in any company, and one product for all of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from driver import Driver, small_engine
from marks import needs_compiler
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config, Qwen2MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from nanoengine.config.model import ExpertsConfig
from nanoengine.models.activations import silu_mul
from nanoengine.models.expert_layer import make_mixture, make_router
from nanoengine.models.experts import (
    ExpertWeights,
    GroupedExperts,
    MixtureWeights,
    Routing,
    add_up,
    route,
)
from nanoengine.models.layer_ops import TorchOps
from nanoengine.startup import parts

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
    ids, weights = route(Routing(replace(CONFIG, renormalises=False)), logits)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2]]
    torch.testing.assert_close(weights, logits.softmax(-1).gather(1, ids))
    _, normed = route(Routing(CONFIG), logits)
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
        biases = zip(some(COUNT, 2 * INNER), some(COUNT, HIDDEN), strict=True)
        experts = [replace(each, biases=b) for each, b in zip(experts, biases, strict=True)]
    ops = TorchOps()
    router_bias = some(COUNT) if has_bias else None
    weights = MixtureWeights(router, Routing(CONFIG), experts, router_bias)
    one_by_one = make_mixture(ops, weights, None, "silu")
    chosen = make_router(ops, weights, None)
    grouped = GroupedExperts(chosen, iter(experts), COUNT, silu_mul, None)
    for rows in (x, x[:1]):
        torch.testing.assert_close(grouped(rows), one_by_one(rows), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_experts_equal_a_sum_by_hand(num_rows: int) -> None:
    x, router, weights = some(num_rows, HIDDEN), some(COUNT, HIDDEN), some_weights()
    mixture = MixtureWeights(router, Routing(CONFIG), weights)
    found = make_mixture(TorchOps(), mixture, None, "silu")(x)
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
    got_ids, got = route(Routing(ours, theirs.e_score_correction_bias), logits)
    assert torch.equal(got_ids.sort(-1).values, ids.sort(-1).values)
    places = ids.argsort(-1), got_ids.argsort(-1)
    torch.testing.assert_close(got.gather(1, places[1]), weights.gather(1, places[0]))
    assert not torch.equal(got_ids, route(Routing(ours), logits)[0])


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
    got_ids, got = route(Routing(config), logits)
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
        block.gate.weight.data,
        Routing(replace(CONFIG, renormalises=False)),
        [ExpertWeights(*both.chunk(2), each) for both, each in zip(gate_up, down, strict=True)],
        shared=ExpertWeights(
            *(getattr(block.shared_expert, f"{part}_proj").weight.data for part in PARTS)
        ),
        shared_gate=block.shared_expert_gate.weight.data,
    )
    x = some(9, HIDDEN)
    found = make_mixture(TorchOps(), weights, None, "silu")(x)
    torch.testing.assert_close(found, block(x[None])[0].detach(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("has_kernels", [pytest.param(True, marks=needs_compiler), False])
@pytest.mark.parametrize(
    ("name", "router"), [("ernie-moe", "mlp.gate.weight"), ("hunyuan-moe", "mlp.gate.wg.weight")]
)
def test_the_router_of_a_model_in_16_bits_is_in_32(
    tiny: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    router: str,
    has_kernels: bool,
) -> None:
    """Its rows differ by less than 16 bits can say, so that rounded ones choose other experts."""
    if not has_kernels:
        monkeypatch.setattr(parts, "choose_ops", lambda *_: TorchOps())
    folder = tmp_path / "model"
    shutil.copytree(tiny(name), folder)
    stored = load_file(folder / "model.safetensors")
    for each, tensor in stored.items():
        loudness = 0 if each.endswith("correction_bias") else 8 if ".experts." in each else 1
        stored[each] = tensor * loudness
        if each.endswith(router):
            small = 1 + torch.arange(len(tensor))[:, None] * 2.0**-12
            stored[each] = tensor[:1].bfloat16().float() * small
            assert torch.equal(stored[each].bfloat16(), tensor[:1].bfloat16().expand_as(tensor))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    driver = Driver(small_engine(folder, dtype="bfloat16"))
    (output,) = driver.run([[7 * i % 256 for i in range(20)]])
    driver.engine.close()
    tokens = output.prompt_token_ids + output.outputs[0].token_ids
    with torch.inference_mode():
        logits = theirs(torch.tensor([tokens])).logits[0, 19:-1].float()
    ours = torch.stack(driver.logits[output.request_id])
    assert (ours - logits).abs().max() < 0.3  # with another choice of experts it is 7
