"""The first start: two C libraries are compiled at the same time, those that are then loaded."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import needs_compiler
from quantised import mixed_gguf

from nanoengine.config.engine import EngineConfig
from nanoengine.kernels import c_build, cpu_kernels, cpu_linear, packed_weight
from nanoengine.kernels.c_build import Source, build_together
from nanoengine.models.stored_codes import FORMATS
from nanoengine.startup import parts

pytestmark = needs_compiler
# A compiler that goes on once two of its kind are at work.
WAITS = """#!/bin/sh
: > "{folder}/$$"
for _ in $(seq 100); do
    [ $(ls {folder} | wc -l) -ge 2 ] && exec {compiler} "$@"
    sleep 0.1
done
exit 1
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where libraries go; there are none yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nanoengine" / "kernels"


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Source, Source]:
    for number in 1, 2:
        (tmp_path / f"{number}.c").write_text(f"int answer(void) {{ return NUMBER + {number}; }}\n")
    flags = ("-DNUMBER=40",)
    return Source(tmp_path / "1.c", flags), Source(tmp_path / "2.c", flags)


def test_libraries_are_compiled_at_the_same_time(
    kept: Path, sources: tuple[Source, Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, at_work = tmp_path / "compiler", tmp_path / "at_work"
    at_work.mkdir()
    compiler.write_text(WAITS.format(folder=at_work, compiler=c_build.find_compiler()))
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    build_together(*sources)
    assert len([*kept.glob("*.so")]) == 2
    monkeypatch.setattr(c_build, "_compile", None)  # nothing is compiled again
    answers = [c_build.load_library(path, None, flags).answer() for path, flags in sources]
    assert answers == [41, 42]


def test_one_library_is_left_to_who_loads_it(kept: Path, sources: tuple[Source, Source]) -> None:
    first, second = sources
    c_build.load_library(first.path, None, first.extra_cflags)
    build_together(*sources)
    assert len([*kept.glob("*.so")]) == 1
    c_build.load_library(second.path, None, second.extra_cflags)
    assert len([*kept.glob("*.so")]) == 2


def test_what_goes_wrong_is_left_to_who_loads_it(
    kept: Path, sources: tuple[Source, Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = sources
    second.path.write_text("no C")
    build_together(*sources)
    assert len([*kept.glob("*.so")]) == 1
    with pytest.raises(c_build.KernelBuildError, match="failed with status 1"):
        c_build.load_library(second.path, None, second.extra_cflags)
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.delenv("CC", raising=False)
    build_together(*sources)  # without a compiler


def test_who_interrupts_waits_for_nobody(
    kept: Path, sources: tuple[Source, Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, main = threading.Event(), threading.current_thread()

    def build(*_: Any) -> None:
        if threading.current_thread() is main:
            raise KeyboardInterrupt
        assert goes_on.wait(60)

    monkeypatch.setattr(c_build, "build_library", build)
    with pytest.raises(KeyboardInterrupt):
        build_together(*sources)
    goes_on.set()


def of_all_formats(flag: str) -> str:
    """A flag of the library that other tests use: with any formats of codes it has all."""
    name, _, value = flag.partition("=")
    every = packed_weight.held_bits(FORMATS, torch.bfloat16)
    has_codes = name == "-DHELD" and int(value, 16) & every
    return f"{name}={int(value, 16) | every:#x}" if has_codes else flag


@pytest.mark.usefixtures("threads_as_before")
@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize(
    ("is_gguf", "settings"),
    [
        (True, {}),
        (True, {"quantization": "none"}),
        (True, {"activation_dtype": "int8"}),
        (False, {}),
        (False, {"quantization": "int8"}),
    ],
)
def test_what_is_compiled_together_is_what_is_loaded(
    tiny: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_gguf: bool,
    settings: dict[str, Any],
    dtype: str,
) -> None:
    monkeypatch.setattr(cpu_linear, "held_bits", packed_weight.held_bits)
    together: list[Source] = []
    loaded: list[Source] = []
    load = c_build.load_library

    def loads(path: Path, folder: Path | None = None, flags: tuple[str, ...] = ()) -> Any:
        loaded.append(Source(path, flags))
        return load(path, folder, tuple(map(of_all_formats, flags)))

    for module in cpu_kernels, cpu_linear:
        monkeypatch.setattr(module, "load_library", loads)
    monkeypatch.setattr(parts, "build_together", lambda *sources: together.extend(sources))
    model = tiny("llama")
    if is_gguf:
        model = mixed_gguf(model, tmp_path / "gguf" / "m.gguf", "llama")
    config = EngineConfig(str(model), device="cpu", dtype=dtype, **settings)
    parts.load_parts(config, parts.make_engine_device(config))
    assert {*together} == {*loaded} and len({*loaded}) == 2
