"""What only Falcon-H1 has: attention and a Mamba-2 mixer in each layer, and muP multipliers.

Logits and ids, on every tier and on ranks, are tested with the other architectures' (TINY).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantised
import torch
from checkpoints import reference, reference_logits
from driver import Driver, small_engine
from marks import needs_compiler
from tiny_model import COMMON

from nanoengine.config.model import ModelConfig, RecurrentConfig
from nanoengine.errors import ConfigError, CorruptModelError, UnsupportedModelError
from nanoengine.kernels import cpu_ops
from nanoengine.loading.loader import open_checkpoint
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.shard import Shard

Tiny = Callable[[str], Path]
NUM_LAYERS = int(COMMON["num_hidden_layers"])
PROMPTS = [[*range(5, 45)], [7, 8]]


@needs_compiler
@pytest.mark.usefixtures("our_products")
def test_what_follows_attention_stays_one_call(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    fused = cpu_ops.PackedAfterAttention
    monkeypatch.setattr(
        cpu_ops, "PackedAfterAttention", lambda *parts: made.append(parts) or fused(*parts)
    )
    small_engine(tiny("falcon-h1")).close()
    assert len(made) == NUM_LAYERS


def test_every_layer_has_kv_and_a_state(tiny: Tiny) -> None:
    engine = small_engine(tiny("falcon-h1"), dtype="float32")
    kv = engine.plan.kv
    assert kv.recurrent is not None and len(kv.recurrent.layers) == kv.num_layers == NUM_LAYERS
    inputs, memory = 3 * (96 + 2 * 20), 8 * 20 * 12  # of one layer
    assert kv.bytes_of_a_state == NUM_LAYERS * 4 * (inputs + memory)
    assert kv.block_bytes == NUM_LAYERS * 2 * kv.block_size * 2 * 16 * 4
    engine.close()


@needs_compiler
@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize("kind", ["awq", "gptq", "fp8"])
def test_codes_are_multiplied_by_what_stands_beside_them(
    tiny: Tiny, tmp_path: Path, kind: str
) -> None:
    """Logits are transformers' of the numbers that the codes stand for."""
    path = quantised.quantised(tiny("falcon-h1"), tmp_path / kind, kind, lambda name: False)
    small = {
        name: tensor * 0.02 if "scale" in name else tensor
        for name, tensor in quantised.all_tensors(path).items()
    }
    content = json.loads((path / "config.json").read_text())
    path = quantised.copied(path, tmp_path / "small", small, **content)
    stored = quantised.all_tensors(tiny("falcon-h1"))
    with open_checkpoint(path, read_model_config(path)) as reader:
        parts = {"linear_attn": "mamba", "mlp": "feed_forward"}
        for name in reader.names():
            whole = name.replace("model.norm", "model.final_layernorm")
            for ours, theirs in parts.items():
                whole = whole.replace(f".{ours}.", f".{theirs}.")
            stored[whole] = reader.numbers(name, torch.float32).float().contiguous()
    numbers = quantised.copied(tiny("falcon-h1"), tmp_path / "numbers", stored)
    driver = Driver(small_engine(path, dtype="float32"))
    assert driver.engine.plan.quantization
    for prompt, output in zip(PROMPTS, driver.run(PROMPTS), strict=True):
        ids = prompt + output.outputs[0].token_ids
        wanted = reference_logits(reference(numbers), ids)[len(prompt) - 1 : -1]
        found = torch.stack(driver.logits[output.request_id])
        torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


# -- config.json

PUBLISHED: dict[str, Any] = {  # the form of tiiuae/Falcon-H1-0.5B-Instruct
    "architectures": ["FalconH1ForCausalLM"],
    "attention_bias": False,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "attn_layer_indices": None,
    "embedding_multiplier": 5.656854249492381,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "key_multiplier": 0.390625,
    "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 128,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "max_position_embeddings": 16384,
    "mlp_bias": False,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "model_type": "falcon_h1",
    "num_attention_heads": 8,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "projectors_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1e11,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587,
    "tie_word_embeddings": False,
    "vocab_size": 32784,
}


def read(folder: Path, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(PUBLISHED | changes))
    return read_model_config(folder)


def test_a_published_config_is_read(tmp_path: Path) -> None:
    config = read(tmp_path)
    layers = tuple(range(36))
    assert config.recurrent == RecurrentConfig(layers, 1, 24, 128, 64, 4, rule="mamba", norm="none")
    assert config.attention_layers == config.kv_layers == [*layers]
    assert (config.bare_layers, config.no_rope_layers, config.windows) == ((), (), ())
    assert config.attention.score_scale == pytest.approx(64**-0.5 * 0.390625)
    assert (config.factors.embeddings, 1 / config.factors.logits) == pytest.approx(
        (PUBLISHED["embedding_multiplier"], PUBLISHED["lm_head_multiplier"])
    )


def test_missing_keys_have_transformers_defaults(tmp_path: Path) -> None:
    names = [n for n in PUBLISHED if "multiplier" in n or n.startswith("mamba")]
    sizes = {"mamba_d_ssm": 1024, "mamba_n_heads": 128}
    content = {name: value for name, value in PUBLISHED.items() if name not in names}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = read_model_config(tmp_path)
    assert config.recurrent == RecurrentConfig(
        tuple(range(36)), 1, sizes["mamba_n_heads"], 256, 8, 4, rule="mamba", norm="none"
    )
    assert (config.factors.summands, config.attention.score_scale) == (1.0, 64**-0.5)


@pytest.mark.parametrize(
    ("size", "head_dim"), [(None, "auto"), (2048, "auto"), (None, 64)], ids=str
)
def test_the_size_of_a_mixer(tmp_path: Path, size: Any, head_dim: Any) -> None:
    """Without one it is that of the residual stream, expanded."""
    config = read(tmp_path, mamba_d_ssm=size, mamba_d_head=head_dim, mamba_n_heads=32)
    assert config.recurrent is not None and config.recurrent.value_size == 2048


ONES = [name for name, value in PUBLISHED.items() if "multiplier" in name and type(value) is float]


@pytest.mark.parametrize("name", ONES)
@pytest.mark.parametrize("value", [0, -0.2, 1e-200, 1e20, "a", True])
def test_impossible_multipliers_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(CorruptModelError, match=name):
        read(tmp_path, **{name: value})


@pytest.mark.parametrize("name", ["mlp_multipliers", "ssm_multipliers"])
@pytest.mark.parametrize("value", [[], [1.0], [1.0] * 3, [0.0] * 2, ["a"] * 5, 1.0, {}])
def test_impossible_lists_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(CorruptModelError, match=name):
        read(tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"mamba_conv_bias": False}, "mamba_conv_bias"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mamba_n_groups": 5}, "multiple of 'mamba_n_groups'"),
        ({"sliding_window": 64}, "sliding_window"),
    ],
)
def test_what_does_not_run_is_refused(tmp_path: Path, changes: dict[str, Any], about: str) -> None:
    with pytest.raises(UnsupportedModelError, match=about):
        read(tmp_path, **changes)


def test_heads_that_are_not_the_mixer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptModelError, match="24 Mamba heads of 64 are not the 1024 numbers"):
        read(tmp_path, mamba_d_ssm=1024)


def test_ranks_share_a_group_that_has_no_norm(tmp_path: Path) -> None:
    Shard(0, 4).check(read(tmp_path))
    with pytest.raises(ConfigError, match=r"1 key heads of its recurrent layers; it can be 1$"):
        Shard(0, 2).check(read(tmp_path, mamba_rms_norm=True))
