"""GGUFs of models with Mamba-2 layers: what test_gguf_layouts.py has no row for; what is refused.

The files are written as llama.cpp's conversion/nemotron.py, granite.py and falcon_h1.py write them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import reference, reference_logits
from driver import Driver, small_engine
from gguf_model import GGUFModel
from gguf_rounded import POWERS_OF_TWO, rounded
from safetensors.torch import load_file
from test_gguf_layouts import assert_answers_are, converted
from tiny_models import TINY

from nanoengine.errors import (
    CorruptModelError,
    UnsupportedModelError,
    WeightMismatchError,
)
from nanoengine.loading.model_config import read_model_config

Tiny = Callable[[str], Path]
Model = Callable[[str], GGUFModel]
MOE = "nemotron-h-moe"
EXPERTS = {
    "layers_block_type": [
        *("linear_attention", "moe", "full_attention", "moe", "linear_attention"),
        *("linear_attention", "full_attention", "moe"),
    ],
    "head_dim": 24,  # the converter calls 64 / 4 the dimensions that RoPE turns
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nemotron 3 Nano: no feed-forward without experts, of which the file would have no size."""
    row, folder = TINY[MOE], tmp_path_factory.mktemp("moe")
    replace(row, settings=row.settings | EXPERTS)(folder / "exact")
    return rounded(folder / "exact", folder / "rounded")


@pytest.fixture
def model(tiny: Tiny, experts: Path) -> Model:
    return lambda name: GGUFModel(experts if name == MOE else tiny(name))


def test_answers_of_nemotron_3_are_those_of_the_checkpoint(experts: Path, tmp_path: Path) -> None:
    assert_answers_are(experts, converted(GGUFModel(experts), tmp_path / "out"))


@pytest.mark.breadth
def test_answers_of_experts_in_a_latent_space(tiny: Tiny, tmp_path: Path) -> None:
    """As of Nemotron 3 Super."""
    folder = rounded(tiny("nemotron-h-latent"), tmp_path / "rounded")
    model = GGUFModel(folder)
    assert model.settings["nemotron_h_moe.moe_latent_size"] == 24
    assert model.tensors["blk.1.ffn_latent_down.weight"].shape == (24, 64)
    assert_answers_are(folder, converted(model, tmp_path / "out"))


def test_a_layer_that_drafts_is_left_out(experts: Path, tmp_path: Path) -> None:
    """As newer files have it: attention and experts in one layer, behind the others."""
    model = GGUFModel(experts)
    whole = dict(model.tensors)
    for name, tensor in whole.items():
        for layer in ("2", "3"):
            if name.startswith(f"blk.{layer}.") and "attn_norm" not in name:
                model.tensors[name.replace(f"blk.{layer}.", "blk.8.")] = tensor
    model.tensors["blk.8.nextn.eh_proj.weight"] = np.ones((64, 128), np.float32)
    kv, inner = "nemotron_h_moe.attention.head_count_kv", "nemotron_h_moe.feed_forward_length"
    model.settings |= {
        kv: [*model.settings[kv], 2],
        inner: [*model.settings[inner], 40],
        "nemotron_h_moe.block_count": 9,
        "nemotron_h_moe.nextn_predict_layers": 1,
    }
    assert_answers_are(experts, converted(model, tmp_path / "out"))


def test_small_numbers_are_not_rounded(tiny: Tiny, tmp_path: Path) -> None:
    """To bfloat16, in which a decay would be off by up to 1 in 256."""
    model = GGUFModel(tiny("nemotron-h"))
    stored = model.tensors["blk.0.ssm_a"].copy()
    folder = converted(model, tmp_path / "out")
    written = load_file(folder / "model.safetensors")["model.layers.0.mixer.A_log"]
    np.testing.assert_allclose(-np.exp(written.numpy()), stored.reshape(-1), rtol=1e-6)


@pytest.mark.parametrize("has_key", [True, False])
def test_rope_is_a_switch_of_granites(tiny: Tiny, tmp_path: Path, has_key: bool) -> None:
    """On in a file that does not say it, as in llama.cpp."""
    key = "granitehybrid.rope.scaling.finetuned"
    model = GGUFModel(tiny("granite-hybrid"))
    assert model.settings[key] is False
    if not has_key:
        del model.settings[key]
    config = read_model_config(converted(model, tmp_path / "out"))
    assert config.no_rope_layers == ((0, 1, 2) if has_key else ())


@pytest.mark.parametrize("has_ending", [False, True])
def test_a_falcon_with_a_norm_and_groups(tmp_path: Path, has_ending: bool) -> None:
    row = TINY["falcon-h1"]
    norm = {"mamba_rms_norm": True, "mamba_n_groups": 4, "mamba_d_conv": 3}
    replace(row, settings=row.settings | norm)(tmp_path / "made")
    source = rounded(tmp_path / "made", tmp_path / "source")
    model = GGUFModel(source)
    for layer in range(3) if has_ending else ():
        model.tensors[f"blk.{layer}.ffn_norm.weight"] = model.tensors.pop(f"blk.{layer}.ffn_norm")
    assert_answers_are(source, converted(model, tmp_path / "out"))


