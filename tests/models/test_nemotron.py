"""What only Nemotron 3 has: experts without a gate behind Mamba-2 and attention.

Logits and ids in fp32, on every tier and on ranks are tested with the other architectures' (TINY).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import GGUFValue
from driver import (
    Driver,
    assert_greedy,
    assert_logits_are_transformers,
    small_engine,
)
from marks import needs_compiler
from safetensors.torch import load_file
from step_bytes import step_bytes
from tiers import PROMPTS
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from nanoengine.config.model import ExpertsConfig
from nanoengine.errors import UnsupportedModelError
from nanoengine.loading.gguf.metadata import Metadata
from nanoengine.loading.gguf.settings import check_supported, model_config
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.activations import relu2
from nanoengine.models.expert_layer import make_mixture, make_router
from nanoengine.models.experts import (
    ExpertWeights,
    GroupedExperts,
    MixtureWeights,
    Routing,
)
from nanoengine.models.layer_ops import TorchOps
from nanoengine.models.shard import WHOLE
from nanoengine.models.weight_shapes import experts_of, weight_shapes
from nanoengine.startup import parts
from nanoengine.startup.weight_bytes import WeightForm, weight_bytes

Tiny = Callable[[str], Path]
NAME = "nemotron-h-moe"


def with_config(source: Path, folder: Path, **config: Any) -> Path:
    shutil.copytree(source, folder)
    path = folder / "config.json"
    whole = json.loads(path.read_text()) | config
    path.write_text(json.dumps({key: v for key, v in whole.items() if v != "left out"}))
    return folder


def assert_transformers(checkpoint: Path, original: Path) -> None:
    driver = Driver(small_engine(checkpoint))
    outputs = driver.run(PROMPTS)
    assert_greedy(original, PROMPTS, outputs, len(outputs[0].outputs[0].token_ids))
    assert_logits_are_transformers(driver, original, outputs)


def test_a_pattern_as_at_the_hub(tiny: Tiny, tmp_path: Path) -> None:
    """NVIDIA's config.json has letters; transformers 5 writes a list."""
    kinds = {"layers_block_type": "left out", "hybrid_override_pattern": "ME*EM-M*"}
    assert_transformers(with_config(tiny(NAME), tmp_path / "hub", **kinds), tiny(NAME))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (NAME, (6, 40, 64)),
        # As many inner numbers as hidden ones: its experts are [outputs, inputs] all the same.
        pytest.param("nemotron-h-latent", (6, 64, 24), marks=pytest.mark.breadth),
    ],
)
def test_one_tensor_for_all_experts_of_a_layer(
    tiny: Tiny, tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny(name))
    shutil.copytree(tiny(name), tmp_path, dirs_exist_ok=True)
    model.save_pretrained(tmp_path, save_original_format=False)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.1.mixer.experts.up_proj"].shape == shape
    assert_transformers(tmp_path, tiny(name))


def test_experts_in_a_latent_space(tiny: Tiny) -> None:
    """Of Nemotron 3 Super: as wide as what one product makes of the residual stream."""
    config = read_model_config(tiny("nemotron-h-latent"))
    assert config.experts is not None and config.experts.latent_size == config.expert_width == 24
    shapes = weight_shapes(config)
    layer = "model.layers.0.mlp."
    assert shapes[f"{layer}fc1_latent_proj.weight"] == (24, 64)
    assert shapes[f"{layer}fc2_latent_proj.weight"] == (64, 24)
    assert shapes[f"{layer}experts.5.up_proj.weight"] == (64, 24)
    assert shapes[f"{layer}shared_experts.up_proj.weight"] == (56, 64)
    assert read_model_config(tiny(NAME)).expert_width == 64


