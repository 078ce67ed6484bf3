"""Where models and kernels are kept, and what happens where nothing can be kept."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from marks import needs_compiler

from nanoengine.devices import cache_folders
from nanoengine.errors import ConfigError, ModelLoadError
from nanoengine.kernels import c_build
from nanoengine.loading import model_cache

ANSWER = "int answer(void) { return 42; }\n"


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No home, no entry for the user, no temporary folder; an empty working directory."""
    for name in ("HOME", "XDG_CACHE_HOME", *cache_folders.TEMPORARY_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(cache_folders, "TEMPORARY_FOLDERS", ())
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def answer_source(folder: Path) -> Path:
    source = folder / "answer.c"
    source.write_text(ANSWER)
    return source


def test_the_cache_comes_first_and_then_temporary_folders(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    private = tmp_path / f"nanoengine-{os.getuid()}"
    assert [*cache_folders.cache_folders()] == [Path("/cache/nanoengine"), private]
    assert private.stat().st_mode & 0o777 == 0o700
    private.chmod(0o777)  # somebody else could have filled it
    assert [*cache_folders.cache_folders()] == [Path("/cache/nanoengine")]


@pytest.mark.parametrize("name", ["XDG_CACHE_HOME", "TMPDIR"])
def test_a_relative_folder_counts_as_unset(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, ".")
    assert [*cache_folders.cache_folders()] == [] and not any(nowhere.iterdir())


@needs_compiler
def test_kernels_are_kept_where_nobody_else_may_write(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = answer_source(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept = tmp_path / "cache" / "nanoengine" / "kernels"
    assert c_build.load_library(source).answer() == 42
    assert kept.stat().st_mode & 0o777 == 0o700 and len(list(kept.iterdir())) == 1
    kept.chmod(0o777)
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("TMPDIR", str(other))
    assert c_build.load_library(source).answer() == 42
    assert len(list(other.glob("nanoengine-*/kernels/*.so"))) == 1


@needs_compiler
def test_a_folder_that_is_full_is_passed_over_and_nothing_stays_behind(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own choice of a temporary folder, of which nothing stays, is the last resort."""
    last = tmp_path / "last"
    last.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(last))
    build = c_build.build_library

    def full(folder: Path, *rest: object) -> Path:
        if folder.is_relative_to(tmp_path / "cache"):
            raise OSError(28, "No space left on device")
        return build(folder, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(c_build, "build_library", full)
    assert c_build.load_library(answer_source(tmp_path)).answer() == 42
    assert not any(last.iterdir()) and not any(nowhere.iterdir())


@needs_compiler
def test_without_any_folder_kernels_and_conversions_say_what_to_set(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_folder(**_: object) -> None:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr("tempfile.TemporaryDirectory", no_folder)
    with pytest.raises(c_build.KernelBuildError, match="set XDG_CACHE_HOME"):
        c_build.load_library(answer_source(tmp_path))
    with pytest.raises(ModelLoadError, match="neither a home nor a temporary folder"):
        model_cache.cached_folder("x", lambda _: "")


def test_the_limit_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cache_folders.LIMIT_VARIABLE, raising=False)
    assert cache_folders.cache_limit() == 64 << 30
    monkeypatch.setenv(cache_folders.LIMIT_VARIABLE, "0.5")
    assert cache_folders.cache_limit() == 1 << 29
    for wrong in ("-1", "much", "nan", "inf", "1e30"):
        monkeypatch.setenv(cache_folders.LIMIT_VARIABLE, wrong)
        with pytest.raises(ConfigError, match=f"NANOENGINE_CACHE_GIB must be .* got '{wrong}'"):
            cache_folders.cache_limit()


def test_the_size_of_a_folder_counts_links_as_links(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"x" * 1000)
    (tmp_path / "link").symlink_to("a/file")
    assert 1000 < cache_folders.disk_bytes(tmp_path) < 1100
    assert cache_folders.disk_bytes(tmp_path / "none") == 0


@needs_compiler
def test_old_libraries_and_what_killed_compilers_left_go(tmp_path: Path) -> None:
    """Eight libraries stay, and all that were used within a day."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    week_ago = time.time() - 7 * 24 * 3600
    for age, name in enumerate(["young.tmp", *(f"{i}.so" for i in range(10)), "old.tmp", "cc1.s"]):
        (folder / name).touch()
        os.utime(folder / name, (week_ago - age, week_ago - age))
    (folder / "young.tmp").touch()
    source = answer_source(tmp_path)
    made = c_build.build_library(folder, source=source)
    kept = {made.name, "young.tmp", *(f"{i}.so" for i in range(8))}
    assert {path.name for path in folder.iterdir()} == kept
    os.utime(made, (0, 0))
    assert c_build.build_library(folder, source=source) == made
    assert made.stat().st_mtime > week_ago  # it was used now


START = """
import os, pwd, sys, tempfile
from nanoengine.devices import cache_folders
cache_folders.TEMPORARY_FOLDERS = ()
tempfile.gettempdir = lambda: (_ for _ in ()).throw(FileNotFoundError("no temporary folder"))
pwd.getpwuid = lambda uid: (_ for _ in ()).throw(KeyError(uid))
from nanoengine import LLM, SamplingParams
with LLM(sys.argv[1], num_gpu_blocks=4, kvcache_block_size=16) as llm:
    print(llm.plan)
    print(llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids)
"""


@pytest.mark.breadth
def test_an_engine_starts_without_home_and_without_any_folder(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("HOME", "XDG_CACHE_HOME", *cache_folders.TEMPORARY_VARIABLES)
    }
    done = subprocess.run(
        [sys.executable, "-c", START, str(tiny("llama"))],
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no folder for compiled kernels can be written" in done.stdout
    assert not any(tmp_path.iterdir())


def compiler(folder: Path, lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is this program of a shell."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o700)
    monkeypatch.setenv("CC", str(path))


@needs_compiler
def test_a_disk_that_the_compiler_finds_full_is_passed_over(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, last = tmp_path / "full", tmp_path / "last"
    last.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(full))
    monkeypatch.setattr("tempfile.tempdir", str(last))
    told = 'echo "error writing to x.s: No space left on device" >&2; exit 1'
    compiler(tmp_path, f'case "$TMPDIR" in {full}/*) {told};; esac; exec gcc "$@"', monkeypatch)
    assert c_build.load_library(answer_source(tmp_path)).answer() == 42
    assert not any(path.is_file() for path in full.rglob("*"))


@needs_compiler
def test_a_full_disk_is_not_tried_again_where_another_folder_has_the_library(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler finds out at its end, after half a minute for the real kernels."""
    full, other, log = tmp_path / "full", tmp_path / "other", tmp_path / "log"
    other.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(full))
    monkeypatch.setenv("TMPDIR", str(other))
    told = 'echo "error writing to x.s: No space left on device" >&2; exit 1'
    case = f'case "$TMPDIR" in {full}/*) {told};; esac; exec gcc "$@"'
    compiler(tmp_path, f"echo run >> {log}; {case}", monkeypatch)
    for _ in range(2):
        assert c_build.load_library(answer_source(tmp_path)).answer() == 42
        assert log.read_text().count("run") == 2


def test_a_compiler_that_takes_too_long_ends_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gcc does not end those that compile for it when it is killed."""
    child = tmp_path / "child"
    child.touch()
    compiler(tmp_path, f"sleep 600 & echo $! > {child}; wait", monkeypatch)
    for seconds in (0.5, 4.0, 60.0):  # a busy machine may need longer to start the child
        monkeypatch.setattr(c_build, "_BUILD_TIMEOUT_S", seconds)
        with pytest.raises(c_build.KernelBuildError, match="timed out"):
            c_build.build_library(tmp_path, source=answer_source(tmp_path))
        if child.read_text():
            break
    state = Path("/proc", child.read_text().strip(), "stat")
    end = time.monotonic() + 60
    while state.exists() and state.read_text().split()[2] != "Z":  # nobody may wait for it here
        assert time.monotonic() < end
        time.sleep(0.01)


@needs_compiler
def test_files_of_another_compiler_may_vanish_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, look = tmp_path / "kernels", Path.stat
    folder.mkdir()
    (folder / "cc1.s").touch()

    def look_once(self: Path, **rest: Any) -> os.stat_result:
        found = look(self, **rest)
        if self.name == "cc1.s":
            self.unlink()
        return found

    monkeypatch.setattr(Path, "stat", look_once)
    assert c_build.build_library(folder, source=answer_source(tmp_path)).exists()


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            cache_folders.replace_file(tmp_path / "file", "x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not any(tmp_path.iterdir())
