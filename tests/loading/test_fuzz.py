"""Cases that once went wrong, or are the smallest of their kind; and a few new ones in each run.

benchmarks/proofs/fuzz.py runs many more.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzz_cases import Bench, gguf_fields, make_seeds

from nanoengine.config.engine import make_config
from nanoengine.errors import EngineError
from nanoengine.loading.gguf.convert import convert_gguf
from nanoengine.sampling_params import SamplingParams
from nanoengine.text.chat_template import ChatTemplate

FUZZ = Path(__file__).parents[2] / "benchmarks" / "proofs" / "fuzz.py"
CORPUS = json.loads((Path(__file__).parents[1] / "data" / "fuzz_corpus.json").read_text())


def outcome(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except EngineError as error:
        assert str(error)
        return type(error).__name__
    return "accepted"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    seeds = tmp_path_factory.mktemp("seeds")
    make_seeds(seeds)
    yield Bench(seeds, tmp_path_factory.mktemp("scratch"))


@pytest.mark.parametrize(("name", "what", "index", "value", "wanted"), CORPUS["gguf"])
def test_a_changed_part_of_a_gguf(
    bench: Bench, tmp_path: Path, name: str, what: str, index: int, value: int, wanted: str
) -> None:
    data = bytearray(bench.ggufs[name])
    field = [field for field in gguf_fields(bytes(data)) if field.what == what][index]
    new = value.to_bytes(field.size, "little")
    assert new != data[field.position : field.position + field.size]
    data[field.position : field.position + field.size] = new
    source, target = tmp_path / "damaged.gguf", tmp_path / "converted"
    source.write_bytes(data)
    target.mkdir()
    assert outcome(convert_gguf, source, target) == wanted


@pytest.mark.parametrize(("name", "where", "value", "wanted"), CORPUS["json"])
def test_a_changed_entry_of_a_json_file(
    bench: Bench, name: str, where: list[Any], value: Any, wanted: str
) -> None:
    content = json.loads(bench.whole[name])
    holder = content
    for key in where[:-1]:
        holder = holder[key]
    holder[where[-1]] = value
    bench.put(name, json.dumps(content).encode())
    try:
        assert outcome(bench.read_folder) == wanted
    finally:
        bench.mend(name)


@pytest.mark.parametrize(("source", "wanted"), CORPUS["templates"])
def test_a_template(bench: Bench, source: str, wanted: str) -> None:
    template = ChatTemplate(source, bench.process)
    messages = [{"role": "user", "content": "a"}]
    assert outcome(template.render, messages, True, {}, {}) == wanted


@pytest.mark.parametrize(("given", "wanted"), CORPUS["settings"], ids=str)
def test_settings(given: dict[str, Any], wanted: str) -> None:
    assert outcome(make_config, "m", given) == wanted


@pytest.mark.parametrize(("given", "wanted"), CORPUS["params"], ids=lambda value: str(value)[:40])
def test_parameters(given: dict[str, Any], wanted: str) -> None:
    assert outcome(lambda: SamplingParams(**given)) == wanted


@pytest.mark.breadth
def test_a_few_new_cases_of_each_kind() -> None:
    command = [sys.executable, str(FUZZ)]
    counts = ["--cases", "100", "--loads", "2", "--minutes", "3"]
    done = subprocess.run(
        [*command, *counts], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count(" cases from 0") == 10
