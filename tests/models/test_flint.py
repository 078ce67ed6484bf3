"""What only Flint has: routers and attention sinks in float32, and its keys in config.json.

Logits and ids in fp32, on every tier and on ranks are tested with the other architectures' (TINY).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from published import bytes_in_bf16, read_published
from safetensors.torch import load_file

from nanoengine.config.engine import EngineConfig
from nanoengine.loading.loader import load_model
from nanoengine.models import layer_builder
from nanoengine.models.layer_ops import TorchOps

SLIDING, FULL = "sliding_attention", "full_attention"
FLINT: dict[str, Any] = {  # transformers' defaults, which are those of RecursiveSI/flint
    "architectures": ["FlintForCausalLM"],
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "layer_types": [FULL if i < 2 or i % 4 == 1 or i == 48 else SLIDING for i in range(49)],
    "max_position_embeddings": 262144,
    "model_type": "flint",
    "num_attention_heads": 32,
    "num_hidden_layers": 49,
    "num_key_value_heads": 4,
    "vocab_size": 150144,
}


def test_the_shape_and_the_layers(tmp_path: Path) -> None:
    config = read_published(tmp_path, FLINT)
    assert round(bytes_in_bf16(config).held / 2e9) == 40
    assert config.experts is not None and config.experts.dense_layers == (0, 1)
    full = tuple(i for i, kind in enumerate(FLINT["layer_types"]) if kind == FULL)
    assert config.no_rope_layers == full and config.window(2) == 513


def test_routers_and_sinks_stay_in_float32(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers keeps them in a model of 16 bits."""
    sinks: list[torch.Tensor] = []
    routers: list[torch.Tensor] = []
    attention, mixture = layer_builder.Attention, layer_builder.make_mixture

    def attend(*arguments: Any) -> Any:
        sinks.append(arguments[7])
        return attention(*arguments)

    def mix(ops: Any, weights: Any, *others: Any) -> Any:
        routers.append(weights.router)
        return mixture(ops, weights, *others)

    monkeypatch.setattr(layer_builder, "Attention", attend)
    monkeypatch.setattr(layer_builder, "make_mixture", mix)
    folder, cpu = tiny("flint"), torch.device("cpu")
    load_model(folder, EngineConfig(str(folder)), cpu, torch.bfloat16, TorchOps())
    stored = load_file(folder / "model.safetensors")
    for layer in range(3):
        wanted = stored[f"model.layers.{layer}.self_attn.softmax_offset"]
        assert not torch.equal(wanted, wanted.bfloat16().float())
        torch.testing.assert_close(sinks[layer], wanted, atol=0, rtol=0)
    for layer, router in zip((1, 2), routers, strict=True):
        wanted = stored[f"model.layers.{layer}.mlp.gate.weight"]
        torch.testing.assert_close(router, wanted, atol=0, rtol=0)
