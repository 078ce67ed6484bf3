"""What only Gemma 4 has: heads of two shapes, layers that share KV, inputs of each layer.

Logits and ids in fp32 in a mixed batch are tested with the other architectures' (TINY).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import (
    Driver,
    assert_greedy,
    assert_logits_are_transformers,
    assert_tiers_agree,
    host_gib,
    small_engine,
)
from torch import Tensor
from transformers import Gemma4TextConfig

from nanoengine import SamplingParams
from nanoengine.config.model import ModelConfig
from nanoengine.errors import CorruptModelError, UnsupportedModelError
from nanoengine.loading.model_config import read_model_config

NAMES = ("gemma4", "gemma4-shared", "gemma4-moe")
PROMPTS = [[7 + i, *range(5, 5 + length)] for i, length in enumerate((3, 40, 17, 70))]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
BLOCK = 8
CHUNKED = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "kvcache_block_size": BLOCK}
OFFLOAD = {"enable_cpu_offload": True, "num_gpu_blocks": 18, "stream_mib_per_step": 1e6}
LAYOUTS: dict[str, dict[str, Any]] = {
    "resident": {"num_gpu_blocks": 100},
    "in place": OFFLOAD | {"offload_mode": "in_place"},
    "stream": OFFLOAD | {"offload_mode": "stream", "slot_tokens": 2 * BLOCK, "ring_slots": 2},
}


def run(folder: Path, layout: str, **settings: Any) -> tuple[Driver, list[list[int]], list[Tensor]]:
    """The driver; of each prompt the tokens and the logits, the second time that it runs."""
    settings = CHUNKED | LAYOUTS[layout] | settings
    if "enable_cpu_offload" in settings:
        settings["kv_offload_gib"] = host_gib(folder, 200, BLOCK)
    driver = Driver(small_engine(folder, **settings))
    for is_again in (False, True):
        outputs = driver.run(PROMPTS, PARAMS)
        assert any(output.num_cached_tokens for output in outputs) == is_again
        if driver.engine.plan.dtype.startswith("float32"):
            assert_greedy(folder, PROMPTS, outputs, PARAMS.max_tokens)
            assert_logits_are_transformers(driver, folder, outputs)
    driver.engine.close()
    ids = [output.outputs[0].token_ids for output in outputs]
    return driver, ids, [torch.stack(driver.logits[output.request_id]) for output in outputs]


@pytest.mark.some(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_every_tier_gives_the_same_bits(tiny: Callable[[str], Path], name: str, dtype: str) -> None:
    """In fp32 transformers' ids and logits, too, in chunks, with prefix misses and hits."""
    runs = {layout: run(tiny(name), layout, dtype=dtype) for layout in LAYOUTS}
    assert_tiers_agree(runs)


def test_kv_is_held_once_and_takes_what_the_heads_need(tiny: Callable[[str], Path]) -> None:
    for name, numbers in (("gemma4", 2 * 2 * 16 + 24), ("gemma4-shared", 2 * 16 + 32)):
        spec = small_engine(tiny(name), num_gpu_blocks=4).kv.spec
        assert spec.block_bytes == 2 * spec.block_size * 4 * numbers
    assert (spec.num_layers, spec.layer_sources) == (3, (0, 1, 2, 1, 2, 1))


# -- config.json

# As the hub has it.
HUB: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 64,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 96,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
    "num_attention_heads": 8,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 6,
    "num_key_value_heads": 4,
    "num_kv_shared_layers": 0,
    "sliding_window": 512,
    "use_bidirectional_attention": "vision",
    "vocab_size": 300,
    "vocab_size_per_layer_input": 300,
}


def read(folder: Path, **changes: Any) -> ModelConfig:
    """Of HUB with changes; a value ... leaves its key out."""
    content = {key: value for key, value in (HUB | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(content))
    return read_model_config(folder)


SHARED = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
OWN = {"3": {"head_dim": 64}, "5": {"head_dim": 64, "num_key_value_heads": 1}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_k_eq_v": False},
        SHARED,
        dict.fromkeys(("global_head_dim", "num_global_key_value_heads", "layer_types"), ...),
        {"layer_types": ["full_attention"] * 6},
        {"per_layer_config": {"2": {"head_dim": 64}, "5": {"head_dim": 64}}},
    ],
    ids=["hub", "own values", "shared", "defaults", "no window", "saved by transformers"],
)
def test_shapes_are_read_as_transformers_does(tmp_path: Path, changes: dict[str, Any]) -> None:
    ours = read(tmp_path, **changes)
    theirs = Gemma4TextConfig.from_pretrained(tmp_path)
    for layer, (kind, sharing) in enumerate(
        zip(theirs.layer_types, theirs.kv_sharing_modes, strict=True)
    ):
        shape, own = ours.shape(layer), theirs.per_layer_config[layer]
        assert shape.kv_heads == (own.num_key_value_heads, own.head_dim)
        assert (ours.attention.window(layer) is None) == (kind == "full_attention")
        if sharing == "reuse":
            wide = 2 if theirs.use_double_wide_mlp else 1
            assert shape.intermediate_size == wide * theirs.intermediate_size
            assert theirs.kv_sharing_modes[shape.source] == "store"
            assert theirs.layer_types[shape.source] == kind
        else:
            assert (shape.source, shape.intermediate_size) == (layer, theirs.intermediate_size)
            is_key = theirs.attention_k_eq_v and kind == "full_attention"
            assert shape.values_are_keys == is_key
    full = theirs.rope_parameters["full_attention"]
    assert (ours.rope.kind, ours.rope.theta) == (full["rope_type"], full["rope_theta"])
    assert ours.rope.partial_rotary_factor == full["partial_rotary_factor"]


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        (
            {"enable_moe_block": True, "num_experts": 4},
            CorruptModelError,
            "'moe_intermediate_size'",
        ),
        ({"use_bidirectional_attention": "all"}, UnsupportedModelError, "is 'all'"),
        ({"layer_types": ["sliding_attention"] * 6}, UnsupportedModelError, "the last layer"),
        ({"per_layer_config": OWN | {"1": {"skip": ["mlp"]}}}, UnsupportedModelError, "skip"),
        ({"per_layer_config": {"6": {"head_dim": 64}}}, UnsupportedModelError, "layers 0 to 5"),
        ({"per_layer_config": {"1": {"head_dim": 0}}}, CorruptModelError, "per_layer_config.1"),
        ({"num_kv_shared_layers": 6}, CorruptModelError, "within 0 to 5"),
        ({"num_kv_shared_layers": 4}, CorruptModelError, "layer 2 shares keys and values"),
        ({"num_global_key_value_heads": 3}, UnsupportedModelError, "8 heads, 3 KV heads"),
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 200},
            UnsupportedModelError,
            "'vocab_size_per_layer_input'",
        ),
    ],
)
def test_what_cannot_run_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        read(tmp_path, **changes)