def test_logits_of_a_tied_falcon_are_too_large(tmp_path: Path) -> None:
    """By a factor that the file does not say: its one weight has the embeddings' multiplier."""
    row, prompt = TINY["falcon-h1"], [*range(5, 25)]
    replace(row, settings=row.settings | {"tie_word_embeddings": True})(tmp_path / "made")
    source = rounded(tmp_path / "made", tmp_path / "source")
    driver = Driver(small_engine(converted(GGUFModel(source), tmp_path / "out")))
    (output,) = driver.run([prompt])
    tokens = output.outputs[0].token_ids
    wanted = reference_logits(reference(source), prompt + tokens)[len(prompt) - 1 : -1]
    by = POWERS_OF_TWO["embedding_multiplier"] / POWERS_OF_TWO["lm_head_multiplier"]
    found = torch.stack(driver.logits[output.request_id])
    torch.testing.assert_close(found / by, wanted, atol=1e-4, rtol=0)


# -- damage and what is not supported

KV, INNER = "attention.head_count_kv", "feed_forward_length"


@pytest.mark.parametrize(
    ("name", "key", "value", "error", "match"),
    [
        ("nemotron-h", KV, [0, 2], CorruptModelError, "list of int with one for each of 7 layers"),
        ("nemotron-h", KV, [0, 0, 0, -2, 0, 0, 0], CorruptModelError, "not within 0 to"),
        ("nemotron-h", KV, [0, 0, 0, 2, 0, 0, 1], UnsupportedModelError, "0 and one other size"),
        ("nemotron-h", KV, [0] * 7, UnsupportedModelError, "0 and one other size"),
        ("nemotron-h", INNER, [96] * 6, CorruptModelError, "each of 7 layers"),
        ("nemotron-h", INNER, [96] * 7, CorruptModelError, "layer 3 has 2 KV heads and a feed-for"),
        ("nemotron-h", INNER, [0, 96, 0, 0, 48, 0, 0], UnsupportedModelError, "0 and one other"),
        ("nemotron-h", "expert_count", 4, UnsupportedModelError, "'nemotron_h.expert_count' is"),
        ("nemotron-h", "ssm.group_count", 3, CorruptModelError, "3 key heads, 8 value heads"),
        ("nemotron-h", "ssm.state_size", None, CorruptModelError, "lacks .*ssm.state_size"),
        (MOE, "expert_used_count", None, CorruptModelError, "lacks .*expert_used_count"),
        ("falcon-h1", "ssm.group_count", 3, CorruptModelError, "3 key heads, 8 value heads"),
        ("falcon-h1", "feed_forward_length", None, CorruptModelError, "lacks .*feed_forward"),
        ("granite-hybrid", KV, [2, 0], CorruptModelError, "each of 3 layers"),
        ("granite-hybrid", "ssm.inner_size", 100, CorruptModelError, "and 100 values of a"),
        ("granite-hybrid", "rope.scaling.finetuned", 0, CorruptModelError, "must be bool"),
        ("granite-hybrid", "rope.dimension_count", 8, UnsupportedModelError, "the head size 16"),
        (
            "granite-hybrid",
            "expert_shared_feed_forward_length",
            None,
            CorruptModelError,
            "lacks .*expert_shared_feed_forward_length",
        ),
    ],
)
def test_metadata_that_cannot_be_is_refused(
    model: Model, tmp_path: Path, name: str, key: str, value: Any, error: type, match: str
) -> None:
    made = model(name)
    made.settings[f"{made.arch}.{key}"] = value
    with pytest.raises(error, match=match):
        converted(made, tmp_path / "out")


def test_a_latent_space_without_its_products_is_an_error(model: Model, tmp_path: Path) -> None:
    made = model(MOE)
    made.settings["nemotron_h_moe.moe_latent_size"] = 32
    with pytest.raises(WeightMismatchError, match=r"fc1_latent_proj"):
        small_engine(converted(made, tmp_path / "out"))


@pytest.mark.parametrize("name", ["nemotron-h", "granite-hybrid"])
@pytest.mark.parametrize("part", ["ssm_in.weight", "ssm_a", "ssm_dt.bias", "ssm_norm.weight"])
def test_a_tensor_that_is_missing_is_named(
    model: Model, tmp_path: Path, name: str, part: str
) -> None:
    made = model(name)
    del made.tensors[f"blk.2.{part}"]
    with pytest.raises(WeightMismatchError, match=r"1 missing: model\.layers\.[12]\.linear_attn"):
        small_engine(converted(made, tmp_path / "out"))


@pytest.mark.parametrize(
    ("key", "value"),
    [("ssm.state_size", 16), ("ssm.time_step_rank", 16), ("ssm.conv_kernel", 3), (KV, [2, 0, 0])],
)
def test_sizes_that_are_not_the_tensors_are_refused(
    model: Model, tmp_path: Path, key: str, value: Any
) -> None:
    made = model("granite-hybrid")
    made.settings[f"granitehybrid.{key}"] = value
    with pytest.raises(WeightMismatchError, match=r"model\.layers\."):
        small_engine(converted(made, tmp_path / "out"))


def test_a_tensor_of_another_kind_has_no_place(model: Model, tmp_path: Path) -> None:
    made = model("nemotron-h")
    made.tensors["blk.0.ssm_x.weight"] = np.ones((4, 64), np.float32)
    with pytest.raises(UnsupportedModelError, match=r"'blk\.0\.ssm_x\.weight' has no place"):
        converted(made, tmp_path / "out")
