"""A process that is killed while it converts a model or compiles kernels, and another one that
wants the same.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from marks import needs_compiler

from nanoengine.kernels import c_build
from nanoengine.loading.model_cache import STAGING_PREFIX, is_whole

ROOT = Path(__file__).parents[2]
SOON_S = 60.0

CONVERTS = """
import logging, sys, time
from nanoengine.loading.model_cache import cached_folder
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
def build(folder):
    (folder / "weights").write_bytes(b"half")
    print("builds", flush=True)
    if sys.argv[1] == "for ever":
        time.sleep(600)
    return "a model"
print(cached_folder("model", build), flush=True)
"""
COMPILES = """
import sys
from pathlib import Path
from nanoengine.kernels.c_build import build_library
print(build_library(Path(sys.argv[1]), source=Path(sys.argv[2])), flush=True)
"""


@contextmanager
def started(code: str, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def lines(process: subprocess.Popen[str]) -> list[str]:
    return process.communicate(timeout=SOON_S)[0].splitlines()


@pytest.mark.usefixtures("fresh_cache")
def test_who_waits_for_a_conversion_says_so_and_goes_on_when_the_other_is_killed() -> None:
    with started(CONVERTS, "for ever") as first:
        assert first.stdout is not None and first.stdout.readline() == "builds\n"
        with started(CONVERTS, "at once") as second:
            assert second.stdout is not None
            waits = second.stdout.readline()
            assert waits.startswith("waiting for another process") and ".model.lock" in waits
            first.send_signal(signal.SIGKILL)
            *_, builds, folder = lines(second)
    assert builds == "builds" and is_whole(Path(folder))
    assert not [*Path(folder).parent.glob(f"{STAGING_PREFIX}*")]


@needs_compiler
def test_a_library_whose_builder_is_killed_is_built_by_the_next_one(tmp_path: Path) -> None:
    """Its compiler lives on for a while, and what it writes gets no library's name."""
    folder, source, slow = tmp_path / "kernels", tmp_path / "answer.c", tmp_path / "slow-cc"
    folder.mkdir()
    source.write_text("int answer(void) { return 42; }\n")
    begun = tmp_path / "begun"
    compiler = c_build.find_compiler()
    slow.write_text(f'#!/bin/sh\nif mkdir {begun}; then sleep 1; fi 2>&-\nexec {compiler} "$@"\n')
    slow.chmod(0o700)
    arguments = COMPILES, str(folder), str(source)
    with started(*arguments, CC=str(slow)) as first:
        deadline = time.monotonic() + SOON_S
        while not begun.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        first.send_signal(signal.SIGKILL)
        with started(*arguments, CC=str(slow)) as second:
            (built,) = lines(second)
        time.sleep(1.5)  # the first compiler has ended
    assert [*folder.glob("*.so")] == [Path(built)]
    assert ctypes.CDLL(built).answer() == 42
