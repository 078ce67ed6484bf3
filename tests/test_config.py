"""Settings: unknown names are explained, bad values are refused."""

from __future__ import annotations

from typing import Any

import pytest

from nanoengine.config import EngineConfig, make_config
from nanoengine.errors import ConfigError, InvalidParamsError
from nanoengine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_modell_len", "max_model_len"),
        ("kvcache_blocksize", "kvcache_block_size"),
        ("session_len", "max_model_len"),
        ("block_size", "kvcache_block_size"),
        ("cache_max_entry_count", "share of all memory"),
        ("trust_remote_code", "never run"),
        ("cpu_offload_gb", "weights"),
        ("quantisation", "quantization"),
        ("load_in_8bit", 'quantization="int8"'),
    ],
)
def test_an_unknown_setting_names_the_near_one(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        make_config("m", {name: 1})


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "int8"},
        {"max_model_len": 0},
        {"max_num_seqs": 2.5},
        {"max_num_seqs": True},
        {"max_num_seqs": 64, "max_num_batched_tokens": 63},
        {"gpu_memory_utilization": 1.5},
        {"kv_cache_gib": -1},
        {"kv_cache_gib": float("nan")},
        {"kv_cache_gib": 1, "num_gpu_blocks": 4},
        {"enable_prefix_caching": 1},
        {"load_format": "pt"},
        {"quantization": "fp8"},
        {"quantization": 8},
        {"quantization": False},
        {"tensor_parallel_size": 2},
        {"decode_reserve_blocks": -1},
    ],
)
def test_a_bad_value_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(reversed(settings))):
        make_config("m", settings)


def test_a_bad_quantization_names_the_allowed_and_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"None or one of int8, int4, gguf, got 'INT-4'.*mean 'int4'"
    ):
        make_config("m", {"quantization": "INT-4"})


def test_dtype_has_its_usual_spellings() -> None:
    import torch

    spellings = ("bf16", "bfloat16", torch.bfloat16)
    assert {make_config("m", {"dtype": s}).dtype for s in spellings} == {"bfloat16"}


def test_defaults() -> None:
    config = EngineConfig("m")
    assert config.kvcache_block_size == 256 and config.enable_prefix_caching


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": float("nan")},
        {"temperature": -0.1},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": float("inf")},
        {"top_k": -2},
        {"max_tokens": 0},
        {"min_tokens": 5, "max_tokens": 4},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": [b"a"]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": 3},
        {"seed": 1 << 64},
        {"ignore_eos": 1},
    ],
)
def test_a_bad_sampling_parameter_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidParamsError, match=next(iter(settings))):
        SamplingParams(**settings)


def test_a_tiny_temperature_is_not_divided_by() -> None:
    assert SamplingParams(temperature=1e-9).greedy
    assert SamplingParams(temperature=0.001).temperature == 0.01
    assert SamplingParams(stop="x").stop_strings == ("x",)
