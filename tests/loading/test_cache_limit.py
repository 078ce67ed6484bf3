"""The disk's share of converted models: the least recently used go, those in use and unfinished
ones of living processes stay.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_model import GGUFModel

from nanoengine import LLM
from nanoengine.devices.cache_folders import LIMIT_VARIABLE
from nanoengine.errors import ConfigError, ModelLoadError
from nanoengine.kernels.cpu_kernels import CpuKernels
from nanoengine.loading import model_cache
from nanoengine.loading.model_cache import (
    GRACE_SECONDS,
    STAGING_PREFIX,
    cached_folder,
    conversions,
    in_use,
    remove_conversion,
)

ROOT = Path(__file__).parents[2]
SIZE = 1 << 20
pytest.importorskip("fcntl")


def convert(name: str, age_hours: float = 0.0) -> Path:
    """A converted model of 1 MiB that was last used so long ago."""

    def build(folder: Path) -> str:
        (folder / "weights").write_bytes(b"x" * SIZE)
        return "in words"

    folder = cached_folder(name, build)
    then = time.time() - 3600 * age_hours
    for path in (folder, model_cache._use_mark(folder)):
        os.utime(path, (then, then))
    return folder


def names() -> set[str]:
    return {each.folder.name for each in conversions()}


@pytest.fixture
def room_for_two(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, str(2.5 * SIZE / 2**30))


@pytest.mark.usefixtures("room_for_two")
def test_the_least_recently_used_goes_first() -> None:
    convert("a", age_hours=9)
    convert("b", age_hours=8)
    cached_folder("a", lambda _: "")  # used now
    convert("c", age_hours=7)
    assert names() == {"a", "c"}
    convert("d")
    assert names() == {"a", "d"}


@pytest.mark.usefixtures("room_for_two")
def test_what_is_in_use_or_was_used_just_now_stays(caplog: pytest.LogCaptureFixture) -> None:
    first = convert("a", age_hours=9)
    convert("b", age_hours=GRACE_SECONDS / 3600 / 2)
    with in_use(first):
        os.utime(model_cache._use_mark(first), (0, 0))
        assert not remove_conversion(first)
        with caplog.at_level(logging.WARNING):
            convert("c", age_hours=9)
    assert names() == {"a", "b", "c"} and "they are in use" in caplog.text
    convert("d")
    assert names() == {"a", "b", "d"}  # a was used until now


def test_a_disk_without_room_for_a_folder_says_so_and_can_be_cleared(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = convert("a")
    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(ModelLoadError, match=r"No space left on device; free some space there \("):
        convert("b")
    assert remove_conversion(folder) and not folder.exists()
    assert not [*folder.parent.glob(f"{STAGING_PREFIX}*")]


@pytest.mark.usefixtures("room_for_two")
def test_an_engine_holds_its_conversion(
    tiny: Callable[[str], Path],
    tmp_path: Path,
    kernels: CpuKernels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        CpuKernels, "load", lambda tape: kernels
    )  # not compiled into the empty cache
    source = GGUFModel(tiny("llama")).write(tmp_path / "model.gguf")
    with LLM(source, num_threads=1, dtype="float32"):
        (held,) = conversions()
        assert not remove_conversion(held.folder) and held.folder.exists()
    assert remove_conversion(held.folder) and conversions() == []


def test_a_folder_that_is_no_conversion_is_left_alone(tmp_path: Path, fresh_cache: Path) -> None:
    with in_use(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_a_wrong_limit_is_told_before_a_conversion(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "much")
    with pytest.raises(ConfigError, match="NANOENGINE_CACHE_GIB"):
        cached_folder("a", lambda _: pytest.fail("built"))


BUILD_FOREVER = """
import sys, time
from nanoengine.loading.model_cache import cached_folder
def build(folder):
    (folder / "weights").write_bytes(b"half")
    print(folder, flush=True)
    time.sleep(600)
cached_folder(sys.argv[1], build)
"""


def begin_build(name: str) -> tuple[subprocess.Popen[str], Path]:
    """A process that is converting, and its unfinished folder."""
    command = [sys.executable, "-c", BUILD_FOREVER, name]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_an_unfinished_folder_goes_when_its_process_is_dead(fresh_cache: Path) -> None:
    dead, left = begin_build("model-a")
    alive, growing = begin_build("model-b")
    try:
        assert left.name.startswith(f"{STAGING_PREFIX}model-a-")
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        convert("model-c")
        assert not left.exists() and (growing / "weights").exists()
    finally:
        alive.kill()
        alive.wait()
    for process in (dead, alive):
        assert process.stdout is not None
        process.stdout.close()
    convert("model-b")
    assert not growing.exists() and names() == {"model-b", "model-c"}
