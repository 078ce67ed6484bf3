"""Fixtures of all tests: tiny checkpoints by name, compiled kernels, an empty cache.

A test that wants a checkpoint asks for the fixture `tiny` and calls it with a name of TINY; a test
that wants the right answer imports it: `from checkpoints import reference, reference_greedy`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # read when Triton is first imported, by whomever
    os.environ.setdefault("TRITON_INTERPRET", "1")

from checkpoints import TINY
from marks import use_our_products

from nanoengine.kernels.cpu_kernels import CpuKernels


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a name of TINY to the checkpoint's folder, built when first asked for."""

    @functools.cache
    def folder_of(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        TINY[name](folder)
        return folder

    return folder_of


@pytest.fixture(scope="session", autouse=True)
def _one_patch_of_triton() -> None:
    """Triton's interpreter patches its language at each launch, and in each function that a kernel
    calls once more on top: many times the time of the kernels themselves. Once is enough.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if not hasattr(interpreter, "_LangPatchScope"):
        return  # one that does it in another way
    patch, patched = interpreter._patch_lang, set()

    def patch_once(function: Callable[..., object]) -> object:
        language = {id(interpreter.tl), id(interpreter.tl.core)}
        found = language.intersection(map(id, function.__globals__.values()))
        if not found <= patched:
            patch(function)
            patched.update(found)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = patch_once


@pytest.fixture(scope="session")
def build_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tests compile C kernels; the same source and flags are compiled once, for all of the
    processes that share this run.
    """
    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent
    (folder / "kernels").mkdir(exist_ok=True)
    return folder / "kernels"


@pytest.fixture(scope="session")
def kernels(build_folder: Path) -> CpuKernels:
    """The C kernels as this machine compiles them."""
    return CpuKernels.load(build_folder)


@pytest.fixture
def our_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 goes through our C products, on an emulated CPU where this one lacks AVX512-BF16."""
    use_our_products(monkeypatch)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two torch threads, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def threads_as_before() -> Iterator[None]:
    """Puts torch's thread count back, which engines set, when the tests of a file are done."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty XDG_CACHE_HOME, for tests of what is put there."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`-m ''` runs everything that the machine can run."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
