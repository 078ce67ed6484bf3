"""Pages that are written from the engine's own data say what it says today."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
from models_page import FAMILIES, models_page
from pages import DOCS, OTHER_VALUES, PAGES, values_of

from nanoengine.cli.flags import SETTINGS as FLAGS
from nanoengine.config.engine import GIB, EngineConfig
from nanoengine.errors import ConfigError
from nanoengine.loading.gguf.settings import ARCHITECTURES as GGUF_ARCHITECTURES
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.startup.memory_plan import DEFAULT_CPU_KV_BYTES, DEFAULT_HOST_KV_BYTES
from nanoengine.text.tool_syntax import TOOL_SYNTAXES

SETTINGS = {field.name for field in fields(EngineConfig)} - {"model"}


@pytest.mark.parametrize("name", PAGES)
def test_a_written_page_is_up_to_date(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    assert text == PAGES[name](), f"docs/{name} is out of date: run `make pages`"


def test_the_settings_page_has_every_setting_once() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\|.*\|.*\|.*\|$", PAGES["settings.md"](), re.MULTILINE)
    assert sorted(rows) == sorted(SETTINGS)
    assert all(values_of(name) for name in SETTINGS)


def test_how_much_kv_there_is_without_a_setting_is_said() -> None:
    host, cpu = (size // GIB for size in (DEFAULT_HOST_KV_BYTES, DEFAULT_CPU_KV_BYTES))
    assert FLAGS["KV offload"]["kv_offload_gib"].endswith(f"(unset: {host} at most)")
    assert FLAGS["memory and length"]["kv_cache_gib"].endswith(f"(unset: on a CPU {cpu} at most)")
    text = " ".join((DOCS / "features.md").read_text(encoding="utf-8").split())
    assert f"of CPU memory ({host}, or a quarter" in text and f"on a CPU {cpu} GiB, or half" in text


def test_the_page_of_models_has_every_class_once_and_all_that_is_read() -> None:
    classes = [name for family in FAMILIES for name in family.architectures]
    missing = sorted(set(ARCHITECTURES) - set(classes))
    assert not missing, f"add {missing} to FAMILIES in tests/helpers/models_page.py: `make pages`"
    assert sorted(classes) == sorted(ARCHITECTURES)
    rows = [
        row.split(" | ") for row in models_page().splitlines() if row.endswith("ForCausalLM` |")
    ]
    ggufs = {name for row in rows for name in row[4].partition(";")[0].split(", ")}
    assert ggufs - {"-"} == set(GGUF_ARCHITECTURES)


def test_the_page_of_forms_names_every_parser_of_calls() -> None:
    text = (DOCS / "structured.md").read_text(encoding="utf-8")
    assert [row.name for row in TOOL_SYNTAXES if f"`{row.name}`" not in text] == []


ENDS: dict[str, tuple[list[Any], list[Any]]] = {
    "tokenizer": (["folder"], [5]),
    "chat_template": (["file", "{{ messages }}"], [5]),
    "dtype": (["auto", "bfloat16", "float16", "float32"], ["float64"]),
    "device": (["auto", "cpu", "cuda", "cuda:7", "xpu", "npu:1"], ["mps", "xpu:", "npu:01"]),
    "gpu_memory_utilization": ([0.001, 1], [0, 1.001]),
    "speculative": (["ngram:1", "ngram:64"], ["ngram:0", "ngram:65"]),
    "draft_model": (["folder"], [5]),
    "lora": (["folder"], [5]),
    "prefix_cache_file": (["file"], [5]),
    "debug_copy_delay_ms": ([0, 1000], [-1, 1000.5]),
}


def test_values_that_no_table_of_the_config_holds_are_those_it_takes() -> None:
    assert ENDS.keys() == OTHER_VALUES.keys()
    for name, (taken, refused) in ENDS.items():
        for value in taken:
            EngineConfig("m", **{name: value})
        for value in refused:
            with pytest.raises(ConfigError, match=name):
                EngineConfig("m", **{name: value})
