"""Settings: unknown names are explained, bad values are refused."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nasties import NASTIES, Unprintable

from nanoengine.config.engine import EngineConfig, make_config
from nanoengine.devices.select import make_device
from nanoengine.errors import ConfigError, InvalidParamsError
from nanoengine.sampling_params import BeamSearchParams, SamplingParams


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
        {"tensor_parallel_size": 0},
        {"tensor_parallel_size": 65},
        {"decode_reserve_blocks": -1},
        {"device": 5},
        {"device": "cuda:99999999999999999999"},
        {"device": "cuda:01"},
        {"device": torch.device("meta")},
        {"tokenizer": 5},
        {"tokenizer": b"x"},
        {"tokenizer": "a\0b"},
        {"num_threads": 1025},
        {"stream_mib_per_step": float("inf")},
        {"stream_mib_per_step": 10**400},
        {"stream_mib_per_step": True},
        {"decode_reserve_blocks": 10**12},
        {"seed": 1 << 64},
        {"kvcache_block_size": (1 << 20) + 1},
        {"ring_slots": (1 << 16) + 1},
        {"max_num_partial_prefills": 1 << 31},
        {"num_gpu_blocks": 10**12},
        {"slot_tokens": 10**5000},
        {"gpu_memory_utilization": True},
        {"kv_cache_gib": True},
        {"debug_copy_delay_ms": False},
        {"tensor_parallel_size": True},
    ],
)
def test_a_bad_value_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(reversed(settings))):
        make_config("m", settings)


def test_a_bad_quantization_names_the_allowed_and_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"None \(AWQ, .*\"int8\" .*\"gguf\" .*got 'INT4'; .*mean 'int8'"
    ):
        make_config("m", {"quantization": "INT4"})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"quantization": "awq"},
            "or \"gguf\" .the codes of a GGUF are kept.*, got 'awq'$",
        ),
        ({"quantization": "wint8"}, "did you mean 'int8'"),
        ({"attention_backend": "flash_attn"}, "did you mean 'flash-attn'"),
        ({"device": "mps"}, "got 'mps'; other GPUs, Apple's too"),
    ],
)
def test_a_value_of_another_engine_is_explained(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_config("m", settings)


def test_what_only_host_kv_has_turns_offload_on() -> None:
    assert make_config("m", {}).enable_cpu_offload is False
    assert make_config("m", {"enable_cpu_offload": True}).kv_offload_gib is None
    for settings in ({"kv_offload_gib": 2}, {"kv_offload_dtype": "int8"}):
        assert make_config("m", settings).enable_cpu_offload is True
        with pytest.raises(ConfigError, match=f"{next(iter(settings))} needs enable_cpu_offload"):
            make_config("m", settings | {"enable_cpu_offload": False})
    with pytest.raises(ConfigError, match="enable_cpu_offload must be True or False, got 1"):
        make_config("m", {"enable_cpu_offload": 1})


def test_dtype_has_its_usual_spellings() -> None:
    import torch

    spellings = ("bf16", "bfloat16", torch.bfloat16)
    assert {make_config("m", {"dtype": s}).dtype for s in spellings} == {"bfloat16"}


@pytest.mark.parametrize("model", [5, b"x", None, True, "a\0b", Path("\0"), "\ud800"])
def test_a_model_is_named_by_a_text_or_a_path(model: object) -> None:
    with pytest.raises(ConfigError, match="model must be"):
        make_config(model, {})


def test_paths_devices_and_numbers_of_other_libraries_are_taken_as_python_s_own() -> None:
    config = make_config(
        Path("folder"),
        {
            "tokenizer": Path("other"),
            "device": torch.device("cuda", 3),
            "max_num_seqs": np.int64(8),
            "seed": np.uint64((1 << 64) - 1),
            "gpu_memory_utilization": np.float32(0.5),
            "kv_cache_gib": np.int32(2),
        },
    )
    found = (config.model, config.tokenizer, config.device, config.max_num_seqs, config.seed)
    assert found == ("folder", "other", "cuda:3", 8, (1 << 64) - 1)
    numbers = (config.max_num_seqs, config.gpu_memory_utilization, config.kv_cache_gib)
    assert [type(number) for number in numbers] == [int, float, int]
    assert make_config("m", {"device": torch.device("cpu")}).device == "cpu"


@pytest.mark.parametrize("value", ["1025", "0002147483648", "9" * 5000])
def test_an_absurd_omp_num_threads_is_named(
    value: str, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(ConfigError, match=r"^OMP_NUM_THREADS=\d{4,20} is above 1024 .*num_threads"):
        make_device("cpu", None)
    assert make_device("cpu", 1).name == "cpu"


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="'cuda:2' was asked for, but the last of 2 is cuda:1"):
        make_device("cuda:2", None)
    for name in ("cuda:²", "cuda:-1", "cuda:02"):
        with pytest.raises(ConfigError, match="device must be"):
            make_device(name, None)


PLAIN = {type(None), bool, int, float, str, np.str_}


def settle(name: str, make: Callable[[], object]) -> object | None:
    """What is made; None, once it is refused in words that a person can read."""
    try:
        return make()
    except (ConfigError, InvalidParamsError) as error:
        text = str(error)
        assert 20 < len(text) < 500 and text.isprintable(), name
        return None


SETTINGS = [field.name for field in fields(EngineConfig)]


@pytest.mark.parametrize("name", SETTINGS)
def test_any_value_of_a_setting_is_taken_or_refused_in_words(name: str) -> None:
    num_refused = 0
    for value in NASTIES:
        model, settings = (value, {}) if name == "model" else ("m", {name: value})
        made = settle(name, lambda model=model, settings=settings: make_config(model, settings))
        assert made is None or type(getattr(made, name)) in PLAIN
        num_refused += made is None
    assert num_refused > len(NASTIES) // 2


def test_any_values_together_are_taken_or_refused_in_words() -> None:
    rng = random.Random(1)
    for _ in range(500):
        settings = {name: rng.choice(NASTIES) for name in rng.sample(SETTINGS[1:], 3)}
        settle(", ".join(settings), lambda settings=settings: make_config("m", settings))


@pytest.mark.parametrize("kind", [SamplingParams, BeamSearchParams])
def test_any_sampling_parameter_is_taken_or_refused_in_words(kind: type) -> None:
    rng = random.Random(2)
    needed = {f.name: 4 for f in fields(kind) if f.default is MISSING}
    names = [field.name for field in fields(kind)]
    for name in names:
        for value in NASTIES:
            made = settle(name, lambda name=name, value=value: kind(**needed | {name: value}))
            assert made is None or type(getattr(made, name)) in PLAIN | {tuple}
    for _ in range(500):
        asked = {name: rng.choice(NASTIES) for name in rng.sample(names, 3)}
        settle(", ".join(asked), lambda asked=asked: kind(**needed | asked))


def test_an_odd_name_of_a_setting_is_refused_quickly() -> None:
    start = time.process_time()
    for name in ("", "\0", "\ud800", "max_" * 25_000, "x" * 1_000_000):
        with pytest.raises(ConfigError, match="unknown setting") as caught:
            make_config("m", {name: 1})
        assert len(str(caught.value)) < 200
    assert time.process_time() - start < 2
    with pytest.raises(ConfigError, match="unknown setting 5"):
        make_config("m", {5: 1})  # type: ignore[dict-item]


def test_what_cannot_be_shown_is_described() -> None:
    with pytest.raises(ConfigError, match="got an integer of 16610 bits"):
        make_config("m", {"seed": 10**5000})
    with pytest.raises(ConfigError, match="got a value of type Unprintable"):
        make_config("m", {"dtype": Unprintable()})
    with pytest.raises(ConfigError, match=r"got \[0, 0, .*\.\.\.$"):
        make_config("m", {"load_format": [0] * 1_000_000})


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
        {"temperature": 10**400},
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": 0.009},
        {"logit_bias": {float("inf"): 1}},
        {"logit_bias": {1.7: 1}},
        {"logit_bias": {True: 1}},
        {"logit_bias": {5: 1, "5": 2}},
        {"logit_bias": {5: 10**400}},
        {"logit_bias": ""},
    ],
)
def test_a_bad_sampling_parameter_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidParamsError, match=next(iter(settings))):
        SamplingParams(**settings)


def test_a_seed_of_minus_one_is_none() -> None:
    """Many clients of vLLM, llama.cpp and Ollama send it for "another text each time"."""
    assert SamplingParams(seed=-1) == SamplingParams(seed=np.int64(-1)) == SamplingParams()
    before = SamplingParams(seed=-2, n=2)
    assert before.seed == -2 and before.for_completion(1).seed == (1 << 64) - 1


def test_a_tiny_temperature_is_not_divided_by() -> None:
    assert SamplingParams(temperature=1e-9).greedy
    assert SamplingParams(temperature=0.001).temperature == 0.01
    assert SamplingParams(stop="x").stop_strings == ("x",)


def test_numbers_of_other_libraries_are_taken_as_python_s_own_by_requests_too() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        n=np.int64(2),
        logprobs=np.uint8(3),
        max_tokens=np.int32(7),
        stop_token_ids=[np.int64(5), 6],
        allowed_token_ids=[np.int16(5), 9],
        logit_bias={np.int64(3): np.float64(1.5), "7": np.int8(2), 4: 1},
    )
    assert params == SamplingParams(
        temperature=0.5,
        n=2,
        logprobs=3,
        max_tokens=7,
        stop_token_ids=(5, 6),
        allowed_token_ids=(5, 9),
        logit_bias=((3, 1.5), (7, 2), (4, 1)),
    )
    numbers = (params.temperature, params.n, *params.stop_ids, *sum(params.biases, ()))
    assert {type(number) for number in numbers} == {int, float}
    assert type(BeamSearchParams(np.int64(2), np.int64(3), np.float32(1)).length_penalty) is float


def test_a_repetition_penalty_at_its_ends_leaves_finite_logits() -> None:
    for penalty in (0.01, 100):
        assert SamplingParams(repetition_penalty=penalty).repetition_penalty == penalty
    with pytest.raises(InvalidParamsError, match=r"between 0.01 and 100; 1 is off, got 1e-40"):
        SamplingParams(repetition_penalty=1e-40)
