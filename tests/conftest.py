"""Fixtures of all tests: tiny checkpoints by name, compiled kernels, an empty cache.

A test that wants a checkpoint asks for the fixture `tiny` and calls it with a name of TINY; a test
that wants the right answer imports it: `from checkpoints import reference, reference_greedy`.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

# Before the libraries that read them at import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if not torch.cuda.is_available():  # read when Triton is first imported, by whomever
    os.environ.setdefault("TRITON_INTERPRET", "1")

from marks import leave_to_breadth, use_our_products
from quick_interpreter import speed_up
from shared_state import differences, shared_state

from nanoengine.devices import cache_folders as folders
from nanoengine.devices.cache_folders import cache_folders, is_private
from nanoengine.kernels import c_build, cpu_linear, packed_weight
from nanoengine.kernels.cpu_kernels import CpuKernels
from nanoengine.models.stored_codes import FORMATS
from nanoengine.startup import probe

if os.environ.get("TRITON_INTERPRET") == "1":
    speed_up()
torch.set_num_threads(2)  # whatever the machine has: sums of the same bits everywhere
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests interrupt themselves
pytest.register_assert_rewrite("driver")  # its assertions show both sides, too


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a name of TINY to the checkpoint's folder, built when first asked for."""
    from tiny_models import TINY  # transformers' models: seconds, where pytest only hands out tests

    @functools.cache
    def folder_of(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        TINY[name](folder)
        return folder

    return folder_of


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_changed() -> Iterator[None]:
    """A file of tests leaves what all of them share as it was: settings of the process, and the
    bytes of transformers' models, which a stray write of a kernel would change, too.
    """
    before = shared_state()
    yield
    found = differences(before, shared_state())
    if "checkpoints" in sys.modules:  # slow to import, and not there where no model was loaded
        from checkpoints import changed_references

        found += [f"the model of {path} has changed" for path in changed_references()]
    assert not found, "this file left behind: " + "; ".join(found)


@pytest.fixture(autouse=True)
def quick_probe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines do not measure their speed, as if other programs took the processor, where
    `whole_probe` is not asked for: of tiny models, on a busy machine, it means nothing.
    """
    if "whole_probe" not in request.fixturenames:
        monkeypatch.setattr(probe, "is_taken", lambda waiting: True)


@pytest.fixture
def whole_probe() -> None:
    """Engines measure their speed as they do for users."""


@pytest.fixture(scope="session")
def build_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tests compile C kernels: with those of engines, so that the same source and flags are
    compiled once for all processes and all runs.
    """
    for cache in cache_folders():
        if is_private(cache / "kernels"):
            return cache / "kernels"
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session")
def kernels(build_folder: Path) -> CpuKernels:
    """The C kernels as this machine compiles them."""
    return CpuKernels.load(build_folder)


@pytest.fixture
def our_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 goes through our C products, on an emulated CPU where this one lacks AVX512-BF16."""
    use_our_products(monkeypatch)


@pytest.fixture
def in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in bfloat16 take as much as a forecast leaves room for: it knows no numbers."""
    monkeypatch.setattr(packed_weight, "MOST_OF_16_BITS", 0)


@pytest.fixture(autouse=True, scope="session")
def one_library_of_codes() -> Iterator[None]:
    """Engines compile the formats that their weights have; in tests those of all, once."""
    with pytest.MonkeyPatch.context() as patch:
        bits = packed_weight.held_bits
        patch.setattr(cpu_linear, "held_bits", lambda held, dtype: bits(held and FORMATS, dtype))
        yield


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
def fresh_cache(tmp_path: Path, build_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty XDG_CACHE_HOME, for tests of what is put there, and no cache in temporary folders,
    where other programs of this user may have one; compiled kernels stay elsewhere.
    """
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(folders, "TEMPORARY_FOLDERS", ())
    for name in folders.TEMPORARY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(c_build, "cache_folders", lambda: iter([build_folder.parent]))
    return folder


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`-m ''` runs everything that the machine can run."""
    leave_to_breadth(items)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
