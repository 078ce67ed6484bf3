"""What only Muse Glimmer has: its keys in config.json and in a GGUF.

Logits and ids in fp32, on every tier and on ranks are tested with the other architectures' (TINY).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_families import MUSE
from gguf_model import GGUFModel
from published import bytes_in_bf16, read_published

from nanoengine.config.model import ModelConfig
from nanoengine.errors import UnsupportedModelError
from nanoengine.loading.gguf.convert import convert_gguf
from nanoengine.loading.model_config import read_model_config

SLIDING, FULL = "sliding_attention", "full_attention"
THETA = 500000.0
TEXT: dict[str, Any] = {  # the form of meta-models/Muse-Glimmer-30B
    "final_logit_softcapping": 20.0,
    "head_dim": 128,
    "hidden_activation": "silu",
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "layer_rope_theta": [THETA if (i + 1) % 4 else 0 for i in range(52)],
    "layer_types": [SLIDING if (i + 1) % 4 else FULL for i in range(52)],
    "max_position_embeddings": 131072,
    "model_type": "muse_glimmer_text",
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "output_multiplier": 0.19611613513818404,
    "post_norm_eps": 1e-8,
    "qk_scale_factor": 3.87,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    "sliding_window": 2048,
    "vocab_size": 202048,
}


def read(folder: Path, **changes: Any) -> ModelConfig:
    text = {key: value for key, value in (TEXT | changes).items() if value != "left out"}
    whole = {
        "architectures": ["MuseGlimmerForConditionalGeneration"],
        "text_config": text,
        "vision_config": {},
    }
    return read_published(folder, whole)


def test_the_published_shape_has_the_published_size(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert round(bytes_in_bf16(config).held / 2e9) == 28
    assert config.no_rope_layers == (*range(3, 52, 4),)
    assert config.attention.score_scale == pytest.approx(3.87 / 128**0.5)
    assert (config.rms_norm_eps, config.norm_after_eps) == (1e-5, 1e-8)
    assert config.factors.logits == pytest.approx(26**0.5)


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"layer_rope_theta": "left out"}, "'layer_rope_theta' is None"),
        ({"layer_types": None}, "'layer_types' is None"),
        ({"layer_rope_theta": [1e4] * 52}, "two thetas are not supported"),
        ({"rope_parameters": "left out"}, "two thetas are not supported"),
        ({"hidden_activation": "gelu"}, "'hidden_activation' is 'gelu'"),
    ],
    ids=str,
)
def test_other_arithmetic_is_refused(tmp_path: Path, changes: dict[str, Any], about: str) -> None:
    with pytest.raises(UnsupportedModelError, match=about):
        read(tmp_path, **changes)


# -- GGUF


@pytest.fixture
def file(tiny: Callable[[str], Path]) -> GGUFModel:
    return GGUFModel(tiny("muse-glimmer"))


def test_a_file_may_say_every_so_many_th_layer(file: GGUFModel, tmp_path: Path) -> None:
    file.settings[f"{MUSE}.attention.sliding_window_pattern"] = 2
    convert_gguf(file.write(tmp_path / "model.gguf"), tmp_path)
    config = read_model_config(tmp_path)
    assert config.windows == (13, None, 13) and config.no_rope_layers == (1,)


def odd_norm(file: GGUFModel) -> None:
    file.tensors["blk.1.attn_q_norm.weight"][3] = 2.0


def norm_of_keys(file: GGUFModel) -> None:
    file.tensors["blk.1.attn_k_norm.weight"] = np.full(16, 2.0, np.float32)


def other_theta(file: GGUFModel) -> None:
    file.settings[f"{MUSE}.rope.freq_base_swa"] = 123.0


def scaled(file: GGUFModel) -> None:
    file.settings[f"{MUSE}.rope.scaling.factor"] = 4.0


@pytest.mark.parametrize(
    ("change", "about"),
    [
        (odd_norm, "more than one factor of queries"),
        (norm_of_keys, "more than one factor of queries"),
        (other_theta, "'muse-glimmer.rope.freq_base_swa' is 123"),
        (scaled, "'muse-glimmer.rope.scaling.factor' is 4"),
    ],
)
def test_other_files_are_refused(
    file: GGUFModel, tmp_path: Path, change: Callable[[GGUFModel], None], about: str
) -> None:
    change(file)
    with pytest.raises(UnsupportedModelError, match=about):
        convert_gguf(file.write(tmp_path / "model.gguf"), tmp_path)
