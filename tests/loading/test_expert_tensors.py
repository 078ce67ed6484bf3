"""Experts in checkpoints: a tensor for each or one for all of a layer; numbers that cannot be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nanoengine.config.engine import EngineConfig
from nanoengine.errors import CorruptModelError, ModelLoadError, WeightMismatchError
from nanoengine.loading.checkpoint import CheckpointReader, check_names, ignorable_tensors
from nanoengine.loading.experts_json import expert_parts
from nanoengine.loading.loader import load_model
from nanoengine.loading.model_config import read_model_config
from nanoengine.models import layer_builder
from nanoengine.models.expert_layer import make_mixture
from nanoengine.models.experts import MixtureWeights
from nanoengine.models.layer_ops import LayerOps, TorchOps
from nanoengine.models.products import Product
from nanoengine.models.weight_shapes import weight_shapes

Tiny = Callable[[str], Path]


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All that the model needs, by our names."""
    config = read_model_config(folder)
    shapes = weight_shapes(config)
    with CheckpointReader(folder) as reader:
        reader.rename(expert_parts(config, reader))
        check_names(shapes, reader, ignorable_tensors(config))
        return {name: reader.tensor(name).clone() for name in shapes}


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_one_tensor_for_each_expert_is_one_for_all(tiny: Tiny, tmp_path: Path, name: str) -> None:
    model, found = AutoModelForCausalLM.from_config(reference(tiny(name)).config), []
    for is_original in (True, False):
        folder = tmp_path / str(is_original)
        model.save_pretrained(folder, save_original_format=is_original)
        stored = load_file(folder / "model.safetensors")
        assert any(".experts.0." in each for each in stored) == is_original
        found.append(read(folder))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(values, found[1][key]) for key, values in found[0].items())
    layer = "model.layers.2.mlp.experts"
    fused = model.state_dict()[f"{layer}.gate_up_proj"][1].chunk(2)
    for part, values in zip(("gate", "up"), fused, strict=True):
        assert torch.equal(found[0][f"{layer}.1.{part}_proj.weight"], values)


def changed(source: Path, folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    weights = folder / "model.safetensors"
    save_file(load_file(weights) | tensors, weights)
    return folder


@pytest.mark.parametrize(
    ("name", "config", "match"),
    [
        ("mixtral", {"num_local_experts": 3}, r"unexpected: .*experts\.down_proj"),
        ("mixtral", {"intermediate_size": 47}, r"wrongly shaped: .*is \[64, 48\], not \[64, 47\]"),
        ("qwen3-moe", {"num_local_experts": 7}, r"missing: .*experts\.6\.down_proj"),
        ("qwen3-moe", {"mlp_only_layers": []}, r"missing: model\.layers\.1\.mlp\.experts"),
    ],
)
def test_other_experts_than_config_json_says(
    tiny: Tiny, tmp_path: Path, name: str, config: dict[str, Any], match: str
) -> None:
    with pytest.raises(WeightMismatchError, match=match):
        read(changed(tiny(name), tmp_path / "m", {}, **config))


@pytest.mark.parametrize(
    ("name", "config", "match"),
    [
        ("qwen3-moe", {"num_experts_per_tok": 7}, "'num_experts_per_tok' is 7.* within 1 to 6"),
        ("qwen3-moe", {"num_local_experts": 10**9}, "'num_local_experts' is 10+,"),
        ("qwen3-moe", {"mlp_only_layers": "1"}, "'mlp_only_layers' must be a list"),
        ("qwen3-moe", {"norm_topk_prob": 1}, "'norm_topk_prob' is 1"),
        ("glm4-moe", {"n_group": 4}, "'n_group' is 4, of which 6 experts"),
        ("glm4-moe", {"n_group": 6, "topk_group": 6}, "'n_group' is 6, of which 6 experts"),
        ("glm4-moe", {"topk_group": 4}, "'topk_group' is 4"),
        ("glm4-moe", {"topk_group": 1}, "'topk_group' of 1 groups leaves fewer experts"),
        ("glm4-moe", {"first_k_dense_replace": "1"}, "'first_k_dense_replace' is '1'"),
        ("glm4-moe", {"use_qk_norm": 0}, "'use_qk_norm' is 0, neither true nor false"),
        ("olmoe", {"clip_qkv": 8.0}, r"'clip_qkv' is 8\.0, which is not supported"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "'scoring_func' is 'softmax'.* not supported"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "'moe_layer_freq' .* not supported; supported: 1$"),
        ("deepseek-v2", {"norm_topk_prob": True}, "'norm_topk_prob' is True, .* not supported"),
        ("deepseek-v3", {"topk_method": "greedy"}, "'topk_method' is 'greedy', .* not supported"),
        ("glm4-moe", {"scoring_func": "softmax"}, "'scoring_func' is 'softmax', .* not supported"),
        ("deepseek-v2", {"scoring_func": "sigmoid"}, "'scoring_func' is 'sigmoid'.* not supported"),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    tiny: Tiny, tmp_path: Path, name: str, config: dict[str, Any], match: str
) -> None:
    with pytest.raises(ModelLoadError, match=match) as caught:
        read_model_config(changed(tiny(name), tmp_path / "m", {}, **config))
    assert isinstance(caught.value, CorruptModelError) or "not supported" in match


def test_a_layer_that_drafts_is_left_out(tiny: Tiny, tmp_path: Path) -> None:
    """GLM's; of another model it would be a layer too many."""
    names = ("model.layers.3.eh_proj.weight", "model.layers.3.mlp.experts.0.up_proj.weight")
    more = {name: torch.ones(2, 2) for name in names}
    drafter = changed(tiny("glm4-moe"), tmp_path / "glm", more)
    assert read(drafter).keys() == read(tiny("glm4-moe")).keys()
    with pytest.raises(WeightMismatchError, match=r"2 unexpected: model\.layers\.3"):
        read(changed(tiny("qwen3-moe"), tmp_path / "qwen", more))


def test_a_bias_of_the_choice_stays_in_float32(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[MixtureWeights] = []

    def make(ops: LayerOps, weights: MixtureWeights, *more: Any) -> Product:
        seen.append(weights)
        return make_mixture(ops, weights, *more)

    monkeypatch.setattr(layer_builder, "make_mixture", make)
    folder, cpu = tiny("glm4-moe"), torch.device("cpu")
    load_model(folder, EngineConfig(str(folder)), cpu, torch.bfloat16, TorchOps())
    stored = read(tiny("glm4-moe"))
    for layer, weights in enumerate(seen, 1):
        bias = stored[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
        held = weights.routing.choice_bias
        assert weights.router.dtype is torch.bfloat16 and held is not None
        assert torch.equal(held, bias)
        assert not torch.equal(bias, bias.bfloat16().float())
    assert len(seen) == 2