def test_a_head_of_its_own_counts_even_if_config_json_says_that_there_is_none(
    tiny: Tiny, tmp_path: Path
) -> None:
    shutil.copytree(tiny("nemotron-h"), tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    driver = Driver(small_engine(tmp_path / "m"))
    outputs = driver.run([[7 * i % 256 for i in range(20)]])
    assert_logits_are_transformers(driver, tiny("nemotron-h"), outputs)


def test_layers_are_those_of_the_pattern(tiny: Tiny) -> None:
    """And weights take what the checkpoint does."""
    config = read_model_config(tiny(NAME))
    assert [experts_of(config, layer) is not None for layer in range(5)] == [1, 1, 0, 0, 0]
    assert config.recurrent_layers == (0, 2, 3) and config.bare_layers == (3, 4)
    numbers = {k: v.numel() for k, v in load_file(tiny(NAME) / "model.safetensors").items()}
    found = weight_bytes(config, WHOLE, WeightForm(torch.float32, {}, False, False, packs=True))
    of_experts = sum(count for name, count in numbers.items() if ".experts." in name)
    assert found.held == 4 * sum(numbers.values())
    assert found.active == pytest.approx(found.held - 4 * of_experts * 4 / 6, abs=1)
    assert read_model_config(tiny("nemotron-h")).experts is None


@pytest.mark.parametrize(
    "config",
    [
        {"n_shared_experts": 2},
        {"layers_block_type": ["moe", "mamba", "attention"]},
        {"layers_block_type": ["mamba", "moe", "moe", "attention"]},
    ],
    ids=["shared experts", "experts first", "experts behind experts"],
)
def test_what_does_not_run_is_refused(tiny: Tiny, tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="supported"):
        read_model_config(with_config(tiny(NAME), tmp_path / "m", **config))


PUBLISHED: dict[str, Any] = {  # the form of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16
    "architectures": ["NemotronHForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"},
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "mamba_head_dim": 64,
    "mamba_num_heads": 64,
    "mlp_hidden_act": "relu2",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "routed_scaling_factor": 2.5,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "vocab_size": 131072,
}
QUARTER = PUBLISHED | {
    "hidden_size": 672,
    "hybrid_override_pattern": "MEM*E",
    "intermediate_size": 464,
    "mamba_num_heads": 16,
    "moe_intermediate_size": 464,
    "moe_shared_expert_intermediate_size": 928,
    "n_groups": 2,
    "n_routed_experts": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def test_the_published_shape_has_the_published_size(tmp_path: Path) -> None:
    """31.6 billion weights, 3.6 billion of them for a token."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    config = read_model_config(tmp_path)
    found = weight_bytes(config, WHOLE, WeightForm(torch.bfloat16, {}, False, False, packs=True))
    assert (round(found.held / 2e9, 1), round(found.active / 2e9, 1)) == (31.6, 3.6)
    assert len(config.recurrent_layers) == 23 and len(config.attention_layers) == 6


PUBLISHED_GGUF: dict[str, Any] = {  # the metadata of llama.cpp's files of the same model
    "attention.head_count": 32,
    "attention.head_count_kv": [2 * (kind == "*") for kind in PUBLISHED["hybrid_override_pattern"]],
    "attention.key_length": 128,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.value_length": 128,
    "block_count": 52,
    "context_length": 1048576,
    "embedding_length": 2688,
    "expert_count": 128,
    "expert_feed_forward_length": 1856,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_shared_count": 1,
    "expert_shared_feed_forward_length": 3712,
    "expert_used_count": 6,
    "expert_weights_norm": True,
    "expert_weights_scale": 2.5,
    "feed_forward_length": [1856 * (kind == "E") for kind in PUBLISHED["hybrid_override_pattern"]],
    "rope.dimension_count": 84,
    "rope.freq_base": 10000.0,
    "rope.scaling.finetuned": False,
    "ssm.conv_kernel": 4,
    "ssm.group_count": 8,
    "ssm.inner_size": 4096,
    "ssm.state_size": 128,
    "ssm.time_step_rank": 64,
}


def test_metadata_of_a_published_file_says_what_its_config_json_does(tmp_path: Path) -> None:
    fields = {f"nemotron_h_moe.{key}": GGUFValue(value) for key, value in PUBLISHED_GGUF.items()}
    fields["general.architecture"] = GGUFValue("nemotron_h_moe")
    metadata = Metadata(tmp_path / "m.gguf", fields)
    check_supported(metadata)
    stored: dict[str, Any] = {f"blk.{layer}.attn_norm.weight": None for layer in range(52)}
    for layer, size in enumerate(PUBLISHED_GGUF["feed_forward_length"]):
        stored |= {f"blk.{layer}.ffn_gate_inp.weight": None} if size else {}
    embedding = torch.empty(2688, 131072, device="meta")  # sizes in GGUF's order
    stored |= {"token_embd.weight": embedding, "output.weight": embedding}
    found = []
    for folder, config in (("ours", model_config(metadata, stored)), ("theirs", PUBLISHED)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
        found.append(read_model_config(tmp_path / folder))
    ours, theirs = found
    like_theirs = {"max_position": theirs.max_position, "stored_dtype": theirs.stored_dtype}
    assert replace(ours, **like_theirs) == theirs


@pytest.mark.some(1)
@needs_compiler
@pytest.mark.parametrize("in_c", [True, False], ids=["C", "PyTorch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_a_step_takes_is_planned(
    in_c: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside what the largest step holds, by counting."""
    (tmp_path / "config.json").write_text(json.dumps(QUARTER))
    if not in_c:
        monkeypatch.setattr(parts, "find_kernels", lambda *_: (None, "not here"))
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "dtype": dtype}

    estimated, measured = step_bytes(tmp_path, monkeypatch, load_format="dummy", **settings)
    assert measured <= estimated <= 2 * measured


def test_experts_without_a_compiler(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "find_kernels", lambda *_: (None, "not here"))
    assert_transformers(tiny(NAME), tiny(NAME))


# -- one mixture


def some(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("num_rows", [1, 19])
def test_experts_equal_a_sum_by_hand(num_rows: int) -> None:
    """One by one, and in one product for all of them."""
    x, router, ups, downs = some(num_rows, 24), some(6, 24), some(6, 16, 24), some(6, 24, 16)
    shared = ExpertWeights(None, some(20, 24), some(24, 20))
    config = ExpertsConfig(6, 3, 16, renormalises=True, shared_size=20)
    experts = [ExpertWeights(None, *each) for each in zip(ups, downs, strict=True)]
    weights = MixtureWeights(router, Routing(config), experts)
    expected = []
    for row in x:
        top = (router @ row).softmax(0).topk(3)
        parts = [
            share * (downs[at] @ functional.relu(ups[at] @ row).square())
            for share, at in zip(top.values / top.values.sum(), top.indices, strict=True)
        ]
        expected.append(torch.stack(parts).sum(0))
    ops, want = TorchOps(), torch.stack(expected)
    chosen = make_router(ops, weights, None)
    grouped = GroupedExperts(chosen, iter(experts), 6, relu2, None)
    for made in (make_mixture(ops, weights, None, "relu2"), grouped):
        torch.testing.assert_close(made(x), want, atol=1e-3, rtol=1e-4)
    both = replace(weights, shared=shared)
    more = functional.relu(x @ shared.up.T).square() @ shared.down.T  # type: ignore[union-attr]
    found = make_mixture(ops, both, None, "relu2")(x)
    torch.testing.assert_close(found, want + more, atol=1e-3, rtol=1e-4)
