"""Sampling defaults from generation_config.json: read as transformers does, used on request."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from nanoengine import LLM, ConfigError, SamplingParams
from nanoengine.errors import CorruptModelError
from nanoengine.loading.generation_config import SAMPLING_KEYS, read_sampling_params

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "kvcache_block_size": 8,
    "num_gpu_blocks": 40,
    "num_threads": 1,
}
VALUES: dict[str, Any] = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.05,
}


@pytest.fixture
def folder(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    made = tmp_path / "model"
    shutil.copytree(tiny("qwen3"), made)
    return made


def write(folder: Path, **values: Any) -> None:
    """Change keys of the folder's generation_config.json."""
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values), encoding="utf-8")


def test_it_is_what_transformers_reads(folder: Path) -> None:
    write(folder, do_sample=True, max_new_tokens=99, **VALUES)
    theirs = GenerationConfig.from_pretrained(folder)
    found = read_sampling_params(folder)
    assert {key: getattr(found, key) for key in SAMPLING_KEYS} == VALUES
    assert {key: getattr(theirs, key) for key in SAMPLING_KEYS} == VALUES
    assert found == SamplingParams(**VALUES)


def test_what_it_does_not_say_is_the_default(folder: Path) -> None:
    write(folder, temperature=0.6, top_k=None)
    assert read_sampling_params(folder) == SamplingParams(temperature=0.6)
    (folder / "generation_config.json").unlink()
    assert read_sampling_params(folder) == SamplingParams()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, {"temperature": 0.8, "top_k": 40}),
        ({"repetition_penalty": 1.1}, {"temperature": 0.8, "top_k": 40, "repetition_penalty": 1.1}),
        ({"top_p": 0.95}, {"top_p": 0.95}),
        ({"temperature": 1.0}, {}),
    ],
)
def test_a_base_stands_where_the_model_says_nothing(
    said: dict[str, Any], expected: dict[str, Any], folder: Path
) -> None:
    """One key of a model's is meant with the defaults of the others."""
    write(folder, **said)
    base = SamplingParams(temperature=0.8, top_k=40)
    assert read_sampling_params(folder, base) == SamplingParams(**expected)


@pytest.mark.parametrize("setting", [None, "vllm", "auto"])
def test_requests_use_it_when_asked_to(folder: Path, setting: str | None) -> None:
    """What tells is the repetition penalty, so large that no token comes twice."""
    write(folder, temperature=0.0, repetition_penalty=100.0)
    with LLM(folder, generation_config=setting, **SETTINGS) as llm:
        defaults = llm.get_default_sampling_params()
        assert defaults == SamplingParams(temperature=0.0, repetition_penalty=100.0)
        expected = defaults if setting == "auto" else SamplingParams()
        found, explicit = llm.generate([[5, 6], [5, 6]], [None, expected], use_tqdm=False)
        assert llm.llm_engine.inputs.default_params == expected
        if setting == "auto":
            assert found["token_ids"] == explicit["token_ids"]
        plain = SamplingParams(temperature=0.0, max_tokens=16)
        given = llm.generate([5, 6], plain, use_tqdm=False)[0]["token_ids"]
        assert given != llm.generate([5, 6], defaults, use_tqdm=False)[0]["token_ids"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_k", 2.5),
        ("top_p", 0),
        ("min_p", True),
        ("repetition_penalty", float("nan")),
    ],
)
def test_a_bad_value_names_the_file(folder: Path, key: str, value: Any) -> None:
    write(folder, **{key: value})
    with pytest.raises(CorruptModelError, match=rf"generation_config\.json: {key} must be"):
        LLM(folder, generation_config="auto", **SETTINGS)
    with LLM(folder, **SETTINGS) as llm:
        assert len(llm.generate([5, 6], use_tqdm=False)[0]["token_ids"]) > 0
        with pytest.raises(CorruptModelError, match=rf"generation_config\.json: {key} must be"):
            llm.get_default_sampling_params()


@pytest.mark.parametrize(
    "value", [10**400, -(10**400), [1], {"a": 1}, "x" * 9999, "\ud800"], ids=range(6)
)
@pytest.mark.parametrize("key", SAMPLING_KEYS)
def test_any_wrong_value_names_the_file(folder: Path, key: str, value: Any) -> None:
    write(folder, **{key: value})
    with pytest.raises(CorruptModelError, match=r"generation_config\.json"):
        read_sampling_params(folder)


@pytest.mark.parametrize("setting", ["model", "", True, 1])
def test_another_setting_is_refused(setting: Any) -> None:
    with pytest.raises(ConfigError, match='generation_config must be "auto"'):
        LLM("smollm2-135m", generation_config=setting)
